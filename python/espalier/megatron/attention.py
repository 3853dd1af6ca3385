"""Attention of a call's rows in Megatron's attention layers: [open trunks | own rows].

`core_attention` keeps its module, its parameters and its names; only the instance's `forward` is another one, which runs the module's own in a
plain call. The rows run in espalier.rows.attention, on a GPU in the kernels that espalier.hf uses.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import is_layer_window_attention

from espalier.megatron.calls import call_of
from espalier.rows.attention import RowAttention, attend, attend_backward
from espalier.rows.visibility import Rule


class Inject(torch.autograd.Function):
    """(own sums, *tensors) -> the tensors of a trunk. The backward adds the gradients that everything below the trunk has summed: `sums()` returns
    them, one for each tensor, or None. So a trunk's keys need no graph between its forward and its backward, and its layers may run again."""

    @staticmethod
    def forward(ctx, sums, *own):
        ctx.sums, ctx.likes = sums, [(x.shape, x.dtype, x.device) for x in own]
        return tuple(x.view_as(x) for x in own)

    @staticmethod
    def backward(ctx, *grads):
        found = ctx.sums()
        if found is None:
            return (None, *grads)
        out = []
        for grad, more, (shape, dtype, device) in zip(grads, found, ctx.likes):
            grad = torch.zeros(shape, dtype=more.dtype, device=device) if grad is None else grad.to(more.dtype)
            out.append(torch.cat([grad[:len(more)] + more, grad[len(more):]]).to(dtype))
        return (None, *out)


def keep(call, layer, k, v):
    """Stores a trunk's keys and values [T, 1, J, D] at their first forward, without padding rows. Returns them with the injection."""
    trunk = call.trunk.held
    if layer not in trunk.k:
        for held, x in ((trunk.k, k), (trunk.v, v)):
            held[layer] = x.detach()[:trunk.rows, 0].contiguous().transpose(0, 1)[None]

    def sums():
        found = trunk.dk.pop(layer, None), trunk.dv.pop(layer, None)
        return None if found[0] is None else [x[:, None] for x in found]

    return Inject.apply(sums, k, v)


def _heads_first(x):
    """[T, 1, H, D] -> [1, H, T, D]"""
    return x.permute(1, 2, 0, 3)


class _SplitAttention(torch.autograd.Function):
    """(q, k, v, k_all, v_all, sinks, scale, call, layer, rule) -> [1, T, H, E]: attention of rows that also read rows of their item which are on other
    context parallel ranks. k and v [1, J, T, D] belong to this rank's rows, k_all and v_all [R, 1, J, D] to all rows of the item."""

    @staticmethod
    def forward(ctx, q, k, v, k_all, v_all, sinks, scale, call, layer, rule):
        with call.split.reading(layer, k_all, v_all):
            out, lse, ctx.how = attend(q, k, v, sinks, scale, call, layer, rule)
        ctx.save_for_backward(q, k, v, k_all, v_all, out, lse, sinks)
        ctx.split, ctx.layer = call.split, layer
        return out

    @staticmethod
    def backward(ctx, go):
        q, k, v, k_all, v_all, out, lse, sinks = ctx.saved_tensors
        with ctx.split.reading(ctx.layer, k_all, v_all) as sums:
            dq, dk, dv, dsinks = attend_backward(go, q, k, v, out, lse, sinks, ctx.how)
        return (dq, dk, dv, *(x[:, None].to(k.dtype) for x in sums), dsinks, None, None, None, None)


class Gathered(torch.autograd.Function):
    """Rows [T, ...] of every context parallel rank -> the item's rows [R, ...], without padding. The backward sums over the ranks."""

    @staticmethod
    def forward(ctx, x, split):
        ctx.split, ctx.rows = split, len(x)
        whole = x.new_empty(split.ranks * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=split.group)
        return whole.index_select(0, split.order)

    @staticmethod
    def backward(ctx, grad):
        whole = grad.new_zeros(ctx.split.ranks * ctx.rows, *grad.shape[1:]).index_copy_(0, ctx.split.order, grad)
        own = grad.new_empty(ctx.rows, *grad.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=ctx.split.group)
        return own, None


def rows_of(call, layer, q, k, v, sinks, scale, rule):
    """q [T, 1, H, D], k and v [T, 1, J, D] of a call's rows -> [T, 1, H E]."""
    if call.split is None:
        if call.opens:
            k, v = keep(call, layer, k, v)
        out = RowAttention.apply(*(_heads_first(x) for x in (q, k, v)), sinks, scale, call, layer, rule)
    else:
        whole = [Gathered.apply(x, call.split) for x in (k, v)]
        if call.opens:
            whole = keep(call, layer, *whole)
        out = _SplitAttention.apply(*(_heads_first(x) for x in (q, k, v)), *whole, sinks, scale, call, layer, rule)
    return out[0].flatten(1)[:, None]


def attach(attention):
    """Makes an attention layer's core run the rows of calls."""
    core, config, layer = attention.core_attention, attention.config, attention.layer_number
    own, rule, scale = core.forward, rule_of(config, layer), scale_of(attention)

    def forward(query, key, value, attention_mask, *args, packed_seq_params=None, **more):
        call = call_of(packed_seq_params)
        if call is None:
            return own(query, key, value, attention_mask, *args, packed_seq_params=packed_seq_params, **more)
        packed = query.dim() == 3
        if packed:
            query, key, value = query[:, None], key[:, None], value[:, None]
        out = rows_of(call, layer, query, key, value, sinks_of(core, config, query), scale, rule)
        return out[:, 0] if packed else out

    core.forward = forward


def rule_of(config, layer):
    """The window of a layer, or None. Megatron counts the keys to the left of a row's own."""
    window = getattr(config, "window_size", None)
    if window is None or window[0] < 0 or not is_layer_window_attention(window, getattr(config, "window_attn_skip_freq", None), layer):
        return None
    return Rule(window=window[0] + 1)


def scale_of(attention):
    config = attention.config
    return getattr(attention, "softmax_scale", None) or config.softmax_scale or config.kv_channels ** -.5


def sinks_of(core, config, query):
    """[H] or None. "off-by-one" is a sink of score 0."""
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    sinks = getattr(core, "softmax_offset", None)
    return query.new_zeros(query.shape[2]) if sinks is None else sinks.reshape(-1)
