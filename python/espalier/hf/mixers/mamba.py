"""Mamba's selective scan, h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t, out_t = C_t . h_t, whose function takes no state to start from.

The recurrence is linear in its start h_0, so a segment is what the model's function makes of it from nothing, and beside it

    out_t += C_t . (exp(A sum_(s <= t) dt_s) h_0)        h_T += exp(A sum_s dt_s) h_0

The function runs in torch: the fused kernel has no gradient of the last state.
"""

import inspect

import torch

from espalier.hf.mixers.scans import arguments
from espalier.rows.scans import start_of


def selective_scan(theirs, segments, *args, **kwargs):
    """hidden_states, dt, z [1, I, T], A [I, N], B and C [1, N, T] -> [1, I, T]."""
    theirs = inspect.unwrap(theirs)
    given = arguments(theirs, args, kwargs)
    z, bias = given.pop("z", None), given.pop("delta_bias", None)
    x, dt, B, C = (given.pop(name) for name in ("hidden_states", "dt", "B", "C"))
    dt = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
    dt = torch.nn.functional.softplus(dt) if given.pop("delta_softplus", False) else dt
    above, kept, ends, parts = segments.above(), segments.kept(), {}, []
    for index, (begin, length, parent) in enumerate(segments.all):
        at = slice(begin, begin + length)
        out, end = theirs(x[..., at], dt[..., at], B=B[..., at], C=C[..., at], **{**given, "return_last_state": True})
        start = start_of(parent, ends, above)
        if start is not None:
            decay = (given["A"][None, :, None] * dt[..., at].cumsum(-1)[..., None]).exp()  # [1, I, T, N]
            carried = decay * start[:, :, None]
            out = out + torch.einsum("bitn,bnt->bit", carried, C[..., at].to(carried.dtype)).to(out.dtype)
            end = end + carried[:, :, -1]
        if kept[index]:
            ends[index] = end
        parts.append(out)
    if segments.leave is not None:
        segments.leave(ends[len(parts) - 1])
    out = torch.cat(parts, -1)
    return out if z is None else out * torch.nn.functional.silu(z)
