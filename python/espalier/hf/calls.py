"""One call of the model on rows of a phase, and backwards that start from gathered gradients."""

import torch


class Seed(torch.autograd.Function):
    """A scalar 0. Its backward hands each tensor the gradient gathered for it. Arguments: tensor, gradient, tensor, gradient, ..."""

    @staticmethod
    def forward(ctx, *pairs):
        ctx.grads = pairs[1::2]
        return pairs[0].new_zeros(())

    @staticmethod
    def backward(ctx, go):
        return tuple(x for grad in ctx.grads for x in (grad, None))


def backward(loss):
    """Runs the backward outside autocast: a backward uses the types of its forward."""
    if loss is not None:
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()


def call_model(model, ids, positions, phase, outputs, **more):
    """Calls the model with rows [1, T]. Returns the logits [O, V] of rows `outputs`, and the model's output. `outputs` is a tensor: for a number,
    models whose last layers read other layers' keys (Gemma 4) run these layers for the last rows alone."""
    result = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=outputs, espalier=phase, **more)
    logits = result.logits[0]
    return logits if logits.shape[0] == len(outputs) else logits[outputs], result
