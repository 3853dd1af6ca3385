"""One layer's attention of a call in a GPU's fused kernels: one call for all causal runs of the rows, whatever their number and lengths, and one for
the keys and values of each open trunk, merged by log-sum-exp.

Interface: rows_by_kernel.py, with the kernels as first argument: `attend(q, k, v, runs, scale)` and `attend_backward(...)` of rows_by_flash.py or
rows_by_efficient.py. A run with rows below it in its own set takes one more call, over these rows. Inside, rows are [T, H, D] and [T, J, D], lse is
[H, T]; a backward takes the merged out and lse of the whole softmax, so that the gradients of its calls add up exactly (blocks.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from espalier.hf.transfer import queued
from espalier.ops.kernels import accumulator


def count(runs, trunks):
    """How many calls of a kernel a set of rows takes."""
    return 1 + trunks + sum(end > begin + length for begin, length, end in runs)


def forward(kernels, q, k, v, scale, sets, layer):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = kernels.attend(q, k, v, _runs(sets, q.device), scale)
    calls = _rectangles(sets, layer, k, v)
    if calls:
        out = out.to(accumulator(q.dtype))
    for call in calls:
        _merge(out[call.rows], lse[:, call.rows], *kernels.attend(q[call.rows], call.k, call.v, None, scale))
    return out.to(q.dtype)[None], lse


def backward(kernels, go, q, k, v, out, lse, scale, sets, layer):
    go, out = go[0], out[0]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    dq, *own = kernels.attend_backward(go, q, k, v, out, lse, _runs(sets, q.device), scale)
    calls = _rectangles(sets, layer, k, v)
    if calls:
        dq = dq.to(accumulator(q.dtype))
    if any(call.trunk is None for call in calls):
        own = [x.to(accumulator(q.dtype)) for x in own]
    for call in calls:
        at = call.rows
        more_q, *more = kernels.attend_backward(go[at], q[at], call.k, call.v, out[at], lse[:, at].contiguous(), None, scale)
        dq[at] += more_q
        for sums, part in zip(call.trunk.sums(layer) if call.trunk else [x[call.keys] for x in own], more):
            sums += part
    return [x.to(q.dtype).transpose(0, 1)[None] for x in (dq, *own)]


@dataclass(eq=False)
class Runs:
    """Causal sequences of the rows, one behind the other: where each begins and the last ends (int32, on the device), the same of the keys that
    each sees, and the longest of both. `lengths`: those of the rows, on the host. `held`: what else kernels read of them."""
    ends: torch.Tensor
    ends_of_keys: torch.Tensor
    longest: int
    longest_keys: int
    lengths: list
    held: dict = field(default_factory=dict)


def runs_of(device, lengths, of_keys=None):
    """Sequences of these lengths; without `of_keys` each sees itself alone."""
    both = [lengths, *([of_keys] if of_keys is not None else [])]
    ends = queued(torch.tensor([[0, *side] for side in both]).cumsum(1, dtype=torch.int32), device)
    return Runs(ends[0], ends[-1], max(both[0]), max(both[-1]), lengths)


def _runs(sets, device):
    """Made once for all layers of a call."""
    held = sets[0].on_device
    if device not in held:
        held[device] = runs_of(device, [length for rows in sets for _, length, _ in rows.runs])
    return held[device]


class _Rectangle(NamedTuple):
    """`rows` see all of the keys and values: a trunk's, or those of the call's own rows `keys`."""
    rows: slice
    k: torch.Tensor
    v: torch.Tensor
    trunk: object = None
    keys: slice | None = None


def _rectangles(sets, layer, k, v):
    found = []
    for rows in sets:
        for trunk in rows.trunks:
            above = (held[layer][0].transpose(0, 1) for held in (trunk.k, trunk.v))
            found.append(_Rectangle(slice(rows.begin, rows.end), *above, trunk))
        for begin, length, end in rows.runs:
            if end > begin + length:
                keys = slice(begin, begin + length)
                found.append(_Rectangle(slice(begin + length, end), k[keys], v[keys], None, keys))
    return found


def _merge(out, lse, more, more_lse):
    """Two softmaxes over different keys are one over both: weights exp(lse_i - logaddexp(lse_1, lse_2))."""
    both = torch.logaddexp(lse, more_lse)
    weight, more_weight = ((x - both).exp().T[..., None] for x in (lse, more_lse))
    out.mul_(weight).addcmul_(more.to(out.dtype), more_weight)
    lse.copy_(both)
