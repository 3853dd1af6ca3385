"""The rows of a padded batch as a tree: tokens that sequences have in common, from the first one on, are one row each.

Sorted sequences visit the tree's paths in depth-first order. Each sequence adds rows from the first token in which it differs from its
predecessor. The tree's rows are these additions, one after the other.

A head that predicts labels runs each different pair of a row and its label once (`Labelled`).
"""

import numpy as np
import torch

from espalier.rows.transfer import to_device

IGNORED = -100  # the label of a token without one


class Tree:
    """The unique rows of a batch [B, T]. `ids`, `positions` [R]: of the unique rows. `place` [B, T]: the row of each token, 0 for padding. `live` [B, T]:
    true for tokens, false for padding. `runs`: as in RowSet. `tokens`: the number of rows without sharing. `longest`: the largest length.
    `labelled`: a `Labelled` if a token has a label, else None. `label_behind_padding`: true if a token with a label follows padding."""

    def __init__(self, sequences, begins, width, device, labels=None):
        order = sorted(range(len(sequences)), key=lambda b: sequences[b].tolist())
        place, live = np.zeros((len(sequences), width), np.int64), np.zeros((len(sequences), width), bool)
        parts, positions, runs, open_runs, rows = [], [], [], [], 0
        path, before = np.zeros(0, np.int64), None  # the rows of the previous sequence
        for b in order:
            own = sequences[b]
            common = 0 if before is None else _common(before, own)
            _close(open_runs, runs, common, rows)
            new = len(own) - common
            if new:
                open_runs.append((rows, common, new))
            path, before = np.concatenate([path[:common], np.arange(rows, rows + new)]), own
            place[b, begins[b]:begins[b] + len(own)], live[b, begins[b]:begins[b] + len(own)] = path, True
            parts.append(own[common:])
            positions.append(np.arange(common, len(own)))
            rows += new
        _close(open_runs, runs, 0, rows)
        mask = None if labels is None else labels[:, 1:] != IGNORED
        self.label_behind_padding = mask is not None and bool((mask & ~live[:, :-1]).any())
        pairs = () if mask is None or not mask.any() else _pairs(mask, place[:, :-1][mask], labels[:, 1:][mask])
        self.ids, self.positions, self.place, live, *pairs = to_device(
            device, np.concatenate(parts), np.concatenate(positions), place, live.astype(np.int64), *pairs)
        self.labelled = Labelled(*pairs) if pairs else None
        self.live = live != 0
        self.runs, self.rows = sorted(runs), rows
        self.tokens, self.longest = sum(map(len, sequences)), max(map(len, sequences))

    @classmethod
    def of(cls, input_ids, attention_mask, labels=None):
        """The tree of a batch, or None if a sequence is empty or has a gap in its mask, or if the mask numbers documents in a row. `labels` [B, T]: -100 for
        tokens without a label."""
        given = {"mask": attention_mask, "labels": labels}
        given = {name: value.to(input_ids) for name, value in given.items() if value is not None}
        ids, *others = torch.stack([input_ids, *given.values()]).cpu().numpy()  # the only time that the host waits
        host = dict(zip(given, others))
        if "mask" in host and (host["mask"] > 1).any():
            return None
        mask = (host["mask"] != 0).astype(np.int8) if "mask" in host else np.ones(ids.shape, np.int8)
        lengths, begins = mask.sum(1, dtype=np.int64), mask.argmax(1)
        if not lengths.all() or (np.diff(mask, axis=1) > 0).sum(1).max(initial=0) > 1 or any(
                not mask[b, begin:begin + length].all() for b, (begin, length) in enumerate(zip(begins, lengths))):
            return None
        return cls([ids[b, begin:begin + length] for b, (begin, length) in enumerate(zip(begins, lengths))], begins, ids.shape[1],
                   input_ids.device, host.get("labels"))


    def moved(self, position_ids):
        """Lets the rows' positions count from where `position_ids` [B, T] do. False, without a change, if these count in another way."""
        if position_ids.shape != self.live.shape:
            return False
        by = (position_ids - self.positions[self.place])[self.live]
        if bool((by != by[0]).any()):
            return False
        self.positions = self.positions + by[0]
        return True


class Labelled:
    """The labels of a batch [B, T]; the row before a token predicts its label. `mask` [B, T - 1]: true where a label is. `rows`, `labels` [U]: the
    different pairs of a row and its label. `which` [N]: the pair of each label of the mask."""

    def __init__(self, mask, rows, labels, which):
        self.mask, self.rows, self.labels, self.which = mask != 0, rows, labels, which
        self.repeats = len(which) > len(rows)

    def whole(self, values):
        """Values [1, U] of the pairs -> [B, T - 1], 0 where no label is."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values[0][self.which])


def _pairs(mask, rows, labels):
    """The arrays of `Labelled`."""
    least = labels.min()
    _, first, which = np.unique(rows * (labels.max() - least + 1) + labels - least, return_index=True, return_inverse=True)
    return mask.astype(np.int64), rows[first], labels[first], which


def _common(a, b):
    """The number of tokens that two sequences have in common, counted from the first one."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _close(open_runs, runs, depth, rows):
    """Closes the runs that the next sequence, which leaves the path at `depth`, does not see: their subtrees end at row `rows`."""
    while open_runs:
        begin, at, length = open_runs[-1]
        if at + length <= depth:
            return
        open_runs.pop()
        kept = max(depth - at, 0)
        runs.append((begin + kept, length - kept, rows))
        if kept:
            open_runs.append((begin, at, kept))
            return
