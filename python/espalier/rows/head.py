"""Log-probs and entropies of chosen tokens from logits, without a second T x V tensor that autograd would keep.

With z = logits / temperature: log-prob z_t - lse(z), entropy lse(z) - sum_v p_v z_v. Shapes: logits [O, V]; E edges (output,
target). Sums run in float32 (float64 in float64). Backward: dz = sum_e g_e (1_t - p) - sum_e h_e p (log p + H). An edge with a kept set
(kept.py) has sums over that set, and adds nothing to dz outside of it.
"""

import contextlib
import contextvars

import torch
import torch.distributed as dist

from espalier.kernels import accumulator

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
    """(logits [O, V], output [E], target [E], temperature, with_entropy, sets, group) -> log-probs [E], entropies [E].

    `sets`: EdgeSets, or None. `group`: the process group over which the vocabulary is sharded in equal parts, in rank order; None: `logits`
    have the whole vocabulary, which sets need. The backward takes the same gradients on every rank and needs no communication.
    """

    @staticmethod
    def forward(ctx, logits, output, target, temperature, with_entropy, sets=None, group=None):
        if sets is not None and group is not None:
            raise ValueError("kept sets over a sharded vocabulary")
        lse, mean = [], []
        for rows in _chunks(logits) if sets is None or not sets.all_have else ():
            z = _wide(logits, rows, temperature)
            lse.append(z.logsumexp(1))
            if with_entropy:
                mean.append(((z - lse[-1][:, None]).exp() * z).sum(1))
        lse = torch.cat(lse) if lse else logits.new_zeros(logits.shape[0], dtype=accumulator(logits.dtype))
        mean = torch.cat(mean) if mean else torch.zeros_like(lse)
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
        of_edges = lse[output], entropy[output]  # of each edge's distribution
        if sets is not None:
            _replace_by_sets(logits, output, temperature, sets, *of_edges)
        ctx.save_for_backward(logits, output, place, inside, lse, entropy, *(of_edges if sets is not None else ()))
        ctx.temperature, ctx.with_entropy, ctx.sets = temperature, with_entropy, sets
        return (chosen if temperature == 1 else chosen / temperature) - of_edges[0], of_edges[1]

    @staticmethod
    def backward(ctx, g, h):
        logits, output, place, inside, lse, entropy, *of_edges = ctx.saved_tensors
        whole = lambda x: x if ctx.sets is None else x.masked_fill(ctx.sets.has > 0, 0)  # of the edges without a set
        by_output = lambda x: torch.zeros_like(lse).index_add_(0, output, whole(x).to(lse.dtype))
        down, spread = by_output(g), by_output(h) if ctx.with_entropy else None
        grad = torch.empty_like(logits) if ctx.sets is None or not ctx.sets.all_have else torch.zeros_like(logits)
        for rows in _chunks(logits) if ctx.sets is None or not ctx.sets.all_have else ():
            logp = _wide(logits, rows, ctx.temperature) - lse[rows, None]
            weight = -down[rows, None] / ctx.temperature
            if spread is not None:
                weight = weight - spread[rows, None] / ctx.temperature * (logp + entropy[rows, None])
            grad[rows] = logp.exp_().mul_(weight)
        if ctx.sets is not None:
            _add_by_sets(grad, logits, output, ctx.temperature, ctx.sets, g, h if ctx.with_entropy else None, *of_edges)
        own = g / ctx.temperature if inside is None else g / ctx.temperature * inside
        grad.index_put_((output, place), own.to(grad.dtype), accumulate=True)
        return grad, None, None, None, None, None, None


def _over_shards(lse, mean, group):
    """The log-sum-exp and the mean logit of the whole vocabulary, from the same numbers of its parts: weights are exp(lse_part - lse)."""
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    sums = torch.stack([torch.ones_like(mean), mean]) * (lse - top).exp()
    dist.all_reduce(sums, group=group)
    return top + sums[0].log(), sums[1] / sums[0]


def _of_sets(logits, output, edge, column, inside, temperature):
    """The rows of a group's logits [K, 1], and z of its sets [K, W], -inf at padding."""
    row = output[edge][:, None]
    z = logits[row, column].to(accumulator(logits.dtype))
    return row, (z if temperature == 1 else z / temperature).masked_fill_(~inside, -torch.inf)


def _replace_by_sets(logits, output, temperature, sets, lse, entropy):
    """Overwrites `lse` and `entropy` [E] of the edges with sets."""
    for edge, column, inside in sets.groups:
        _, z = _of_sets(logits, output, edge, column, inside, temperature)
        lse[edge] = of_set = z.logsumexp(1)
        logp = (z - of_set[:, None]).masked_fill_(~inside, 0)
        entropy[edge] = -(logp.exp() * logp).masked_fill_(~inside, 0).sum(1)


def _add_by_sets(grad, logits, output, temperature, sets, g, h, lse, entropy):
    """Adds what edges with sets give to the gradient of the logits, but for their targets."""
    for edge, column, inside in sets.groups:
        row, z = _of_sets(logits, output, edge, column, inside, temperature)
        logp = (z - lse[edge][:, None]).masked_fill_(~inside, 0)
        slope = -g[edge].to(z.dtype)[:, None]
        if h is not None:
            slope = slope - h[edge].to(z.dtype)[:, None] * (logp + entropy[edge][:, None])
        by_z = (logp.exp() * slope / temperature).masked_fill_(~inside, 0)
        grad.index_put_((row.expand_as(column), column), by_z.to(grad.dtype), accumulate=True)
