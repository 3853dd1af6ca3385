"""Attention over one block of keys, with the log-sum-exp that merges blocks; forward and backward.

A block is a rectangle (every query sees every key) or a causal square. Shapes: q [B, G, R, D]; k [B, C, D], v [B, C, E], shared by
the G query heads of a group; out, go [B, G, R, E]; lse [B, G, R]. The backward takes the merged out and lse of the whole softmax:

    P = exp(scale q k^T - lse)      dV = P^T dO      dS = P * (dO V^T - sum_d(dO * out))      dQ = scale dS K    dK = scale dS^T Q

so that the gradients of blocks add up exactly. Kernels are torch's own. The plain formula runs where torch has no kernel, and for
blocks with `limits`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from espalier.rows.transfer import to_device
from espalier.kernels import accumulator

_FEW_KEYS = 8  # below, two thin products are cheaper than a fused kernel's set-up
_CHUNK = 1 << 24  # scores that the plain formula holds at once
_BAND_ROWS = 128  # queries in one product if each has a first key of its own: a product then has few keys that some of its queries do not see


@dataclass(frozen=True)
class Limits:
    """`first` [R], int64 on the host, non-decreasing: the first key that each query sees; None: queries see all keys. `softcap` c: scores s
    become c tanh(s / c), with the derivative 1 - (capped s / c)^2; 0: scores stay unchanged."""
    first: "np.ndarray | None" = None
    softcap: float = 0.0


def _kernel(q, k, v, limits):
    if k.shape[1] <= _FEW_KEYS or limits is not None:
        return None
    if q.device.type == "cpu":
        return _cpu
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= 256 and max(q.shape[-1], v.shape[-1]) % 8 == 0:
        return _cuda
    return None


def forward(q, k, v, scale, causal, limits=None):
    """Returns out (of any float type) and lse (accumulator type)."""
    kernel = _kernel(q, k, v, limits)
    if kernel is None:
        return _plain_forward(q, k, v, scale, causal, limits or Limits())
    b, g, r, d = q.shape
    if causal:
        return _run(kernel, q, _per_head(k, g), _per_head(v, g), scale, True)
    out, lse = _run(kernel, q.reshape(b, 1, g * r, d), k[:, None], v[:, None], scale, False)
    return out.reshape(b, g, r, -1), lse.reshape(b, g, r)


def backward(go, q, k, v, out, lse, scale, causal, limits=None):
    """Returns dq [B, G, R, D], dk [B, C, D] and dv [B, C, E]. `out` and `lse` belong to the merged softmax."""
    kernel = _kernel(q, k, v, limits)
    if kernel is None:
        return _plain_backward(go, q, k, v, out, lse, scale, causal, limits or Limits())
    b, g, r, d = q.shape
    if causal:
        dq, dk, dv = _run_backward(kernel, go, q, _per_head(k, g), _per_head(v, g), out, lse, scale, True)
        return dq, dk.sum(1), dv.sum(1)
    fold = lambda x: x.reshape(b, 1, g * r, *x.shape[3:])
    dq, dk, dv = _run_backward(kernel, fold(go), fold(q), k[:, None], v[:, None], fold(out), fold(lse), scale, False)
    return dq.reshape(b, g, r, d), dk[:, 0], dv[:, 0]


def _per_head(x, g):
    return x[:, None].expand(-1, g, -1, -1)


class _cpu:
    @staticmethod
    def forward(q, k, v, scale, causal):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    @staticmethod
    def backward(go, q, k, v, out, lse, scale, causal):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(go, q, k, v, out, lse, 0.0, causal, scale=scale)


class _cuda:
    @staticmethod
    def forward(q, k, v, scale, causal):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]

    @staticmethod
    def backward(go, q, k, v, out, lse, scale, causal):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: dropout is off
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            go, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0], scale=scale)


def _run(kernel, q, k, v, scale, causal):
    """Runs a kernel of torch. It needs heads of one size, so smaller operands are padded with zeros, which changes no product."""
    out, lse = kernel.forward(*_of_one_size(q, k, v), scale, causal)
    return out[..., :v.shape[-1]], lse


def _run_backward(kernel, go, q, k, v, out, lse, scale, causal):
    go, *filled, out = _of_one_size(go, q, k, v, out)
    grads = kernel.backward(go.contiguous(), *filled, out.contiguous(), lse.contiguous(), scale, causal)
    return [grad[..., :x.shape[-1]] for grad, x in zip(grads, (q, k, v))]


def _of_one_size(*tensors):
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _chunks(q, k, causal, limits):
    """Yields (slice of queries, slice of the keys that any of them sees)."""
    rows = max(1, _CHUNK // max(1, q.shape[0] * q.shape[1] * k.shape[1]))
    if limits.first is not None:
        rows = min(rows, _BAND_ROWS)
    for begin in range(0, q.shape[2], rows):
        end = min(begin + rows, q.shape[2])
        yield slice(begin, end), slice(0 if limits.first is None else int(limits.first[begin]), end if causal else k.shape[1])


def _scores(q, k, scale, causal, limits, rows, keys):
    scores = q[:, :, rows].to(accumulator(q.dtype)) @ k[:, keys].to(accumulator(q.dtype))[:, None].transpose(-1, -2) * scale
    if limits.softcap:
        scores = limits.softcap * torch.tanh(scores / limits.softcap)
    at = torch.arange(keys.start, keys.stop, device=q.device)
    if causal:
        scores.masked_fill_(at > torch.arange(rows.start, rows.stop, device=q.device)[:, None], float("-inf"))
    if limits.first is not None:
        scores.masked_fill_(at < to_device(q.device, limits.first[rows])[0][:, None], float("-inf"))
    return scores


def _plain_forward(q, k, v, scale, causal, limits):
    outs, lses = [], []
    for rows, keys in _chunks(q, k, causal, limits):
        scores = _scores(q, k, scale, causal, limits, rows, keys)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1][..., None]).exp() @ v[:, keys].to(scores.dtype)[:, None])
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_backward(go, q, k, v, out, lse, scale, causal, limits):
    wide = accumulator(q.dtype)
    kw, vw = k.to(wide)[:, None], v.to(wide)[:, None]
    dq, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, keys in _chunks(q, k, causal, limits):
        scores = _scores(q, k, scale, causal, limits, rows, keys)
        p = (scores - lse[:, :, rows, None]).exp()
        g = go[:, :, rows].to(wide)
        ds = p * (g @ vw[:, :, keys].transpose(-1, -2) - (g * out[:, :, rows].to(wide)).sum(-1, keepdim=True)) * scale
        if limits.softcap:
            ds = torch.where(p > 0, ds * (1 - (scores / limits.softcap).square()), 0)
        dq.append(ds @ kw[:, :, keys])
        dk[:, keys] += (ds.transpose(-1, -2) @ q[:, :, rows].to(wide)).sum(1)
        dv[:, keys] += (p.transpose(-1, -2) @ g).sum(1)
    return torch.cat(dq, 2), dk, dv
