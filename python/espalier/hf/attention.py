"""Rows that see [open trunks | own tree], as an attention function of transformers' `AttentionInterface`.

A call of the model runs the rows of one item as a batch of one, [1, T]. Its keyword argument `espalier=Phase(...)` reaches
every attention layer; without it the function is torch's own attention, so that the same model still generates and evaluates.
"""

import contextlib

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from espalier.errors import Unsupported
from espalier.hf import blocks

NAME = "espalier"


class Trunk:
    """Keys and values of shared rows by layer, [1, J, P, D], and the sums of their gradients (float32; float64 in float64)."""

    def __init__(self, rows):
        self.rows = rows
        self.k, self.v, self.live, self.dk, self.dv = {}, {}, {}, {}, {}

    def take(self, layer, k, v):
        """The first forward's values stay; what has a graph is `live` until the trunk's own backward."""
        if layer not in self.k:
            self.k[layer], self.v[layer] = k.detach(), v.detach()
        if torch.is_grad_enabled():
            self.live[layer] = (k, v)

    def add(self, layer, dk, dv):
        """dk, dv [J, P, D] are added to the sums."""
        if layer not in self.dk:
            wide = blocks.accumulator(self.k[layer].dtype)
            self.dk[layer] = torch.zeros(self.k[layer].shape[1:], dtype=wide, device=dk.device)
            self.dv[layer] = torch.zeros(self.v[layer].shape[1:], dtype=wide, device=dv.device)
        self.dk[layer] += dk
        self.dv[layer] += dv


class Phase:
    """What the rows of one call see. `paths`: (begin, end, trunks), these rows see all rows of these trunks; `squares`:
    (begin, length), causal runs that cover every row once; `rectangles`: (query begin, query end, key begin, key end).
    """

    def __init__(self, rows, longest, paths, squares, rectangles=(), captures=None):
        self.rows, self.longest, self.captures = rows, longest, captures
        self.paths = [path for path in paths if path[2]]
        self.rectangles = list(rectangles)
        self.by_length = {}
        for begin, length in squares:
            self.by_length.setdefault(length, []).append(begin)
        self.capturing = False

    @classmethod
    def of_segments(cls, segments, rows, trunks, longest, captures=None):
        """From an item's segments (core_interface.h)."""
        squares, rectangles = _squares_and_rectangles(segments)
        return cls(rows, longest, [(0, rows, tuple(trunks))], squares, rectangles, captures)

    @contextlib.contextmanager
    def forward(self):
        """Around the model's call: keys and values are taken, masks are not built."""
        self.capturing = self.captures is not None
        with _without_masks():
            try:
                yield
            finally:
                self.capturing = False


def _squares_and_rectangles(segments):
    """Ancestors in the set are rectangles over all that is below them."""
    squares, rectangles = [], []
    for _, begin, end, row, subtree_end, *_ in segments.tolist():
        length = end - begin
        squares.append((row, length))
        if subtree_end > row + length:
            rectangles.append((row + length, subtree_end, row, row + length))
    return squares, rectangles


def blocks_of(segments, trunks):
    """How many blocks of keys one layer's attention takes for an item below so many trunks: squares of one length go together."""
    squares, rectangles = _squares_and_rectangles(segments)
    return len({length for _, length in squares}) + len(rectangles) + trunks


class _Masks:
    off = 0


@contextlib.contextmanager
def _without_masks():
    _Masks.off += 1
    try:
        yield
    finally:
        _Masks.off -= 1


def _mask(*args, **kwargs):
    return None if _Masks.off else sdpa_mask(*args, **kwargs)


class _RowAttention(torch.autograd.Function):
    """q [1, H, T, D], k and v [1, J, T, D] -> [1, H, T, D]. Gradients of the trunks' keys and values go to their sums."""

    @staticmethod
    def forward(ctx, q, k, v, scale, phase, layer):
        wide = blocks.accumulator(q.dtype)
        _, h, t, d = q.shape
        j = k.shape[1]
        qg, k1, v1 = q.reshape(j, h // j, t, d), k[0], v[0]
        out = torch.empty(j, h // j, t, v.shape[-1], dtype=wide, device=q.device)
        lse = torch.empty(j, h // j, t, dtype=wide, device=q.device)
        for length, begins in phase.by_length.items():
            cut = lambda x, axis: _gather(x, axis, begins, length)
            for whole, part in zip((out, lse), blocks.forward(cut(qg, 2), cut(k1, 1), cut(v1, 1), scale, True)):
                _scatter(whole, 2, part, begins, length)
        for rows, _, kb, vb in _rectangles(phase, layer, k1, v1):
            _merge(out, lse, rows, *blocks.forward(qg[:, :, rows], kb, vb, scale, False))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.phase, ctx.layer = scale, phase, layer
        return out.reshape(1, h, t, -1)

    @staticmethod
    def backward(ctx, go):
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return (*_row_attention_backward(go.to(q.dtype), q, k, v, out, lse, ctx.scale, ctx.phase, ctx.layer), None, None, None)


def _row_attention_backward(go, q, k, v, out, lse, scale, phase, layer):
    wide = blocks.accumulator(q.dtype)
    _, h, t, d = q.shape
    j = k.shape[1]
    qg, gg, k1, v1 = q.reshape(j, h // j, t, d), go.reshape(j, h // j, t, -1), k[0], v[0]
    dq = torch.empty(qg.shape, dtype=wide, device=q.device)
    dk, dv = torch.empty(k1.shape, dtype=wide, device=q.device), torch.empty(v1.shape, dtype=wide, device=q.device)
    for length, begins in phase.by_length.items():
        cut = lambda x, axis=2: _gather(x, axis, begins, length)
        parts = blocks.backward(cut(gg), cut(qg), cut(k1, 1), cut(v1, 1), cut(out), cut(lse), scale, True)
        for whole, axis, part in zip((dq, dk, dv), (2, 1, 1), parts):
            _scatter(whole, axis, part, begins, length)
    for rows, owner, kb, vb in _rectangles(phase, layer, k1, v1):
        cut = lambda x: x[:, :, rows]
        more_q, more_k, more_v = blocks.backward(cut(gg), cut(qg), kb, vb, cut(out), cut(lse), scale, False)
        dq[:, :, rows] += more_q
        if isinstance(owner, Trunk):
            owner.add(layer, more_k, more_v)
        else:
            dk[:, owner] += more_k
            dv[:, owner] += more_v
    return dq.to(q.dtype).reshape(q.shape), dk.to(k.dtype)[None], dv.to(v.dtype)[None]


def _rectangles(phase, layer, k, v):
    """(query rows, trunk or own key rows, keys, values) of every rectangle."""
    for begin, end, trunks in phase.paths:
        for trunk in trunks:
            yield slice(begin, end), trunk, trunk.k[layer][0], trunk.v[layer][0]
    for begin, end, key_begin, key_end in phase.rectangles:
        own = slice(key_begin, key_end)
        yield slice(begin, end), own, k[:, own], v[:, own]


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


def attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, espalier=None, **kwargs):
    """The function registered as "espalier"."""
    if espalier is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return _phase_attention(module, query, key, value, scaling, dropout, sliding_window, espalier, kwargs)


@torch.compiler.disable
def _phase_attention(module, query, key, value, scaling, dropout, sliding_window, phase, kwargs):
    where = f"attention layer {module.layer_idx}"
    if dropout:
        raise Unsupported(where, "no attention dropout", f"dropout {dropout}", "model.eval(), or attention_dropout=0")
    if sliding_window is not None and phase.longest > sliding_window:
        raise Unsupported(where, f"rollouts within its sliding window of {sliding_window} tokens", f"one of {phase.longest} tokens")
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise Unsupported(where, "plain softmax attention", f"{name} in use")
    if torch.is_autocast_enabled(query.device.type):
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(narrow) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (query, key, value))
    if phase.capturing:
        phase.captures.take(module.layer_idx, key, value)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    with torch.autocast(query.device.type, enabled=False):
        out = _RowAttention.apply(query, key, value, scale, phase, module.layer_idx)
    return out.transpose(1, 2).contiguous(), None


def register():
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)


register()
