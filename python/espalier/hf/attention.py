"""Rows that see [open trunks | own tree], as an attention function of transformers' `AttentionInterface`.

A call of the model runs the rows of one item as a batch of one, [1, T]. Its keyword argument `espalier=Phase(...)` reaches
every attention layer; without it the function is torch's own attention, so that the same model still generates and evaluates.
On a CPU the rows run in the engine's kernels (rows_by_kernel.py), elsewhere in torch's own (rows_by_blocks.py).
"""

import contextlib
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from espalier.errors import Unsupported
from espalier.hf import rows_by_blocks, rows_by_kernel
from espalier.ops.kernels import accumulator

NAME = "espalier"


class Trunk:
    """Keys and values of shared rows by layer, [1, J, P, D], and the sums of their gradients, [P, J, D] (float32; float64 in float64)."""

    def __init__(self, rows):
        self.rows = rows
        self.k, self.v, self.live, self.dk, self.dv = {}, {}, {}, {}, {}

    def take(self, layer, k, v):
        """The first forward's values stay; what has a graph is `live` until the trunk's own backward."""
        if layer not in self.k:
            self.k[layer], self.v[layer] = k.detach(), v.detach()
        if torch.is_grad_enabled():
            self.live[layer] = (k, v)

    def sums(self, layer):
        """dk and dv of a layer, zeros at first: gradients are added to them."""
        if layer not in self.dk:
            for x, sums in ((self.k[layer], self.dk), (self.v[layer], self.dv)):
                _, j, p, d = x.shape
                sums[layer] = torch.zeros(p, j, d, dtype=accumulator(x.dtype), device=x.device)
        return self.dk[layer], self.dv[layer]

    def gathered(self):
        """What has a graph and the gradient that came back for it, alternately."""
        return [part for layer, live in self.live.items() if layer in self.dk for x, sums in zip(live, (self.dk[layer], self.dv[layer]))
                if x.requires_grad for part in (x, sums.transpose(0, 1).to(x.dtype)[None])]


@dataclass
class RowSet:
    """Rows [begin, end) below the same trunks, all of whose rows they see. `runs`: (begin, length, subtree end), causal runs that cover
    the set once; a run's rows are also seen by all later rows below its subtree's end."""
    begin: int
    trunks: tuple
    runs: list = field(default_factory=list)

    @property
    def end(self):
        return self.runs[-1][0] + self.runs[-1][1]


class Phase:
    """What the rows of one call see: `sets`, one after the other. `longest`: tokens up to and including the last position."""

    def __init__(self, sets, longest, captures=None):
        self.sets, self.longest, self.captures = sets, longest, captures
        self.capturing = False

    @classmethod
    def of_segments(cls, segments, trunks, longest, captures=None):
        """From an item's segments (core_interface.h)."""
        return cls([RowSet(0, tuple(trunks), _runs(segments))], longest, captures)

    @contextlib.contextmanager
    def forward(self):
        """Around the model's call: keys and values are taken, masks are not built."""
        self.capturing = self.captures is not None
        with _without_masks():
            try:
                yield
            finally:
                self.capturing = False


def _runs(segments):
    return [(row, end - begin, subtree_end) for _, begin, end, row, subtree_end, *_ in segments.tolist()]


def by_kernel(device, dtype):
    """Whether rows like these run in the engine's kernels; heads whose values have another size than their keys do not."""
    return rows_by_kernel.serves(torch.empty(0, dtype=dtype, device=device))


def calls_of(segments, trunks, by_kernel):
    """How many calls of an attention kernel one layer takes for an item below so many trunks."""
    return 1 if by_kernel else rows_by_blocks.count(_runs(segments), trunks)


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
    """q [1, H, T, D], k and v [1, J, T, D] -> [1, T, H, D]. Gradients of the trunks' keys and values go to their sums."""

    @staticmethod
    def forward(ctx, q, k, v, scale, phase, layer):
        ctx.rows = rows_by_kernel if rows_by_kernel.serves(q, v) else rows_by_blocks
        out, lse = ctx.rows.forward(q, k, v, scale, phase.sets, layer)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.sets, ctx.layer = scale, phase.sets, layer
        return out

    @staticmethod
    def backward(ctx, go):
        q, k, v, out, lse = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return (*ctx.rows.backward(go.to(q.dtype), q, k, v, out, lse, ctx.scale, ctx.sets, ctx.layer), None, None, None)


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
        return _RowAttention.apply(query, key, value, scale, phase, module.layer_idx), None


def register():
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)


register()
