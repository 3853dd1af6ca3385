"""The output layer of a call: logits of the rows that are wanted alone."""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region

from espalier.megatron.calls import current


def attach(model):
    """Makes a chunk's output layer choose rows. A head of the trainer's own, such as a critic's, runs all rows of a wave and none of a trunk."""
    layer = getattr(model, "output_layer", None)
    if layer is None:
        return
    own, chooses = layer.forward, chooses_rows(model)

    def forward(hidden, *args, **more):
        call = current()
        if call is None or call.outputs is None:
            return own(hidden, *args, **more)
        if not len(call.outputs):  # the gradient 0 of the weight, for which Megatron's DDP waits
            return own(hidden[:0], *args, **more)
        if not chooses:
            raise RuntimeError(f"{type(layer).__name__} has no rows to choose")  # the callers ask for rows of a vocabulary's head alone
        if not layer.sequence_parallel:
            return own(hidden.index_select(0, call.outputs), *args, **more)
        group = getattr(layer, "tp_group", None)
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        layer.sequence_parallel = False  # the rows are whole now; their gradient is summed over the ranks in the layer
        try:
            return own(hidden.index_select(0, call.outputs), *args, **more)
        finally:
            layer.sequence_parallel = True

    layer.forward = forward


def vocabulary_group(group):
    """The process group over which logits are sharded, or None if they are whole."""
    return group if group is not None and torch.distributed.get_world_size(group) > 1 else None


def chooses_rows(model):
    """True if a chunk's output layer is Megatron's own, of a vocabulary."""
    return isinstance(getattr(model, "output_layer", None), ColumnParallelLinear)
