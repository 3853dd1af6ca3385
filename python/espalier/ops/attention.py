"""Attention of a row set over the path above it and, tree-causally, over itself.

    S_ij = scale q_i . k_j;  row i sees every path row, and own row j iff j <= i < subtree_end_j
    out_i = sum_j softmax_j(S_i)_j v_j;  lse_i = log sum_j exp S_ij

Shapes: T own rows, P path rows, H query heads, J key/value heads (H a multiple of J; query head h reads key/value head h // (H // J)), D
head size. The responses of one prompt are concatenated: `subtree_end` of a row is the end of its response (exclusive). Derivation:
docs/mathematics.md, sections 1, 4 and 5.
"""

from typing import Optional

import torch
from torch import Tensor

from espalier.errors import Error
from espalier.rows.attention import kernels_for
from espalier.rows.trunk import RowSet, Trunk
from espalier import kernels, native


def _check(q, k, v, path_k, path_v, subtree_end, path_grad_k, path_grad_v):
    def wrong(where, expected, got):
        raise Error("input", f"shared_prefix_attention: {where}", expected, got, "", 3)

    if q.dim() != 3 or k.dim() != 3:
        wrong("q, k", "[T, H, D] and [T, J, D]", f"{tuple(q.shape)} and {tuple(k.shape)}")
    rows, heads, size = q.shape
    if k.shape[0] != rows or k.shape[2] != size or k.shape[1] == 0 or heads % k.shape[1] != 0:
        wrong("k", f"[{rows}, J, {size}] with J a divisor of {heads}", str(tuple(k.shape)))
    if v.shape != k.shape:
        wrong("v", str(tuple(k.shape)), str(tuple(v.shape)))
    if path_k.shape[1:] != k.shape[1:] or path_v.shape != path_k.shape:
        wrong("path_k, path_v", f"[P, {k.shape[1]}, {size}] both", f"{tuple(path_k.shape)} and {tuple(path_v.shape)}")
    if subtree_end.shape != (rows,) or subtree_end.dtype != torch.int32:
        wrong("subtree_end", f"int32 of shape ({rows},)", f"{subtree_end.dtype} of shape {tuple(subtree_end.shape)}")
    for name, tensor in (("k", k), ("v", v), ("path_k", path_k), ("path_v", path_v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            wrong(name, f"{q.dtype} on {q.device}, as q", f"{tensor.dtype} on {tensor.device}")
    if (path_grad_k is None) != (path_grad_v is None):
        wrong("path_grad_k, path_grad_v", "both or neither", "one of them")
    for name, grad in (("path_grad_k", path_grad_k), ("path_grad_v", path_grad_v)):
        if grad is None:
            continue
        if grad.shape != path_k.shape or grad.dtype != kernels.accumulator(q.dtype) or not grad.is_contiguous() or grad.requires_grad:
            wrong(name, f"contiguous {kernels.accumulator(q.dtype)} of shape {tuple(path_k.shape)} without a gradient of its own",
                  f"{grad.dtype} of shape {tuple(grad.shape)}")


def _as_rows(q, k, v, path_k, path_v, subtree_end, path_grads=(None, None)):
    """The module of espalier.rows that runs the call; q, k and v as [1, H, T, D]; and the rows, below a trunk that is the path."""
    path = Trunk(path_k.shape[0])
    path.k[0], path.v[0] = (x.transpose(0, 1)[None] for x in (path_k, path_v))
    path.dk[0], path.dv[0] = path_grads
    rows = RowSet(0, (path,) if path.rows else (), native.causal_runs(subtree_end.cpu()))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return kernels_for(q, v), (q, k, v), [rows]


@torch.library.custom_op("espalier::shared_prefix_attention", mutates_args=())
def shared_prefix_attention(q: Tensor, k: Tensor, v: Tensor, path_k: Tensor, path_v: Tensor, subtree_end: Tensor,
                            path_grad_k: Optional[Tensor] = None, path_grad_v: Optional[Tensor] = None,
                            scale: Optional[float] = None) -> tuple[Tensor, Tensor]:
    """Returns out [T, H, D] in q's dtype and lse [H, T] (natural log, float32; float64 for float64 inputs). lse has no gradient.

    q [T, H, D]; k, v [T, J, D]; path_k, path_v [P, J, D], P may be 0; subtree_end [T] int32; scale: None means 1 / sqrt(D).

    path_grad_k, path_grad_v [P, J, D], contiguous, in lse's dtype: if given, the backward adds the path's gradients to them, over all calls
    that get the same buffers, and autograd gives path_k and path_v no gradient. Without buffers, autograd does.

    Raises `Error` for wrong shapes, dtypes or devices.
    """
    _check(q, k, v, path_k, path_v, subtree_end, path_grad_k, path_grad_v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not len(q):
        return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty((q.shape[1], 0), dtype=kernels.accumulator(q.dtype))
    way, operands, rows = _as_rows(q, k, v, path_k, path_v, subtree_end)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = way.forward(*operands, scale, rows, 0)
    return out[0].contiguous(), lse.contiguous()


@shared_prefix_attention.register_fake
def _(q, k, v, path_k, path_v, subtree_end, path_grad_k=None, path_grad_v=None, scale=None):
    _check(q, k, v, path_k, path_v, subtree_end, path_grad_k, path_grad_v)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty((q.shape[1], q.shape[0]), dtype=kernels.accumulator(q.dtype))


@torch.library.custom_op("espalier::add_shared_prefix_attention_backward", mutates_args=("path_grad_k", "path_grad_v"))
def _backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, path_k: Tensor, path_v: Tensor, subtree_end: Tensor,
              out: Tensor, lse: Tensor, path_grad_k: Tensor, path_grad_v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v. Adds the path's gradients to path_grad_k and path_grad_v."""
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    way, operands, rows = _as_rows(q, k, v, path_k, path_v, subtree_end, (path_grad_k, path_grad_v))
    with torch.autocast(q.device.type, enabled=False):
        grads = way.backward(grad_out[None], *operands, out[None], lse, scale, rows, 0)
    return tuple(x[0].transpose(0, 1).contiguous() for x in grads)


@_backward.register_fake
def _(grad_out, q, k, v, path_k, path_v, subtree_end, out, lse, path_grad_k, path_grad_v, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, path_k, path_v, subtree_end, path_grad_k, path_grad_v, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, path_k, path_v, subtree_end, out, lse)
    # The caller changes the buffers between forward and backward, which autograd forbids for saved tensors.
    ctx.path_grads, ctx.scale = (path_grad_k, path_grad_v), q.shape[-1] ** -0.5 if scale is None else scale


def _differentiate(ctx, grad_out, _):
    q, k, v, path_k, path_v, subtree_end, out, lse = ctx.saved_tensors
    given = ctx.path_grads[0] is not None
    sums = ctx.path_grads if given else [torch.zeros_like(x, dtype=kernels.accumulator(x.dtype), memory_format=torch.contiguous_format)
                                         for x in (path_k, path_v)]
    grads = torch.ops.espalier.add_shared_prefix_attention_backward(
        grad_out, q, k, v, path_k, path_v, subtree_end, out, lse, sums[0], sums[1], ctx.scale)
    of_path = (None, None) if given else (sums[0].to(path_k.dtype), sums[1].to(path_v.dtype))
    return *grads, *of_path, None, None, None, None


shared_prefix_attention.register_autograd(_differentiate, setup_context=_save)
