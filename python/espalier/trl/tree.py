"""The rows of a padded batch as a tree: tokens that sequences have in common, from the first one on, are one row each.

Sorted sequences visit the tree's paths in depth-first order. Each sequence adds rows from the first token in which it differs from its
predecessor. The tree's rows are these additions, one after the other.
"""

import numpy as np
import torch

from espalier.hf.transfer import to_device


class Tree:
    """The unique rows of a batch [B, T]. `ids`, `positions` [R]: of the unique rows. `place` [B, T]: the row of each token, 0 for padding. `live` [B, T]:
    true for tokens, false for padding. `runs`: as in RowSet. `tokens`: the number of rows without sharing. `longest`: the largest length."""

    def __init__(self, sequences, begins, width, device):
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
        self.ids, self.positions, self.place, live = to_device(device, np.concatenate(parts), np.concatenate(positions), place, live.astype(np.int64))
        self.live = live != 0
        self.runs, self.rows = sorted(runs), rows
        self.tokens, self.longest = sum(map(len, sequences)), max(map(len, sequences))

    @classmethod
    def of(cls, input_ids, attention_mask):
        """The tree of a batch, or None if a sequence is empty or has a gap in its mask."""
        given = [input_ids] if attention_mask is None else [input_ids, (attention_mask != 0).to(input_ids.dtype)]
        ids, *mask = torch.stack(given).cpu().numpy()  # the only time that the host waits
        mask = mask[0].astype(np.int8) if mask else np.ones(ids.shape, np.int8)
        lengths, begins = mask.sum(1, dtype=np.int64), mask.argmax(1)
        if not lengths.all() or (np.diff(mask, axis=1) > 0).sum(1).max(initial=0) > 1 or any(
                not mask[b, begin:begin + length].all() for b, (begin, length) in enumerate(zip(begins, lengths))):
            return None
        return cls([ids[b, begin:begin + length] for b, (begin, length) in enumerate(zip(begins, lengths))], begins, ids.shape[1],
                   input_ids.device)


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
