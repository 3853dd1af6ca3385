"""Attention over one block of keys, with the log-sum-exp that merges blocks; forward and backward.

A block is a rectangle (every query sees every key) or a causal square. Shapes: q, out, go [B, G, R, D]; k, v [B, C, D],
shared by the G query heads of a group; lse [B, G, R]. The backward takes the merged out and lse of the whole softmax:

    P = exp(scale q k^T - lse)      dV = P^T dO      dS = P * (dO V^T - sum_d(dO * out))      dQ = scale dS K    dK = scale dS^T Q

so that the gradients of blocks add up exactly. Kernels are torch's own; the plain formula stands where torch has none.
"""

import torch

from espalier.ops.kernels import accumulator

_FEW_KEYS = 8  # below, two thin products are cheaper than a fused kernel's set-up
_CHUNK = 1 << 24  # scores that the plain formula holds at once


def _kernel(q, k):
    if k.shape[1] <= _FEW_KEYS:
        return None
    if q.device.type == "cpu":
        return _cpu
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        return _cuda
    return None


def forward(q, k, v, scale, causal):
    """Returns out (of any float type) and lse (accumulator type)."""
    kernel = _kernel(q, k)
    if kernel is None:
        return _plain_forward(q, k, v, scale, causal)
    b, g, r, d = q.shape
    if causal:
        return kernel.forward(q, _per_head(k, g), _per_head(v, g), scale, True)
    out, lse = kernel.forward(q.reshape(b, 1, g * r, d), k[:, None], v[:, None], scale, False)
    return out.reshape(b, g, r, d), lse.reshape(b, g, r)


def backward(go, q, k, v, out, lse, scale, causal):
    """Returns dq [B, G, R, D], dk and dv [B, C, D]; out and lse are those of the merged softmax."""
    kernel = _kernel(q, k)
    if kernel is None:
        return _plain_backward(go, q, k, v, out, lse, scale, causal)
    b, g, r, d = q.shape
    if causal:
        dq, dk, dv = kernel.backward(go.contiguous(), q, _per_head(k, g), _per_head(v, g), out.contiguous(), lse.contiguous(), scale, True)
        return dq, dk.sum(1), dv.sum(1)
    fold = lambda x: x.reshape(b, 1, g * r, *x.shape[3:])
    dq, dk, dv = kernel.backward(fold(go), fold(q), k[:, None], v[:, None], fold(out), fold(lse), scale, False)
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
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is off
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            go, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0], scale=scale)


def _row_chunks(q, k):
    rows = max(1, _CHUNK // max(1, q.shape[0] * q.shape[1] * k.shape[1]))
    return [slice(at, at + rows) for at in range(0, q.shape[2], rows)]


def _scores(q, k, scale, causal, rows):
    scores = q[:, :, rows].to(accumulator(q.dtype)) @ k.to(accumulator(q.dtype))[:, None].transpose(-1, -2) * scale
    if causal:
        at = torch.arange(q.shape[2], device=q.device)[rows]
        scores.masked_fill_(torch.arange(k.shape[1], device=q.device)[None] > at[:, None], float("-inf"))
    return scores


def _plain_forward(q, k, v, scale, causal):
    outs, lses = [], []
    for rows in _row_chunks(q, k):
        scores = _scores(q, k, scale, causal, rows)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1][..., None]).exp() @ v.to(scores.dtype)[:, None])
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_backward(go, q, k, v, out, lse, scale, causal):
    wide = accumulator(q.dtype)
    kw, vw = k.to(wide)[:, None], v.to(wide)[:, None]
    dq, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows in _row_chunks(q, k):
        p = (_scores(q, k, scale, causal, rows) - lse[:, :, rows, None]).exp()
        g = go[:, :, rows].to(wide)
        ds = p * (g @ vw.transpose(-1, -2) - (g * out[:, :, rows].to(wide)).sum(-1, keepdim=True)) * scale
        dq.append(ds @ kw)
        dk += (ds.transpose(-1, -2) @ q[:, :, rows].to(wide)).sum(1)
        dv += (p.transpose(-1, -2) @ g).sum(1)
    return torch.cat(dq, 2), dk, dv
