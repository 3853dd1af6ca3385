"""Log-probs and entropies of targets under a linear head, computed block by block without the full logits.

    z_rv = (h_r . w_v) / temperature_r;  p_rv = softmax_v(z_r)_v
    logprob_r = log p_{r, target_r};  entropy_r = -sum_v p_rv log p_rv

The backward recomputes the logits of each block. With a_r and b_r the gradients of logprob_r and entropy_r:

    dL/dz_rv = a_r (1[v = target_r] - p_rv) - b_r p_rv (log p_rv + entropy_r)

Shapes: R rows, M width, V vocabulary. Source: docs/mathematics.md.

On a CPU a block is a range of rows and runs in the engine's kernels. On other devices (GPUs) it is a range of vocabulary columns. There,
products read bfloat16 operands and sum in float32, and neither the head nor its gradient has a float32 copy. Every element of the head's
gradient is summed over all rows and rounded once. The host never waits for the device.
"""

import torch
from torch import Tensor

from espalier.errors import Error
from espalier import kernels

BLOCK_BYTES = 64 << 20  # bytes of a block's logits on a CPU
BLOCK_ROWS = 256
BLOCK_LOGITS = 1 << 26  # logits of a block on other devices
LARGE_BLOCK_ROWS = 1 << 15  # rows of such a block at most: it then has at least 2,048 columns


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


def _check_targets(targets, vocabulary):
    if targets.device.type != "cpu":  # asserted on the device: the host does not wait for the result
        torch._assert_async(((targets >= 0) & (targets < vocabulary)).all(), f"linear_logprob: targets: token ids from 0 to {vocabulary - 1}")
    elif targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary):
        raise Error("input", "linear_logprob: targets", f"token ids from 0 to {vocabulary - 1}", f"{int(targets.min())} to {int(targets.max())}", "", 3)


def _blocks(hidden, weight):
    """Row slices of at most BLOCK_ROWS rows, whose logits take at most BLOCK_BYTES."""
    bytes_a_row = weight.shape[0] * torch.empty((), dtype=kernels.accumulator(weight.dtype)).element_size()
    rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // bytes_a_row))
    return [slice(first, min(first + rows, hidden.shape[0])) for first in range(0, hidden.shape[0], rows)]


def _slices(count, most):
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _rows_and_columns(hidden, weight):
    """Row slices and column slices. A block, one slice of each, has at most BLOCK_LOGITS logits."""
    rows = min(hidden.shape[0], LARGE_BLOCK_ROWS)
    return _slices(hidden.shape[0], LARGE_BLOCK_ROWS), _slices(weight.shape[0], max(1, BLOCK_LOGITS // max(1, rows)))


def product(a, b):
    """a @ b, summed and returned in the accumulator's dtype. On CUDA, bfloat16 operands are not widened if torch.bmm has `out_dtype`."""
    wide = kernels.accumulator(a.dtype)
    if a.dtype == torch.bfloat16 and a.device.type == "cuda" and "dtype" in torch.ops.aten.bmm.overloads():
        return torch.bmm(a[None], b[None], out_dtype=wide)[0]
    return a.to(wide) @ b.to(wide)


def _at_targets(targets, columns):
    """Indices of the targets in a slice of columns, [R, 1], clamped to the slice, and a mask [R] of the targets that lie in it."""
    at = targets - columns.start
    return at.clamp(0, columns.stop - columns.start - 1)[:, None], (at >= 0) & (at < columns.stop - columns.start)


def _forward_by_columns(hidden, weight, targets, temperature):
    """Online softmax over blocks of columns: with m the largest z so far and y = z - m, keeps the sums of exp y and of y exp y, and
    rescales them when m grows.
    """
    wide = kernels.accumulator(hidden.dtype)
    parts = []
    blocks, slices = _rows_and_columns(hidden, weight)
    for rows in blocks:
        inverse, top = temperature[rows].reciprocal().to(wide)[:, None], None
        for columns in slices:
            y = product(hidden[rows], weight[columns].t()).mul_(inverse)
            at, inside = _at_targets(targets[rows], columns)
            found = y.gather(1, at)[:, 0].where(inside, 0)
            largest = y.amax(1) if top is None else torch.maximum(top, y.amax(1))
            e = y.sub_(largest[:, None]).exp()
            total_here, weighted_here = e.sum(1), e.mul_(y).sum(1)
            if top is None:
                total, weighted, chosen = total_here, weighted_here, found
            else:
                down = top - largest
                total, weighted = (torch.addcmul(here, down.exp(), before) for here, before in (
                    (total_here, total), (weighted_here, torch.addcmul(weighted, down, total))))
                chosen = chosen + found
            top = largest
        parts.append((chosen - top - total.log(), total.log() - weighted / total))
    if not parts:
        return tuple(hidden.new_empty(0, dtype=wide) for _ in range(2))
    return tuple(torch.cat(part) for part in zip(*parts))


def _backward_by_columns(grad_logprob, grad_entropy, hidden, weight, targets, temperature, logprob, entropy):
    """Returns the gradients of hidden and weight. The log normalizer of a row is recovered as its target's logit minus its log-prob."""
    wide, narrow = kernels.accumulator(hidden.dtype), hidden.dtype == torch.bfloat16
    inverse = temperature.reciprocal().to(wide)[:, None]
    blocks, slices = _rows_and_columns(hidden, weight)
    grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    chosen = torch.cat([(hidden[rows].to(wide) * weight[targets[rows]].to(wide)).sum(1) for rows in _slices(hidden.shape[0], LARGE_BLOCK_ROWS // 8)]
                       or [grad_logprob[:0]])
    lse = chosen[:, None] * inverse - logprob[:, None]
    down = (grad_logprob.to(wide)[:, None] * -inverse, grad_entropy.to(wide)[:, None] * -inverse, entropy[:, None])
    for columns in slices:
        part = weight[columns]
        of_weight = torch.zeros(part.shape, dtype=wide, device=part.device) if len(blocks) > 1 else None
        for rows in blocks:
            a, b, h = (x[rows] for x in down)
            log_p = product(hidden[rows], part.t()).mul_(inverse[rows]).sub_(lse[rows])
            p = log_p.exp()
            slope = log_p.add_(h).mul_(b).add_(a).mul_(p)
            del p
            at, inside = _at_targets(targets[rows], columns)
            slope.scatter_add_(1, at, -a.where(inside[:, None], 0))
            if narrow:
                slope = slope.to(hidden.dtype)
            grad_hidden[rows] += product(slope, part if narrow else part.to(wide))
            mine = hidden[rows] if narrow else hidden[rows].to(wide)
            if of_weight is None:
                of_weight = slope.t() @ mine if hidden.device.type == "cuda" else product(slope.t(), mine)
            else:
                of_weight += product(slope.t(), mine)
        grad_weight[columns] = of_weight if of_weight is not None else 0
    return grad_hidden.to(hidden.dtype), grad_weight


@torch.library.custom_op("espalier::linear_logprob_rows", mutates_args=())
def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    _check(hidden, weight, targets, temperature)
    _check_targets(targets, weight.shape[0])
    if not kernels.serves(hidden):
        return _forward_by_columns(hidden, weight, targets, temperature)
    dtype = kernels.accumulator(hidden.dtype)
    logprob, entropy = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(2))
    wide = weight.to(dtype)
    for rows in _blocks(hidden, weight):
        logits = hidden[rows].to(dtype) @ wide.t()
        inverse = temperature[rows].reciprocal()
        sums = kernels.head_row_sums(logits, inverse)
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
              temperature: Tensor, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    if not kernels.serves(hidden):
        return _backward_by_columns(grad_logprob, grad_entropy, hidden, weight, targets, temperature, logprob, entropy)
    dtype = kernels.accumulator(hidden.dtype)
    wide = weight.to(dtype)
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    for rows in _blocks(hidden, weight):
        part = hidden[rows].to(dtype)
        logits = part @ wide.t()
        inverse, a = temperature[rows].reciprocal(), grad_logprob[rows].double()
        kernels.compute_head_row_gradient(logits, inverse, kernels.head_row_sums(logits, inverse), a, grad_entropy[rows].double())
        logits.scatter_add_(1, targets[rows, None], (a * inverse)[:, None].to(dtype))
        grad_hidden[rows] = (logits @ wide).to(hidden.dtype)
        grad_weight.addmm_(logits.t(), part)
    return grad_hidden, grad_weight.to(weight.dtype)


@_backward.register_fake
def _(grad_logprob, grad_entropy, hidden, weight, targets, temperature, logprob, entropy):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hidden, weight))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx, grad_logprob, grad_entropy):
    return *torch.ops.espalier.linear_logprob_rows_backward(grad_logprob, grad_entropy, *ctx.saved_tensors), None, None


_forward.register_autograd(_differentiate, setup_context=_save)

_library = torch.library.Library("espalier", "FRAGMENT")
_library.define("linear_logprob(Tensor hidden, Tensor weight, Tensor targets, Tensor? temperature=None) -> (Tensor, Tensor)")


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns logprob [R] and entropy [R], float32 (float64 for float64 inputs), both differentiable.

    hidden [R, M] and weight [V, M] of one dtype; targets [R] int64; temperature [R], positive, or None for 1. Raises `Error` for wrong
    shapes, dtypes or target ids. On a GPU a wrong target id fails as a device-side assertion.
    """
    if temperature is None:
        temperature = hidden.new_ones(hidden.shape[0], dtype=torch.float64)
    return torch.ops.espalier.linear_logprob_rows(hidden, weight, targets, temperature.to(torch.float64))


_library.impl("linear_logprob", linear_logprob, "CompositeImplicitAutograd")
