"""Log-probs and entropies of targets under a linear head, block by block: all logits never exist at once.

    z_rv = (h_r . w_v) / temperature_r;  p_rv = softmax_v(z_r)_v
    logprob_r = log p_{r, target_r};  entropy_r = -sum_v p_rv log p_rv

Backward, with a_r and b_r the gradients of logprob_r and entropy_r:
    dL/dz_rv = a_r (1[v = target_r] - p_rv) - b_r p_rv (log p_rv + entropy_r)
and logits of a block are computed again. Shapes: R rows, M width, V vocabulary. Source: docs/mathematics.md.
"""

import torch
from torch import Tensor

from espalier.errors import Error
from espalier.ops import kernels

BLOCK_BYTES = 64 << 20  # of logits that exist at once
BLOCK_ROWS = 256


def _check(hidden, weight, targets, temperature):
    def wrong(where, expected, got):
        raise Error("input", f"linear_logprob: {where}", expected, got, "", 3)

    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        wrong("hidden, weight", "[R, M] and [V, M]", f"{tuple(hidden.shape)} and {tuple(weight.shape)}")
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        wrong("weight", f"{hidden.dtype} on {hidden.device}, as hidden", f"{weight.dtype} on {weight.device}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        wrong("targets", f"int64 of shape ({hidden.shape[0]},)", f"{targets.dtype} of shape {tuple(targets.shape)}")
    if temperature.shape != hidden.shape[:1] or temperature.dtype != torch.float64:
        wrong("temperature", f"float64 of shape ({hidden.shape[0]},)", f"{temperature.dtype} of shape {tuple(temperature.shape)}")


def _blocks(hidden, weight):
    """Slices of rows whose logits take at most BLOCK_BYTES."""
    bytes_a_row = weight.shape[0] * torch.empty((), dtype=kernels.accumulator(weight.dtype)).element_size()
    rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // bytes_a_row))
    return [slice(first, min(first + rows, hidden.shape[0])) for first in range(0, hidden.shape[0], rows)]


def _row_sums(logits, inverse):
    """max_v raw_v, log sum_v exp(z_v - max z) and the entropy of each row, [R, 3] float64."""
    if kernels.serves(logits):
        return kernels.head_row_sums(logits, inverse)
    top = logits.amax(1, keepdim=True)
    y = (logits - top) * inverse[:, None].to(logits.dtype)
    e = y.exp()
    total = e.sum(1)
    return torch.stack([top[:, 0], total.log(), total.log() - (e * y).sum(1) / total], 1).double()


def _logits_gradient(logits, inverse, sums, grad_logprob, grad_entropy):
    """Overwrites raw logits with -inverse p (a + b (log p + entropy)): their gradient without what the targets add."""
    if kernels.serves(logits):
        return kernels.compute_head_row_gradient(logits, inverse, sums, grad_logprob, grad_entropy)
    top, log_sum, entropy, inverse, a, b = (x[:, None].to(logits.dtype) for x in (*sums.unbind(1), inverse, grad_logprob, grad_entropy))
    log_p = logits.sub_(top).mul_(inverse).sub_(log_sum)
    logits.copy_(-inverse * log_p.exp() * (a + b * (log_p + entropy)))


@torch.library.custom_op("espalier::linear_logprob_rows", mutates_args=())
def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    _check(hidden, weight, targets, temperature)
    if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= weight.shape[0]):
        raise Error("input", "linear_logprob: targets", f"token ids from 0 to {weight.shape[0] - 1}",
                    f"{int(targets.min())} to {int(targets.max())}", "", 3)
    dtype = kernels.accumulator(hidden.dtype)
    logprob, entropy = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(2))
    wide = weight.to(dtype)
    for rows in _blocks(hidden, weight):
        logits = hidden[rows].to(dtype) @ wide.t()
        inverse = temperature[rows].reciprocal()
        sums = _row_sums(logits, inverse)
        raw = logits.gather(1, targets[rows, None])[:, 0].double()
        logprob[rows] = ((raw - sums[:, 0]) * inverse - sums[:, 1]).to(dtype)
        entropy[rows] = sums[:, 2].to(dtype)
    return logprob, entropy


@_forward.register_fake
def _(hidden, weight, targets, temperature):
    _check(hidden, weight, targets, temperature)
    return tuple(hidden.new_empty(hidden.shape[0], dtype=kernels.accumulator(hidden.dtype)) for _ in range(2))


@torch.library.custom_op("espalier::linear_logprob_rows_backward", mutates_args=())
def _backward(grad_logprob: Tensor, grad_entropy: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor,
              temperature: Tensor) -> tuple[Tensor, Tensor]:
    dtype = kernels.accumulator(hidden.dtype)
    wide = weight.to(dtype)
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    for rows in _blocks(hidden, weight):
        part = hidden[rows].to(dtype)
        logits = part @ wide.t()
        inverse, a = temperature[rows].reciprocal(), grad_logprob[rows].double()
        _logits_gradient(logits, inverse, _row_sums(logits, inverse), a, grad_entropy[rows].double())
        logits.scatter_add_(1, targets[rows, None], (a * inverse)[:, None].to(dtype))
        grad_hidden[rows] = (logits @ wide).to(hidden.dtype)
        grad_weight.addmm_(logits.t(), part)
    return grad_hidden, grad_weight.to(weight.dtype)


@_backward.register_fake
def _(grad_logprob, grad_entropy, hidden, weight, targets, temperature):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hidden, weight))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad_logprob, grad_entropy):
    return *torch.ops.espalier.linear_logprob_rows_backward(grad_logprob, grad_entropy, *ctx.saved_tensors), None, None


_forward.register_autograd(_differentiate, setup_context=_save)

_library = torch.library.Library("espalier", "FRAGMENT")
_library.define("linear_logprob(Tensor hidden, Tensor weight, Tensor targets, Tensor? temperature=None) -> (Tensor, Tensor)")


def linear_logprob(hidden, weight, targets, temperature=None):
    """Returns logprob [R] and entropy [R], float32 (float64 in float64), both differentiable.

    hidden [R, M], weight [V, M] of one dtype; targets [R] int64; temperature: None (1), or [R] of positive numbers.
    """
    if temperature is None:
        temperature = hidden.new_ones(hidden.shape[0], dtype=torch.float64)
    return torch.ops.espalier.linear_logprob_rows(hidden, weight, targets, temperature.to(torch.float64))


_library.impl("linear_logprob", linear_logprob, "CompositeImplicitAutograd")
