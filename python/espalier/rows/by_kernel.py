"""One layer's attention of a call in the engine's kernels: one kernel call for each set of rows, over the keys [its trunks | its own rows].

Interface of this file and of by_blocks.py, for the `sets` of a Phase (attention.py):
    forward: q [1, H, T, D], k and v [1, J, T, D] -> out [1, T, H, D] in q's type, lse in the accumulator's
    backward: -> gradients of q, k and v; gradients of the trunks' keys and values are added to their sums
"""

import numpy as np
import torch

from espalier import kernels


def serves(q, v=None):
    """True if the engine's kernels run rows of this type and device, with heads of these sizes."""
    return kernels.serves(q) and (v is None or q.shape[-1] == v.shape[-1])


def count(runs, trunks):
    """The number of kernel calls for a set of rows."""
    return 1


def forward(q, k, v, scale, sets, layer):
    q, k, v = (_rows(x) for x in (q, k, v))
    parts = [kernels.attention_forward(*_operands(rows, q, k, v, layer), scale) for rows in sets]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1))
    return out[None], lse


def backward(go, q, k, v, out, lse, scale, sets, layer):
    q, k, v = (_rows(x) for x in (q, k, v))
    parts = []
    for rows in sets:
        at = slice(rows.begin, rows.end)
        with _Sums(rows.trunks, layer, k) as sums:
            parts.append(kernels.add_attention_backward(go[0, at], *_operands(rows, q, k, v, layer), out[0, at], lse[:, at], *sums, scale))
    grads = parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts)]
    return [x.transpose(0, 1)[None] for x in grads]


def _rows(x):
    """[1, H, T, D] -> [T, H, D]"""
    return x[0].transpose(0, 1)


def _operands(rows, q, k, v, layer):
    at = slice(rows.begin, rows.end)
    above = [[_rows(held[layer]) for held in (trunk.k, trunk.v)] for trunk in rows.trunks]
    path = [_one_or_joined(parts) for parts in zip(*above)] if above else [k[:0], v[:0]]
    return q[at], k[at], v[at], *path, _subtree_end(rows)


def _one_or_joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _subtree_end(rows):
    """The end of every row's subtree, as an index from the set's first row."""
    runs = np.array(rows.runs, np.int32)
    return torch.from_numpy(np.repeat(runs[:, 2] - rows.begin, runs[:, 1]))


class _Sums:
    """Context manager: buffers for the gradients of a path's rows, [P, J, D] each. The sums of its only trunk, or zeros that are added to the sums of
    several trunks at the end."""

    def __init__(self, trunks, layer, k):
        self.of_trunks = [trunk.sums(layer) for trunk in trunks]
        shape = (sum(trunk.rows for trunk in trunks), *k.shape[1:])
        self.joined = self.of_trunks[0] if len(trunks) == 1 else [k.new_zeros(shape, dtype=kernels.accumulator(k.dtype)) for _ in range(2)]

    def __enter__(self):
        return self.joined

    def __exit__(self, kind, *_):
        if kind is None and len(self.of_trunks) > 1:
            for joined, parts in zip(self.joined, zip(*self.of_trunks)):
                for part, more in zip(parts, joined.split([len(part) for part in parts])):
                    part += more
