"""One layer's attention of a call in FlashAttention's kernels, as torch has them for GPUs: one call for all causal runs of the rows, whatever
their number and lengths, and one for the keys and values of each open trunk, merged by log-sum-exp.

Interface: rows_by_kernel.py. A run with rows below it in its own set takes one more call, over these rows. Heads of keys and values are not
repeated for the query heads that share them. Inside, rows are [T, H, D] and [T, J, D], lse is [H, T]; a backward takes the merged out and lse
of the whole softmax, so that the gradients of its calls add up exactly (blocks.py).
"""

from typing import NamedTuple

import torch

from espalier.ops.kernels import accumulator

LARGEST_HEAD = 256


def serves(q, v=None):
    """Whether rows of this type and on this device run here, and heads of keys and values as large as these."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return v is None or q.shape[-1] == v.shape[-1] <= LARGEST_HEAD and q.shape[-1] % 8 == 0


def count(runs, trunks):
    """How many calls of a kernel a set of rows takes."""
    return 1 + trunks + sum(end > begin + length for begin, length, end in runs)


def forward(q, k, v, scale, sets, layer):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attend(q, k, v, _runs(sets, q.device), scale)
    calls = _rectangles(sets, layer, k, v)
    if calls:
        out = out.to(accumulator(q.dtype))
    for call in calls:
        _merge(out[call.rows], lse[:, call.rows], *attend(q[call.rows], call.k, call.v, None, scale))
    return out.to(q.dtype)[None], lse


def backward(go, q, k, v, out, lse, scale, sets, layer):
    go, out = go[0], out[0]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    dq, *own = attend_backward(go, q, k, v, out, lse, _runs(sets, q.device), scale)
    calls = _rectangles(sets, layer, k, v)
    if calls:
        dq = dq.to(accumulator(q.dtype))
    if any(call.trunk is None for call in calls):
        own = [x.to(accumulator(q.dtype)) for x in own]
    for call in calls:
        at = call.rows
        more_q, *more = attend_backward(go[at], q[at], call.k, call.v, out[at], lse[:, at].contiguous(), None, scale)
        dq[at] += more_q
        for sums, part in zip(call.trunk.sums(layer) if call.trunk else [x[call.keys] for x in own], more):
            sums += part
    return [x.to(q.dtype).transpose(0, 1)[None] for x in (dq, *own)]


class Runs(NamedTuple):
    """Causal runs of the rows, one behind the other: where each begins and the last ends (int32, on the device), and the longest."""
    ends: torch.Tensor
    longest: int


def attend(q, k, v, runs, scale):
    """out [T, H, D] and lse [H, T] (float32): each run sees itself causally; without `runs` every row sees every key."""
    if runs is not None:
        return _forward(q, k, v, runs.ends, runs.ends, runs.longest, runs.longest, True, scale)
    out, lse = _forward(q[None], k[None], v[None], None, None, len(q), len(k), False, scale)
    return out[0], lse[0]


def attend_backward(go, q, k, v, out, lse, runs, scale):
    """dq, dk and dv of the same."""
    if runs is not None:
        return _backward(go, q, k, v, out, lse, runs.ends, runs.ends, runs.longest, runs.longest, True, scale)
    batch = [x[None] for x in (go, q, k, v, out, lse)]
    return [x[0] for x in _backward(*batch, None, None, len(q), len(k), False, scale)]


def _forward(q, k, v, ends_q, ends_k, longest_q, longest_k, causal, scale):
    return torch.ops.aten._flash_attention_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, 0.0, causal, False, scale=scale)[:2]


def _backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, causal, scale):
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is off
    return torch.ops.aten._flash_attention_backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, 0.0, causal, seed, seed[:0], scale=scale)


def _runs(sets, device):
    """Made once for all layers of a call. The copy to the device is queued, nobody waits for it."""
    held = sets[0].on_device
    if device not in held:
        lengths = [length for rows in sets for _, length, _ in rows.runs]
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        if torch.cuda.is_available():
            ends = ends.pin_memory()
        held[device] = Runs(ends.to(device, non_blocking=True), max(lengths))
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
