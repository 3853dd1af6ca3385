"""Shared-prefix attention on torch's own attention kernels, for tensors that the engine's kernels do not support.

The rows are cut into nodes: maximal runs in which every row sees all earlier rows of the run. The visible (row, key) pairs are then one
rectangle for the path (all rows, no mask) and, for every node, one causal square (its rows over themselves) and one rectangle (the rows
below it over its rows). A row's parts are merged by log-sum-exp:

    lse = log sum_r exp lse_r;  out = sum_r exp(lse_r - lse) out_r

The backward runs every part with the merged out and lse. Each part then has its final softmax weights, and the merge needs no backward of
its own. Shapes: attention.py; B = 1, G = H / J query heads per key/value head, N rows of a part.
"""

from dataclasses import dataclass

import torch

BLOCK_ROWS = 512  # query rows per block of scores in the unfused form


@dataclass(frozen=True)
class Region:
    """Rows [first_row, last_row) over keys [first_key, last_key), of the path if `path`, else of the own rows. `causal`: a causal square."""
    path: bool
    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool


def regions_of(subtree_end, path_rows):
    """Regions that cover every visible (row, key) pair exactly once. subtree_end: list of ints."""
    rows = len(subtree_end)
    parts = [Region(True, 0, rows, 0, path_rows, False)] if rows and path_rows else []
    begin = 0
    while begin < rows:
        end = begin + 1
        while end < rows and subtree_end[end] == subtree_end[begin] and end < subtree_end[begin]:
            end += 1
        parts.append(Region(False, begin, end, begin, end, True))
        if subtree_end[begin] > end:
            parts.append(Region(False, end, subtree_end[begin], begin, end, False))
        begin = end
    return parts


def _plain(device, dtype):
    """True if torch has no fused kernel that returns lse and whose backward accepts merged out and lse."""
    if device.type == "cuda":
        return dtype == torch.float64
    return device.type != "cpu"


def _scores(q, k, causal, scale, first):
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        rows = torch.arange(first, first + q.shape[2], device=q.device)
        scores = scores.masked_fill(rows[:, None] < torch.arange(k.shape[2], device=q.device), float("-inf"))
    return scores


def _part_forward(q, k, v, causal, scale):
    """q [B, H, N, D], k, v [B, H, K, D] -> out [B, H, N, D], lse [B, H, N]."""
    if _plain(q.device, q.dtype):
        parts = []
        for first in range(0, q.shape[2], BLOCK_ROWS):
            scores = _scores(q[:, :, first:first + BLOCK_ROWS], k, causal, scale, first)
            lse = scores.logsumexp(-1)
            parts.append((torch.matmul((scores - lse[..., None]).exp(), v), lse))
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if q.dtype == torch.float32:
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[:, :, :q.shape[2]]  # the kernel pads to whole warps
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _part_backward(grad_out, q, k, v, out, lse, causal, scale):
    """Gradients of q, k, v of one part, from the merged out and lse."""
    if _plain(q.device, q.dtype):
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for first in range(0, q.shape[2], BLOCK_ROWS):
            of = slice(first, first + BLOCK_ROWS)
            weight = (_scores(q[:, :, of], k, causal, scale, first) - lse[:, :, of, None]).exp()
            slope = torch.matmul(grad_out[:, :, of], v.transpose(-1, -2)) - (grad_out[:, :, of] * out[:, :, of]).sum(-1, keepdim=True)
            slope = weight * slope * scale
            grad_q[:, :, of] = torch.matmul(slope, k)
            grad_k += torch.matmul(slope.transpose(-1, -2), q[:, :, of])
            grad_v += torch.matmul(weight.transpose(-1, -2), grad_out[:, :, of])
        return grad_q, grad_k, grad_v
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    if q.dtype == torch.float32:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, padded, zero, zero, 0.0, [True, True, True, False], causal, scale=scale)[:3]
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, zero, scale=scale)


def _folded(x_THD, kv_heads):
    """[T, H, D] -> [1, J, G*T, D]. Without a mask, the query heads of a key/value head can run as additional rows."""
    rows, heads, size = x_THD.shape
    return x_THD.view(rows, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, size)


def _unfolded(x, rows):
    """The inverse of _folded."""
    kv_heads, size = x.shape[1], x.shape[3]
    return x.view(kv_heads, -1, rows, size).permute(2, 0, 1, 3).reshape(rows, -1, size)


class _Part:
    """One region's operands in the layout of torch's kernels, and the conversion of results back."""

    def __init__(self, region, q, k, v, path_k, path_v):
        self.region, self.heads, self.kv_heads = region, q.shape[1], k.shape[1]
        keys = slice(region.first_key, region.last_key)
        k, v = (path_k[keys], path_v[keys]) if region.path else (k[keys], v[keys])
        self.q = self.rows_in(q)
        self.k, self.v = (self._keys_in(x) for x in (k, v))

    def rows_in(self, x_THD):
        x = x_THD[self.region.first_row:self.region.last_row]
        return x.transpose(0, 1)[None].contiguous() if self.region.causal else _folded(x.contiguous(), self.kv_heads)

    def lse_in(self, lse_HT):
        lse = lse_HT[:, self.region.first_row:self.region.last_row].contiguous()
        return lse[None] if self.region.causal else lse.view(1, self.kv_heads, -1)

    def rows_out(self, x):
        return x[0].transpose(0, 1) if self.region.causal else _unfolded(x, self.region.last_row - self.region.first_row)

    def lse_out(self, lse):
        return lse[0] if self.region.causal else lse.reshape(self.heads, -1)

    def _keys_in(self, x_KJD):
        x = x_KJD.transpose(0, 1)
        return (x.repeat_interleave(self.heads // self.kv_heads, 0) if self.region.causal else x)[None].contiguous()

    def keys_out(self, x, dtype):
        x = x[0].to(dtype)
        if self.region.causal:
            x = x.view(self.kv_heads, -1, *x.shape[1:]).sum(1)
        return x.transpose(0, 1)


def attention_forward(q, k, v, path_k, path_v, subtree_end, scale):
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(q.shape, dtype=sums)
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=sums)
    for region in regions_of(subtree_end.tolist(), path_k.shape[0]):
        part = _Part(region, q, k, v, path_k, path_v)
        part_out, part_lse = _part_forward(part.q, part.k, part.v, region.causal, scale)
        rows = slice(region.first_row, region.last_row)
        before, own = lse[:, rows], part.lse_out(part_lse).to(sums)
        merged = torch.logaddexp(before, own)
        share = [(x - merged).exp().transpose(0, 1)[..., None] for x in (before, own)]
        out[rows] = out[rows] * share[0] + part.rows_out(part_out).to(sums) * share[1]
        lse[:, rows] = merged
    return out.to(q.dtype), lse


def add_attention_backward(grad_out, q, k, v, path_k, path_v, subtree_end, out, lse, path_grad_k, path_grad_v, scale):
    sums = path_grad_k.dtype
    grad_q = q.new_zeros(q.shape, dtype=sums)
    own_k, own_v = (x.new_zeros(x.shape, dtype=sums) for x in (k, v))
    for region in regions_of(subtree_end.tolist(), path_k.shape[0]):
        part = _Part(region, q, k, v, path_k, path_v)
        of_q, of_k, of_v = _part_backward(part.rows_in(grad_out), part.q, part.k, part.v, part.rows_in(out), part.lse_in(lse),
                                          region.causal, scale)
        grad_q[region.first_row:region.last_row] += part.rows_out(of_q).to(sums)
        keys = slice(region.first_key, region.last_key)
        for into, grad in ((path_grad_k if region.path else own_k, of_k), (path_grad_v if region.path else own_v, of_v)):
            into[keys] += part.keys_out(grad, sums)
    return grad_q.to(q.dtype), own_k.to(k.dtype), own_v.to(v.dtype)
