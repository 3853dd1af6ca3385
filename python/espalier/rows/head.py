"""Log-probs and entropies of chosen tokens from logits, without a second T x V tensor that autograd would keep.

With z = logits / temperature: log-prob z_t - lse(z), entropy lse(z) - sum_v p_v z_v. Shapes: logits [O, V]; E edges (output,
target). Sums run in float32 (float64 in float64). Backward: dz = sum_e g_e (1_t - p) - sum_e h_e p (log p + H).
"""

import contextlib
import contextvars

import torch
import torch.distributed as dist

from espalier.ops.kernels import accumulator

_CHUNK, _CHUNK_ON_A_GPU = 1 << 22, 1 << 26  # logits converted to the accumulator type at once: few launches on a GPU, few bytes on a CPU


_rows_at_once: contextvars.ContextVar = contextvars.ContextVar("espalier_chunk_rows", default=0)


@contextlib.contextmanager
def in_chunks(rows):
    """Context manager that sets the rows of a chunk, so that a small step has as many chunks as a large one (memory_estimate.py)."""
    before = _rows_at_once.set(rows)
    try:
        yield
    finally:
        _rows_at_once.reset(before)


def chunk_rows(logits):
    """The number of rows whose logits are converted to the accumulator type at once."""
    return _rows_at_once.get() or max(1, (_CHUNK if logits.device.type == "cpu" else _CHUNK_ON_A_GPU) // logits.shape[1])


def _chunks(logits):
    rows = chunk_rows(logits)
    return [slice(at, at + rows) for at in range(0, logits.shape[0], rows)] or [slice(0, 0)]


def _wide(logits, rows, temperature):
    z = logits[rows].to(accumulator(logits.dtype))
    return z if temperature == 1 else z / temperature


class TokenStatistics(torch.autograd.Function):
    """(logits [O, V], output [E], target [E], temperature, with_entropy, group) -> log-probs [E], entropies [E].

    `group`: the process group over which the vocabulary is sharded in equal parts, in rank order; None: `logits` have the whole vocabulary. The
    backward takes the same gradients on every rank and needs no communication.
    """

    @staticmethod
    def forward(ctx, logits, output, target, temperature, with_entropy, group=None):
        lse, mean = [], []
        for rows in _chunks(logits):
            z = _wide(logits, rows, temperature)
            lse.append(z.logsumexp(1))
            if with_entropy:
                mean.append(((z - lse[-1][:, None]).exp() * z).sum(1))
        lse = torch.cat(lse)
        mean = torch.cat(mean) if with_entropy else torch.zeros_like(lse)
        place, inside = target, None
        if group is not None:
            lse, mean = _over_shards(lse, mean, group)
            place = target - dist.get_rank(group) * logits.shape[1]
            inside = (place >= 0) & (place < logits.shape[1])
            place = place.clamp(0, logits.shape[1] - 1)
        chosen = logits[output, place].to(lse.dtype)
        if group is not None:
            chosen *= inside
            dist.all_reduce(chosen, group=group)
        entropy = lse - mean if with_entropy else mean
        ctx.save_for_backward(logits, output, place, inside, lse, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return (chosen if temperature == 1 else chosen / temperature) - lse[output], entropy[output]

    @staticmethod
    def backward(ctx, g, h):
        logits, output, place, inside, lse, entropy = ctx.saved_tensors
        by_output = lambda x: torch.zeros_like(lse).index_add_(0, output, x.to(lse.dtype))
        down, spread = by_output(g), by_output(h) if ctx.with_entropy else None
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            logp = _wide(logits, rows, ctx.temperature) - lse[rows, None]
            weight = -down[rows, None] / ctx.temperature
            if spread is not None:
                weight = weight - spread[rows, None] / ctx.temperature * (logp + entropy[rows, None])
            grad[rows] = logp.exp_().mul_(weight)
        own = g / ctx.temperature if inside is None else g / ctx.temperature * inside
        grad.index_put_((output, place), own.to(grad.dtype), accumulate=True)
        return grad, None, None, None, None, None


def _over_shards(lse, mean, group):
    """The log-sum-exp and the mean logit of the whole vocabulary, from those of its parts: weights are exp(lse_part - lse)."""
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    sums = torch.stack([torch.ones_like(mean), mean]) * (lse - top).exp()
    dist.all_reduce(sums, group=group)
    return top + sums[0].log(), sums[1] / sums[0]
