"""One layer's attention of a call in torch's own kernels: causal squares and rectangles, merged by log-sum-exp.

Interface: rows_by_kernel.py. Squares of one length run together; a trunk's rows are one rectangle, and so are a run's rows for all
that is below it. Inside, rows are [J, H / J, T, D] (blocks.py).
"""

import torch

from espalier.hf import blocks
from espalier.ops.kernels import accumulator


def count(runs, trunks):
    """How many blocks a set of rows takes."""
    return len({length for _, length, _ in runs}) + sum(end > begin + length for begin, length, end in runs) + trunks


def forward(q, k, v, scale, sets, layer):
    wide = accumulator(q.dtype)
    _, h, t, d = q.shape
    j = k.shape[1]
    qg, k1, v1 = q.reshape(j, h // j, t, d), k[0], v[0]
    out = torch.empty(j, h // j, t, v.shape[-1], dtype=wide, device=q.device)
    lse = torch.empty(j, h // j, t, dtype=wide, device=q.device)
    for length, begins in _squares(sets).items():
        cut = lambda x, axis: _gather(x, axis, begins, length)
        for whole, part in zip((out, lse), blocks.forward(cut(qg, 2), cut(k1, 1), cut(v1, 1), scale, True)):
            _scatter(whole, 2, part, begins, length)
    for rows, _, kb, vb in _rectangles(sets, layer, k1, v1):
        _merge(out, lse, rows, *blocks.forward(qg[:, :, rows], kb, vb, scale, False))
    return out.reshape(h, t, -1).transpose(0, 1).to(q.dtype, memory_format=torch.contiguous_format)[None], lse


def backward(go, q, k, v, out, lse, scale, sets, layer):
    wide = accumulator(q.dtype)
    _, h, t, d = q.shape
    j = k.shape[1]
    grouped = lambda x_1THD: x_1THD[0].transpose(0, 1).reshape(j, h // j, t, -1)
    qg, gg, out, k1, v1 = q.reshape(j, h // j, t, d), grouped(go), grouped(out), k[0], v[0]
    dq = torch.empty(qg.shape, dtype=wide, device=q.device)
    dk, dv = torch.empty(k1.shape, dtype=wide, device=q.device), torch.empty(v1.shape, dtype=wide, device=q.device)
    for length, begins in _squares(sets).items():
        cut = lambda x, axis=2: _gather(x, axis, begins, length)
        parts = blocks.backward(cut(gg), cut(qg), cut(k1, 1), cut(v1, 1), cut(out), cut(lse), scale, True)
        for whole, axis, part in zip((dq, dk, dv), (2, 1, 1), parts):
            _scatter(whole, axis, part, begins, length)
    for rows, (grad_k, grad_v), kb, vb in _rectangles(sets, layer, k1, v1, (dk, dv)):
        cut = lambda x: x[:, :, rows]
        more_q, more_k, more_v = blocks.backward(cut(gg), cut(qg), kb, vb, cut(out), cut(lse), scale, False)
        dq[:, :, rows] += more_q
        grad_k += more_k
        grad_v += more_v
    return dq.to(q.dtype).reshape(q.shape), dk.to(k.dtype)[None], dv.to(v.dtype)[None]


def _squares(sets):
    """{length: where its squares begin}"""
    out = {}
    for rows in sets:
        for begin, length, _ in rows.runs:
            out.setdefault(length, []).append(begin)
    return out


def _rectangles(sets, layer, k, v, own=(None, None)):
    """(query rows, the gradients that its keys and values add to, keys, values) of every rectangle; `own`: those of k and v, where
    gradients are wanted. All [J, rows, D]."""
    wanted = own[0] is not None
    for rows in sets:
        for trunk in rows.trunks:
            grads = [sums.transpose(0, 1) for sums in trunk.sums(layer)] if wanted else own
            yield slice(rows.begin, rows.end), grads, trunk.k[layer][0], trunk.v[layer][0]
        for begin, length, subtree_end in rows.runs:
            if subtree_end > begin + length:
                keys = slice(begin, begin + length)
                yield slice(begin + length, subtree_end), [g[:, keys] for g in own] if wanted else own, k[:, keys], v[:, keys]


def _merge(out, lse, rows, more, more_lse):
    """Two softmaxes over different keys are one over both: weights exp(lse_i - logaddexp(lse_1, lse_2))."""
    o, l = out[:, :, rows], lse[:, :, rows]
    both = torch.logaddexp(l, more_lse)
    o.mul_((l - both).exp()[..., None]).addcmul_(more.to(o.dtype), (more_lse - both).exp()[..., None])
    l.copy_(both)


def _gather(x, axis, begins, length):
    """Runs [begin, begin + length) of the row axis, one after the other on the first: [J, ...] -> [n J, ...]."""
    runs = [x.narrow(axis, begin, length) for begin in begins]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def _scatter(whole, axis, parts, begins, length):
    for begin, part in zip(begins, parts.chunk(len(begins))):
        whole.narrow(axis, begin, length).copy_(part)
