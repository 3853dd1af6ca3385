"""One layer's attention of a call in torch's own kernels: causal squares and rectangles, merged by log-sum-exp.

The interface is that of by_kernel.py. Here a layer may also have a `rule` (visibility.py), and rows [begin, end) of `mutual` also see later
rows among themselves; a window's lower bound does not affect those. Squares of equal length run together. A trunk's rows are the keys of one
rectangle, and so are a run's rows for the rows below it. Rows that see no key of a rectangle, and keys that no row sees, are left out.
Inside, rows are [J, H / J, T, D] (blocks.py).
"""

import numpy as np
import torch

from espalier.rows import blocks
from espalier.rows.transfer import to_device
from espalier.kernels import accumulator


def count(runs, trunks):
    """The number of blocks of a set of rows. `trunks`: the number of trunks above it."""
    return len({length for _, length, _ in runs}) + sum(end > begin + length for begin, length, end in runs) + trunks


def forward(q, k, v, scale, sets, layer, rule=None, mutual=()):
    wide = accumulator(q.dtype)
    _, h, t, d = q.shape
    j = k.shape[1]
    qg, k1, v1 = q.reshape(j, h // j, t, d), k[0], v[0]
    out = torch.empty(j, h // j, t, v.shape[-1], dtype=wide, device=q.device)
    lse = torch.empty(j, h // j, t, dtype=wide, device=q.device)
    for length, begins, limits in _squares(sets, rule):
        cut = lambda x, axis: _gather(x, axis, begins, length)
        for whole, part in zip((out, lse), blocks.forward(cut(qg, 2), cut(k1, 1), cut(v1, 1), scale, True, limits)):
            _scatter(whole, 2, part, begins, length)
    for rows, _, kb, vb, limits in _rectangles(sets, layer, k1, v1, rule):
        _merge(out, lse, rows, *blocks.forward(qg[:, :, rows], kb, vb, scale, False, limits))
    for rows, keys, limits in _later(mutual, rule):
        _merge(out, lse, rows, *blocks.forward(qg[:, :, rows], k1[:, keys], v1[:, keys], scale, False, limits))
    return out.reshape(h, t, -1).transpose(0, 1).to(q.dtype, memory_format=torch.contiguous_format)[None], lse.reshape(h, t)


def backward(go, q, k, v, out, lse, scale, sets, layer, rule=None, mutual=()):
    wide = accumulator(q.dtype)
    _, h, t, d = q.shape
    j = k.shape[1]
    grouped = lambda x_1THD: x_1THD[0].transpose(0, 1).reshape(j, h // j, t, -1)
    qg, gg, out, lse, k1, v1 = q.reshape(j, h // j, t, d), grouped(go), grouped(out), lse.reshape(j, h // j, t), k[0], v[0]
    dq = torch.empty(qg.shape, dtype=wide, device=q.device)
    dk, dv = torch.empty(k1.shape, dtype=wide, device=q.device), torch.empty(v1.shape, dtype=wide, device=q.device)
    for length, begins, limits in _squares(sets, rule):
        cut = lambda x, axis=2: _gather(x, axis, begins, length)
        parts = blocks.backward(cut(gg), cut(qg), cut(k1, 1), cut(v1, 1), cut(out), cut(lse), scale, True, limits)
        for whole, axis, part in zip((dq, dk, dv), (2, 1, 1), parts):
            _scatter(whole, axis, part, begins, length)
    for rows, (grad_k, grad_v), kb, vb, limits in _rectangles(sets, layer, k1, v1, rule, (dk, dv)):
        cut = lambda x: x[:, :, rows]
        more_q, more_k, more_v = blocks.backward(cut(gg), cut(qg), kb, vb, cut(out), cut(lse), scale, False, limits)
        dq[:, :, rows] += more_q
        grad_k += more_k
        grad_v += more_v
    for rows, keys, limits in _later(mutual, rule):
        cut = lambda x: x[:, :, rows]
        parts = blocks.backward(cut(gg), cut(qg), k1[:, keys], v1[:, keys], cut(out), cut(lse), scale, False, limits)
        for whole, part in zip((cut(dq), dk[:, keys], dv[:, keys]), parts):
            whole += part
    return dq.to(q.dtype).reshape(q.shape), dk.to(k.dtype)[None], dv.to(v.dtype)[None]


def _squares(sets, rule):
    """(length, first rows of the squares of this length, their limits). If a rule counts depth, squares of one depth are neighbours."""
    found = {}
    for rows in sets:
        for begin, length, _, depth in rows.segments:
            found.setdefault((length, depth if rule else 0), []).append(begin)
    for (length, depth), begins in found.items():
        yield length, begins, _limits(rule, np.arange(depth, depth + length), depth)


def _later(mutual, rule):
    """(rows, keys, limits) of every block of mutual rows: rows are all but the last, keys all but the first, and row i sees keys from i on."""
    for begin, end in mutual:
        if end - begin > 1:
            yield slice(begin, end - 1), slice(begin + 1, end), blocks.Limits(np.arange(end - begin - 1), rule.softcap if rule else 0.0)


def _limits(rule, depths, first_key):
    """Limits of queries at `depths` for a block of keys that begins at depth `first_key`. None: they see the whole block, with plain scores."""
    if rule is None:
        return None
    first = np.maximum(rule.lowest(depths) - first_key, 0)
    return blocks.Limits(first if first.any() else None, rule.softcap) if first.any() or rule.softcap else None


def _rectangles(sets, layer, k, v, rule, own=(None, None)):
    """Yields (query rows, (dk, dv), keys, values, limits) of every rectangle. Gradients of its keys and values are added to dk and dv. `own`: the
    gradients of k and v if gradients are wanted. All are [J, rows, D]. Query rows are a slice, or indices if some rows between see no key."""
    wanted = own[0] is not None
    for rows in sets:
        depths = rows.depths
        for trunk, at in zip(rows.trunks, np.cumsum([0, *(trunk.rows for trunk in rows.trunks)])):
            for queries, keys, limits in _seen(rule, depths, rows.begin, rows.begin, rows.end, at, trunk.rows, k.device):
                grads = [sums.transpose(0, 1)[:, keys] for sums in trunk.sums(layer)] if wanted else own
                yield queries, grads, trunk.k[layer][0][:, keys], trunk.v[layer][0][:, keys], limits
        for (begin, length, _, depth), (_, _, subtree_end) in zip(rows.segments, rows.runs):
            for queries, keys, limits in _seen(rule, depths, rows.begin, begin + length, subtree_end, depth, length, k.device):
                keys = slice(begin + keys.start, begin + keys.stop)
                yield queries, [g[:, keys] for g in own] if wanted else own, k[:, keys], v[:, keys], limits


def _seen(rule, depths, origin, begin, end, first_key, keys, device):
    """For rows [begin, end) and `keys` keys from depth `first_key` on, yields at most one block: (rows that see any key, keys that any row sees,
    limits). `depths`: of row `origin` and all later rows. With a rule, the rows of a block are ordered by depth."""
    if begin == end:
        return
    if rule is None:
        yield slice(begin, end), slice(0, keys), None
        return
    mine = depths[begin - origin:end - origin]
    order = np.argsort(mine, kind="stable") if (rule.lowest(mine) > first_key).any() else np.arange(end - begin)
    order = order[rule.lowest(mine[order]) < first_key + keys]
    if not len(order):
        return
    mine, lowest = mine[order], max(0, int(rule.lowest(mine[order][:1])[0]) - first_key)
    whole = len(order) == end - begin and (np.diff(order) == 1).all()
    yield slice(begin, end) if whole else to_device(device, begin + order)[0], slice(lowest, keys), _limits(rule, mine, first_key + lowest)


def _merge(out, lse, rows, more, more_lse):
    """Merges two softmaxes over different keys into one over both, in place. Their weights are exp(lse_i - logaddexp(lse_1, lse_2))."""
    o, l = out[:, :, rows], lse[:, :, rows]
    both = torch.logaddexp(l, more_lse)
    o.mul_((l - both).exp()[..., None]).addcmul_(more.to(o.dtype), (more_lse - both).exp()[..., None])
    l.copy_(both)
    if not isinstance(rows, slice):
        out[:, :, rows], lse[:, :, rows] = o, l


def _gather(x, axis, begins, length):
    """Cuts runs [begin, begin + length) from the row axis and concatenates them along the first axis: [J, ...] -> [n J, ...]."""
    runs = [x.narrow(axis, begin, length) for begin in begins]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def _scatter(whole, axis, parts, begins, length):
    for begin, part in zip(begins, parts.chunk(len(begins))):
        whole.narrow(axis, begin, length).copy_(part)
