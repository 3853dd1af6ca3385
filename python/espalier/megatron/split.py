"""An item's rows over the context parallel ranks.

    dealt      whole subtrees of a wave go to ranks, as equal in rows as they can be: no rank reads rows of another
    gathered   the rows are cut into 2 cp pieces, and rank r has pieces r and 2 cp - 1 - r, so that causal work is equal. Keys and values of all
               rows are gathered in each layer. Trunks are always gathered, because every rank reads them later
"""

import contextlib

import numpy as np
import torch

from espalier.kernels import accumulator
from espalier.rows.transfer import queued
from espalier.rows.trunk import RowSet

_UNEVEN = 1.5  # dealt rows of the fullest rank over the mean; above, the rows are cut


def parts_of(runs, rows, ranks, trunk):
    """([row indices of each rank], whether they are gathered) of an item with these runs (begin, length, subtree end)."""
    if not trunk:
        dealt = _dealt(runs, ranks)
        if max(map(len, dealt)) * ranks <= _UNEVEN * rows:
            return dealt, False
    pieces = np.array_split(np.arange(rows), 2 * ranks)
    return [np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks)], True


def _dealt(runs, ranks):
    """Subtrees of runs without a run above, the longest first, each to the rank with the fewest rows."""
    subtrees, end = [], 0
    for begin, _, subtree_end in runs:
        if begin >= end:
            subtrees.append(np.arange(begin, subtree_end))
            end = subtree_end
    parts = [[] for _ in range(ranks)]
    for subtree in sorted(subtrees, key=len, reverse=True):
        min(parts, key=lambda part: sum(map(len, part))).append(subtree)
    return [np.sort(np.concatenate(part)) if part else np.zeros(0, np.int64) for part in parts]


def dealt_runs(runs, part):
    """The runs of a rank's own subtrees, counted from its own first row."""
    place = {row: i for i, row in enumerate(part.tolist())}
    return [(place[begin], length, place[end - 1] + 1) for begin, length, end in runs if begin in place]


class _Rows:
    """Rows [begin, end) of the item, which stand above rows of this rank: what espalier.rows.trunk.Trunk is for rows of an open trunk."""

    def __init__(self, begin, end):
        self.begin, self.end, self.rows = begin, end, end - begin
        self.k, self.v, self.added = {}, {}, None

    def sums(self, layer):
        return [x[self.begin:self.end] for x in self.added]


class Split:
    """Gathered rows of an item. `order`: for each of the item's rows its index among the gathered rows of all ranks, each rank's padded to `padded`.
    `whole`: the RowSet of the item's rows, and `own`: the indices of this rank's rows among them."""

    def __init__(self, runs, parts, rank, padded, above, group, device):
        self.ranks, self.group = len(parts), group
        order = np.empty(sum(map(len, parts)), np.int64)
        for at, part in enumerate(parts):
            order[part] = at * padded + np.arange(len(part))
        self.order = queued(torch.from_numpy(order), device)
        self.own, self.whole = queued(torch.from_numpy(parts[rank]), device), RowSet(0, tuple(above), runs)
        self.read = []  # rows of the item that stand above rows of this rank
        self.sets = self._sets(runs, parts[rank], above)

    def _sets(self, runs, part, above):
        """The RowSets of this rank's rows: one for each piece of a run, below the rows of its path in the item."""
        sets, path, place = [], [], {row: i for i, row in enumerate(part.tolist())}
        for begin, length, subtree_end in runs:
            while path and path[-1][2] <= begin:
                path.pop()
            path.append((begin, length, subtree_end))
            own = [row for row in range(begin, begin + length) if row in place]
            for piece in np.split(np.array(own), np.flatnonzero(np.diff(own) != 1) + 1) if own else []:
                first, rows = int(piece[0]), len(piece)
                ends = [(b, b + n) for b, n, _ in path[:-1]] + ([(begin, first)] if first > begin else [])
                upper = [self._above(b, e) for b, e in ends]
                sets.append(RowSet(place[first], (*above, *upper), [(place[first], rows, place[first] + rows)]))
        return sets

    def _above(self, begin, end):
        found = next((rows for rows in self.read if (rows.begin, rows.end) == (begin, end)), None)
        if found is None:
            found = _Rows(begin, end)
            self.read.append(found)
        return found

    @contextlib.contextmanager
    def reading(self, layer, k, v):
        """Context manager in which a layer's attention reads the item's keys and values k, v [R, 1, J, D]. Yields the sums of their gradients, [R, J, D]."""
        sums = [torch.zeros_like(x[:, 0], dtype=accumulator(x.dtype)) for x in (k, v)]
        for rows in self.read:
            rows.k[layer], rows.v[layer] = (x[rows.begin:rows.end, 0].transpose(0, 1)[None] for x in (k, v))
            rows.added = sums
        try:
            yield sums
        finally:
            for rows in self.read:
                rows.k, rows.v, rows.added = {}, {}, None
