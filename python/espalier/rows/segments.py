"""The segments of a call, as a function sees them that passes a state along the sequence.

A segment is a run of rows, each of which follows the one before (RowSet.segments). It starts from what its parent left: an earlier
segment of the call, or the last open trunk, or nothing. A state that n segments start from gets the sum of their gradients: within
a call by autograd in the state's own type, over several calls in the trunk's sums (float32; float64 in float64).
"""

from dataclasses import dataclass

import numpy as np
import torch

from espalier.rows.transfer import to_device
from espalier.kernels import accumulator


class Segments:
    """The segments of one call of such a function: `key` names what a trunk holds for it. `leave(state)` takes what rows after the call's last row
    start from, or is None. `all`: (begin, length, parent) in order, where the parent of a segment that follows no other of the call is
    -1 - (number of its set of rows)."""

    def __init__(self, sets, key, leave=None):
        self.sets, self.key, self.leave, self.all = sets, key, leave, []
        for number, rows in enumerate(sets):
            first = len(self.all)
            self.all += [(begin, length, first + parent if parent >= 0 else -1 - number) for begin, length, parent, _ in rows.segments]

    def above(self):
        """For every set of rows, what its last open trunk left, or None. The gradient is added to the trunk's sums."""
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        return [_Above.apply(anchor, rows.trunks[-1], self.key) if rows.trunks else None for rows in self.sets]

    def generations(self, unit):
        """Segments that may run together, in order: their parents have run, and they take the same number of chunks of `unit` rows.
        Yields lists of their indices."""
        generation, found = [], {}
        for index, (_, length, parent) in enumerate(self.all):
            generation.append(generation[parent] + 1 if parent >= 0 else 0)
            found.setdefault((generation[index], -(-length // unit)), []).append(index)
        return [found[key] for key in sorted(found)]

    def kept(self):
        """For every segment: whether another, or what follows the call, starts from its end."""
        parents = {parent for _, _, parent in self.all}
        return [index in parents or (self.leave is not None and index == len(self.all) - 1) for index in range(len(self.all))]

    def columns(self, tail):
        """The last `tail` inputs before every segment, as indices into [the tails that the trunks of every set left | the call's rows]."""
        ends, gather, own, at, first_row = [], [], [], 0, tail * len(self.sets)
        for begin, length, parent in self.all:
            before = ends[parent] if parent >= 0 else tail * (-1 - parent) + np.arange(tail)
            path = np.concatenate([before, np.arange(first_row + begin, first_row + begin + length)])
            ends.append(path[len(path) - tail:])
            gather.append(path)
            own.append(np.arange(at + tail, at + tail + length))
            at += tail + length
        return Columns(np.concatenate(gather), np.concatenate(own), ends[-1])


@dataclass(frozen=True)
class Columns:
    """`gather` [G]: for each segment the inputs before it and its own; `own` [T]: where among these the rows stand; `last` [tail]: the
    inputs at the end of the last segment."""
    gather: np.ndarray
    own: np.ndarray
    last: np.ndarray


class _Above(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, trunk, key):
        ctx.trunk, ctx.key = trunk, key
        return trunk.states[key].detach()

    @staticmethod
    def backward(ctx, go):
        ctx.trunk.add_state_gradient(ctx.key, go)
        return None, None, None


class Gather(torch.autograd.Function):
    """x with `index` along an axis. If an element is used in several places, its gradients are summed in the accumulator's type."""

    @staticmethod
    def forward(ctx, x, axis, index):
        ctx.axis, ctx.shape, ctx.dtype = axis, x.shape, x.dtype
        index, = to_device(x.device, index)
        ctx.save_for_backward(index)
        return x.index_select(axis, index)

    @staticmethod
    def backward(ctx, go):
        (index,) = ctx.saved_tensors
        wide = accumulator(ctx.dtype)
        return torch.zeros(ctx.shape, dtype=wide, device=go.device).index_add_(ctx.axis, index, go.to(wide)).to(ctx.dtype), None, None
