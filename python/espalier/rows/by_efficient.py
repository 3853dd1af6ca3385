"""torch's memory-efficient attention on a GPU (by_calls.py): float32, and values of another size than keys in any type.

The kernel needs as many key heads as query heads. Where every row sees every key, the query heads that share a key head become rows of that head,
so a trunk's keys and values are never repeated. In a causal call the order of rows matters, so the call's own keys and values are repeated.
The kernel's lse is [runs, H, rows of the longest run rounded up to whole warps], filled with infinity behind a run's rows.
"""

import functools
import sys

import numpy as np
import torch

from espalier.rows import by_calls
from espalier.rows.by_calls import count  # noqa: F401  part of the interface
from espalier.rows.transfer import to_device

_EVERYTHING, _CAUSAL, _CAUSAL_AT_THE_END = 0, 1, 2  # the kernel's names for masks; the last one: the last row stands at the last key
_WARP = 32


def serves(q, v=None):
    """True if these kernels run rows of this type and device, with heads of these sizes."""
    if q.device.type != "cuda" or q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    whole = 4 if q.dtype == torch.float32 else 8  # elements of one 16-byte load
    return v is None or q.shape[-1] % whole == 0 and v.shape[-1] % whole == 0


def attend(q, k, v, runs, scale):
    """out [T, H, E] and lse [H, T] (float32). The rows of a run see its keys causally, or all of them (`runs.causal`); without `runs` every row sees
    every key."""
    (t, h, _), j = q.shape, k.shape[1]
    if runs is None:
        out, lse = _forward(_folded(q, j), k[None], v[None], None, None, None, None, _EVERYTHING, scale)
        return _unfolded(out, h), lse[0, :, :t * h // j].reshape(h, t)
    out, lse = _forward(q[None], *(_repeated(x, h)[None] for x in (k, v)), runs.ends, runs.ends_of_keys, runs.longest, runs.longest_keys, _mask(runs),
                        scale)
    return out[0], lse.transpose(0, 1).flatten(1).index_select(1, _slots(runs))


def attend_backward(go, q, k, v, out, lse, runs, scale):
    """dq, dk and dv of `attend`."""
    (t, h, _), j = q.shape, k.shape[1]
    if runs is None:
        lse = torch.nn.functional.pad(lse.reshape(1, j, -1), (0, -(t * h // j) % _WARP), value=float("inf"))
        go, q, out = (_folded(x, j) for x in (go, q, out))
        dq, dk, dv = _backward(go, q, k[None], v[None], out, lse, None, None, q.shape[1], k.shape[0], _EVERYTHING, scale)
        return _unfolded(dq, h), dk[0], dv[0]
    padded = lse.new_full((h, len(runs.lengths) * _padded(runs)), float("inf")).index_copy(1, _slots(runs), lse)
    padded = padded.unflatten(1, (len(runs.lengths), -1)).transpose(0, 1).contiguous()
    dq, dk, dv = _backward(go[None], q[None], *(_repeated(x, h)[None] for x in (k, v)), out[None], padded, runs.ends, runs.ends_of_keys, runs.longest,
                           runs.longest_keys, _mask(runs), scale)
    return dq[0], *(x[0] if h == j else x[0].unflatten(1, (j, -1)).sum(2) for x in (dk, dv))


def _mask(runs):
    if not runs.causal:
        return _EVERYTHING
    return _CAUSAL_AT_THE_END if runs.see_others else _CAUSAL


def _folded(x, j):
    """[T, H, D] -> [1, H / J T, J, D]"""
    return x.unflatten(1, (j, -1)).permute(2, 0, 1, 3).flatten(0, 1)[None]


def _unfolded(x, h):
    """The inverse of _folded."""
    j = x.shape[2]
    return x[0].unflatten(0, (h // j, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _repeated(x, h):
    return x if x.shape[1] == h else x.repeat_interleave(h // x.shape[1], 1)


def _padded(runs):
    return -(-runs.longest // _WARP) * _WARP


def _slots(runs):
    """The index of each row in the kernel's lse. Computed once for all layers of a call."""
    if "slots" not in runs.held:
        slots = np.concatenate([run * _padded(runs) + np.arange(length) for run, length in enumerate(runs.lengths)])
        runs.held["slots"], = to_device(runs.ends.device, slots)
    return runs.held["slots"]


def _forward(q, k, v, ends_q, ends_k, longest_q, longest_k, mask, scale):
    return torch.ops.aten._efficient_attention_forward(q, k, v, None, ends_q, ends_k, longest_q, longest_k, 0.0, mask, True, scale=scale)[:2]


def _backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, mask, scale):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # unused: dropout is off
    return torch.ops.aten._efficient_attention_backward(
        go, q, k, v, None, out, ends_q, ends_k, longest_q, longest_k, lse, 0.0, seed, seed, mask, False, scale=scale)[:3]


forward = functools.partial(by_calls.forward, sys.modules[__name__])
backward = functools.partial(by_calls.backward, sys.modules[__name__])
