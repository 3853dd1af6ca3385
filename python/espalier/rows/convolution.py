"""The short causal convolution: a row sees its own input and the K - 1 inputs before it on its path.

A trunk leaves its last K - 1 inputs, oldest first, as they enter the convolution; of a path shorter than that, zeros before
them. A trunk of fewer rows than K - 1 hands on part of what it found.
"""

import torch

from espalier.rows.segments import Gather
from espalier.rows.transfer import to_device


def over_segments(theirs, segments, x, weight, bias=None, activation=None, **_):
    """x [1, C, T], weight [C, K] -> [1, C, T]. Every segment runs behind its tail; what the model's own function makes of the tails'
    columns is left out."""
    tail = weight.shape[-1] - 1
    if tail == 0:
        return theirs(x, weight, bias, activation=activation)
    nothing = x.new_zeros(*x.shape[:2], tail)
    path = torch.cat([nothing if above is None else above.to(x.dtype) for above in segments.above()] + [x], 2)
    columns = segments.columns(tail)
    if segments.leave is not None:
        segments.leave(Gather.apply(path, 2, columns.last))
    out = theirs(Gather.apply(path, 2, columns.gather), weight, bias, activation=activation)
    return out.index_select(2, *to_device(x.device, columns.own))
