"""Attention of rows that see [open trunks | own tree], as one autograd function.

On a CPU the rows run in the engine's kernels (by_kernel.py). On a GPU they run in FlashAttention's (by_flash.py; with a window or
chunks by_gather.py) or in torch's memory-efficient kernel (by_efficient.py). All other cases run in torch's operations, block by
block (by_blocks.py). Rows that choose their keys run in by_choice.py.
"""

import torch

from espalier.rows import by_blocks, by_choice, by_efficient, by_flash, by_gather, by_kernel


def kernels_for(q, v=None):
    """The module that runs these rows if every row sees all rows above it: by_kernel, by_flash or by_efficient. by_blocks
    serves the rest, for example values of another size than keys on a CPU."""
    return next((rows for rows in (by_kernel, by_flash, by_efficient) if rows.serves(q, v)), by_blocks)


def attend(q, k, v, sinks, scale, call, layer, rule=None, chosen=None):
    """q [1, H, T, D], k [1, J, T, D] and v [1, J, T, E] -> out [1, T, H, E], lse, and the arguments of `attend_backward`.

    `call`: has the rows' `sets`, their `longest` rollout's length, `mutual` rows and `visible(device)` (espalier.hf.attention.Phase).
    `sinks` [H] or None: a sink is one more score s_h of every row, with no value. It is merged into a row's softmax once, after all
    blocks: lse' = logaddexp(lse, s_h), out' = exp(lse - lse') out, ds_h = - sum_rows exp(s_h - lse') (dO . out').
    """
    rule = rule.within(call.longest) if rule else None
    if chosen is not None:
        rows, more = by_choice, (chosen, call.visible(q.device))
    elif call.mutual:
        rows, more = by_blocks, (rule, call.mutual)
    elif rule is None:
        rows, more = kernels_for(q, v), ()
    else:
        rows, more = by_gather if by_gather.serves(q, v, rule) else by_blocks, (rule,)
    more = (scale, call.sets, layer, *more)
    out, lse = rows.forward(q, k, v, *more)
    if sinks is not None:
        heads_last = lse.reshape(q.shape[1], -1).T  # [T, H]
        both = torch.logaddexp(heads_last, sinks.to(lse.dtype))
        out = (out.to(lse.dtype) * (heads_last - both).exp()[None, ..., None]).to(out.dtype)
        lse = both.T.contiguous().view_as(lse)
    return out.contiguous(), lse, (rows, more)  # contiguous, as transformers' own attention functions return it


def attend_backward(go, q, k, v, out, lse, sinks, how):
    """Gradients of q, k, v and sinks. The gradients of the trunks' keys and values go to their sums. `how`: the last result of `attend`."""
    rows, more = how
    with torch.autocast(q.device.type, enabled=False):
        dsinks = None
        if sinks is not None:
            weights = (sinks.to(lse.dtype)[:, None] - lse.reshape(len(sinks), -1)).exp()  # [H, T]
            dsinks = -(weights * (go.to(lse.dtype) * out.to(lse.dtype)).sum(-1)[0].T).sum(1).to(sinks.dtype)
        return (*rows.backward(go.to(q.dtype), q, k, v, out, lse, *more), dsinks)


class RowAttention(torch.autograd.Function):
    """`attend` with gradients: (q, k, v, sinks, scale, call, layer, rule, chosen) -> out."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, *how):
        out, lse, ctx.how = attend(q, k, v, sinks, *how)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.arguments = len(how)
        return out

    @staticmethod
    def backward(ctx, go):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        return (*attend_backward(go, q, k, v, out, lse, sinks, ctx.how), *[None] * ctx.arguments)
