"""One layer's attention of a call to chosen keys, in torch's own operations.

`seen`, bool [1, 1, T, S], and `chosen`, integers [1, T, K], refer to the keys [trunks | own rows]. A row attends to keys that it both sees and chose:

    P = softmax of scale q k^T over these keys,  out = P v,  dS = P (go v^T - rowsum(go out)),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T go

The interface is that of by_kernel.py. Rows run in blocks of at most `_SCORES` scores.
"""

import torch

from espalier.rows.trunk import trunks_of
from espalier.kernels import accumulator

_SCORES = 1 << 26


def forward(q, k, v, scale, sets, layer, chosen, seen):
    wide, (_, h, t, _), j = accumulator(q.dtype), q.shape, k.shape[1]
    keys, values = _of_all(sets, layer, k, v, wide)
    out = torch.empty(j, h // j, t, v.shape[-1], dtype=wide, device=q.device)
    lse = torch.empty(j, h // j, t, dtype=wide, device=q.device)
    for rows, scores in _scores(q, keys, scale, chosen, seen):
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores - lse[:, :, rows, None]).exp() @ values[:, None]
    return out.reshape(h, t, -1).transpose(0, 1).to(q.dtype)[None], lse


def backward(go, q, k, v, out, lse, scale, sets, layer, chosen, seen):
    wide, (_, h, t, _), j = accumulator(q.dtype), q.shape, k.shape[1]
    keys, values = _of_all(sets, layer, k, v, wide)
    grouped = lambda x_1THD: x_1THD[0].transpose(0, 1).reshape(j, h // j, t, -1).to(wide)
    go, out, queries = grouped(go), grouped(out), q.reshape(j, h // j, t, -1)
    dq, dk, dv = torch.empty(queries.shape, dtype=wide, device=q.device), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in _scores(q, keys, scale, chosen, seen):
        p, g = (scores - lse[:, :, rows, None]).exp(), go[:, :, rows]
        ds = p * (g @ values[:, None].mT - (g * out[:, :, rows]).sum(-1, keepdim=True)) * scale
        dq[:, :, rows] = ds @ keys[:, None]
        dk += (ds.mT @ queries[:, :, rows].to(wide)).sum(1)
        dv += (p.mT @ g).sum(1)
    at = 0
    for trunk in trunks_of(sets):
        for whole, sums in zip((dk, dv), trunk.sums(layer)):
            sums += whole[:, at:at + trunk.rows].transpose(0, 1)
        at += trunk.rows
    return dq.to(q.dtype).reshape(q.shape), dk[:, at:].to(k.dtype)[None], dv[:, at:].to(v.dtype)[None]


def _of_all(sets, layer, k, v, wide):
    """Keys and values of the trunks and of the call's own rows, [J, S, D]."""
    trunks = trunks_of(sets)
    return [torch.cat([*(trunk_parts[layer][0] for trunk_parts in of_trunks), own[0]], 1).to(wide)
            for of_trunks, own in (([trunk.k for trunk in trunks], k), ([trunk.v for trunk in trunks], v))]


def _scores(q, keys, scale, chosen, seen):
    """Yields (rows, their scores [J, H / J, n, S], which are -inf where a row does not attend)."""
    (_, h, t, d), (j, s, _) = q.shape, keys.shape
    n = max(1, _SCORES // (h * s))
    for begin in range(0, t, n):
        rows = slice(begin, min(t, begin + n))
        picked = torch.zeros_like(seen[0, 0, rows]).scatter_(1, chosen[0, rows].long(), True)
        queries = q.reshape(j, h // j, t, d)[:, :, rows].to(keys.dtype)
        yield rows, (queries @ keys[:, None].mT * scale).masked_fill_(~(picked & seen[0, 0, rows]), float("-inf"))
