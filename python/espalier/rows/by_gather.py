"""One layer's attention of a call whose rows see a window or a chunk of their own path (visibility.py): FlashAttention over gathered keys.

A run whose first row has depth d sees the rows above it from depth lowest(d) on. The keys and values of these rows are gathered from the trunks
and from the call, and the run's own follow: one sequence. All sequences run in one kernel call with the layer's window. With chunks, a run is
split where a chunk ends, and the call has no window. Every row sees itself, so no softmax is empty and nothing is merged.
The interface is that of by_kernel.py, with a `rule` at the end. At most W - 1 keys are gathered for a run beside its own. The gradients of all
copies of a row are added in the accumulator type.
"""

from typing import NamedTuple

import numpy as np
import torch

from espalier.rows import by_flash
from espalier.rows.by_calls import Runs, runs_of
from espalier.rows.transfer import to_device
from espalier.kernels import accumulator

_KEYS = 1 << 18  # keys gathered at once, unless one run has more: 512 MiB of keys and values with 8 heads of 64 in bfloat16


def serves(q, v, rule):
    """True if rows of this type and device run here under this rule."""
    return by_flash.serves(q, v) and not rule.softcap and not (rule.window and rule.chunk) and (
        not rule.window or by_flash.takes_windows())


def forward(q, k, v, scale, sets, layer, rule):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    plan = _plan(sets, rule, q.device)
    keys, values = _sources(plan, layer, k, v)
    parts = [by_flash.attend(q[part.rows], keys.index_select(0, part.keys), values.index_select(0, part.keys), part.runs, scale, rule.window)
             for part in plan.parts]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1))
    return out[None], lse


def backward(go, q, k, v, out, lse, scale, sets, layer, rule):
    go, out = go[0], out[0]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    plan = _plan(sets, rule, q.device)
    sources, dq = _sources(plan, layer, k, v), []
    sums = [torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in sources]
    for part in plan.parts:
        keys, values = (x.index_select(0, part.keys) for x in sources)
        own, *more = by_flash.attend_backward(go[part.rows], q[part.rows], keys, values, out[part.rows], lse[:, part.rows].contiguous(),
                                                   part.runs, scale, rule.window)
        dq.append(own)
        for into, grad in zip(sums, more):
            into.index_add_(0, part.keys, grad.to(into.dtype))
    at = 0
    for trunk, first in plan.trunks:
        for of_trunk, found in zip(trunk.sums(layer), sums):
            of_trunk[first:] += found[at:at + trunk.rows - first]
        at += trunk.rows - first
    dq = dq[0] if len(dq) == 1 else torch.cat(dq)
    return [x.to(q.dtype).transpose(0, 1)[None] for x in (dq, *(found[at:] for found in sums))]


def _sources(plan, layer, k, v):
    """[keys, values] of all rows that any run sees: the last rows of each trunk, then the call's own."""
    return [torch.cat([*(getattr(trunk, name)[layer][0].transpose(0, 1)[first:] for trunk, first in plan.trunks), own])
            for name, own in (("k", k), ("v", v))]


class _Part(NamedTuple):
    """Rows whose sequences run in one kernel call. `keys`: indices of their keys in the sources, sequences end to end."""
    rows: slice
    keys: torch.Tensor
    runs: Runs


class _Plan(NamedTuple):
    """`trunks`: (trunk, its first row that any run sees), in the order of the sources."""
    trunks: list
    parts: list


def _plan(sets, rule, device):
    """The _Plan of a call under this rule, computed once for all layers."""
    held = sets[0].on_device
    if (device, rule) not in held:
        held[device, rule] = _make_plan(sets, rule, device)
    return held[device, rule]


def _make_plan(sets, rule, device):
    pieces = [piece for rows in sets for piece in _pieces(rows, rule)]
    firsts = {}
    for rows, _, _, lowest, _ in pieces:
        for trunk, depth in _depths_of_trunks(rows):
            first = min(max(lowest - depth, 0), trunk.rows)
            firsts[id(trunk)] = (trunk, min(first, firsts.get(id(trunk), (trunk, first))[1]))
    begins, at = {}, 0  # begins: the index that a trunk's row 0 would have in the sources, if they held all of its rows
    for key, (trunk, first) in firsts.items():
        begins[key] = at - first
        at += trunk.rows - first
    found = []  # (begin, length, indices of its keys in the sources) of every piece
    for rows, begin, length, lowest, path in pieces:
        keys = [begins[id(trunk)] + np.arange(max(lowest - depth, 0), trunk.rows)
                for trunk, depth in _depths_of_trunks(rows) if depth + trunk.rows > lowest]
        keys += [at + np.arange(first, end) for first, end in path] + [at + np.arange(begin, begin + length)]
        found.append((begin, length, np.concatenate(keys)))
    return _Plan(list(firsts.values()), [_part(part, device) for part in _parted(found)])


def _pieces(rows, rule):
    """Yields (set, begin, length, lowest depth that its first row sees, [(begin, end)] of the rows of its set above it that it sees) for every run,
    or for every part of a run that lies in one chunk."""
    above = []  # for each run: the runs above it, from the first one on
    for begin, length, parent, depth in rows.segments:
        above.append([*above[parent], rows.segments[parent]] if parent >= 0 else [])
        while length:
            own = min(length, rule.chunk - depth % rule.chunk) if rule.chunk else length
            lowest = int(rule.lowest(np.array([depth]))[0])
            path = [(first + max(lowest - at, 0), first + rows_of_it) for first, rows_of_it, _, at in above[-1] if at + rows_of_it > lowest]
            yield rows, begin, own, lowest, path
            begin, depth, length = begin + own, depth + own, length - own


def _parted(found):
    """Groups neighbouring pieces, each group with at most _KEYS keys or with one piece."""
    parts, held = [[]], 0
    for piece in found:
        if parts[-1] and held + len(piece[2]) > _KEYS:
            parts.append([])
            held = 0
        parts[-1].append(piece)
        held += len(piece[2])
    return parts


def _part(pieces, device):
    keys = [piece[2] for piece in pieces]
    places, = to_device(device, np.concatenate(keys))
    return _Part(slice(pieces[0][0], pieces[-1][0] + pieces[-1][1]), places, runs_of(device, [piece[1] for piece in pieces], [len(own) for own in keys]))


def _depths_of_trunks(rows):
    """Yields (trunk, depth of its first row)."""
    depth = 0
    for trunk in rows.trunks:
        yield trunk, depth
        depth += trunk.rows
