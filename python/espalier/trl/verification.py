"""`verify=True` compares a model's first shared pass with TRL's own path on the same batch, before the batch trains.

It compares the values that TRL's head and loss read, at every token that is not padding, and the gradients of a random linear function of
these values. TRL's own path runs twice, the second time with embeddings moved by one rounding step. The distance of the two runs is the floor;
further runs raise it if it was small by chance (espalier.rows.verdict). Ranks of a sharded model compare together, with sums over all ranks: each takes
part with its own batch, and all reach the same verdict.
"""

import contextlib
import logging

import torch

from espalier.hf import probe, ranks, verification
from espalier.hf.model_parts import base_model
from espalier.rows import verdict

_log = logging.getLogger("espalier")


def compare(model, plain, shared, finish=lambda: None):
    """Returns the table of gradients, or of values for a pass without gradients. `plain()` and `shared()` compute the same list of tensors in two
    ways. `finish()`: the rest of the shared pass's backward. Raises `Error` of kind `verification` if shared is too far from plain. Restores
    `.grad`."""
    named = ranks.trained(model)
    held = [p.grad for _, p in named]
    everywhere = verification.over_shards(model)
    latest = {}  # gradients of one run at a time

    def run(values, finish=lambda: None):
        ranks.gather_head(model)
        return _run(named, values, finish)

    def other(number):
        if number not in latest:
            latest.clear()
            with probe.nudged(base_model(model).get_input_embeddings(), number):
                latest[number] = run(plain)
        return latest[number]

    with contextlib.ExitStack() as stack:
        stack.callback(_put_back, named, held)
        if everywhere is not None:
            stack.enter_context(ranks.reducing(model))
        wanted, _ = run(plain), other(0)
        found = run(shared, finish)
        losses = found[2], wanted[2]
        table = verdict.judged(lambda number: [("values", found[0], wanted[0], other(number)[0])], *losses, everywhere)
        if torch.is_grad_enabled() and (everywhere is not None or any(grad is not None for grad in wanted[1])):
            table = verdict.judged(
                lambda number: [(name, *grads) for (name, _), *grads in zip(named, found[1], wanted[1], other(number)[1])], *losses, everywhere)
    _log.info("a shared pass agrees with TRL's own\n%s", table)
    return table


def _put_back(named, held):
    for (_, p), grad in zip(named, held):
        p.grad = grad


def _run(named, make, finish):
    """(the values as one vector, the gradients, the linear function's value)."""
    for _, p in named:
        p.grad = None
    values = make()
    generator = torch.Generator().manual_seed(17)
    function = sum((value * torch.randn(value.shape, generator=generator).to(value)).sum() for value in values)
    if torch.is_grad_enabled() and function.requires_grad:
        with torch.autocast(function.device.type, enabled=False):
            function.backward()
            finish()
    return torch.cat([value.detach().flatten() for value in values]), [p.grad for _, p in named], function.item()
