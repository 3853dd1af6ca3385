"""Kept sets: the tokens that top-p and top-k left to the sampler of a response token. Its log-prob, entropy and gradient are over them.

A record has them as `kept_ids`: for each response token a list of token ids, or None for the whole vocabulary (docs/rollout_format.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from espalier import native
from espalier.errors import Error
from espalier.rows.transfer import to_device

_LOGITS, _LOGITS_ON_A_GPU = 1 << 20, 1 << 24  # of sets side by side, each as wide as the widest


class KeptSets:
    """The sets of one rollout, end to end: that of token t is ids[begin[t]:begin[t + 1]], ascending; empty: the whole vocabulary."""

    def __init__(self, begin: np.ndarray, ids: np.ndarray) -> None:
        self.begin, self.ids = begin, ids

    def at(self, position: int) -> np.ndarray:
        return self.ids[self.begin[position]:self.begin[position + 1]]


def of_record(record: Mapping[str, Any], response: np.ndarray, where: str, vocabulary: int) -> KeptSets | None:
    """The sets of a record, or None if it has none. A token with `loss_mask` 0 that is not in its set has none. Raises `espalier.Error`."""
    given = record.get("kept_ids")
    if given is None:
        return None
    where = f"{where}['kept_ids']"
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise Error("input", where, "a list with the kept ids of each response token, or None for a token", type(given).__name__, "", 3)
    if len(given) != len(response):
        raise Error("input", where, f"{len(response)} entries, one per response token", str(len(given)), "", 3)
    mask = record.get("loss_mask")
    parts = []
    for t, (token, one) in enumerate(zip(response, given)):
        ids = np.zeros(0, np.int32) if one is None else np.unique(native.token_ids(one, f"{where}[{t}]"))
        if one is not None and token not in ids:
            if mask is None or mask[t]:
                raise Error("input", f"{where}[{t}]", f"the sampled token {token} among the kept ids", f"{len(ids)} ids without it",
                            "Are these the sets of this response, one for each token? None stands for a token whose set was not recorded", 3)
            ids = ids[:0]
        if len(ids) and ids[-1] >= vocabulary:
            raise Error("input", f"{where}[{t}]", f"ids below the vocabulary's {vocabulary}", str(ids[-1]), "", 3)
        parts.append(ids)
    begin = np.concatenate([[0], np.cumsum([len(ids) for ids in parts], dtype=np.int64)])
    return KeptSets(begin, np.concatenate(parts)) if begin[-1] else None


class EdgeSets:
    """The kept sets of a call's edges, on its device.

    `has` [E]: 1 for an edge with a set, else 0; `all_have`: whether all are 1. `groups`: (edge [K], column [K, W], inside [K, W]) for edges
    whose sets stand side by side; W is the size of the widest, and where `inside` is False a column is padding.
    """

    def __init__(self, sets: Sequence[np.ndarray], device: Any) -> None:
        sizes = np.array([len(one) for one in sets])
        edges = np.flatnonzero(sizes)
        edges = edges[np.argsort(sizes[edges], kind="stable")]  # sets of a group are of similar size
        most = _LOGITS if torch.device(device).type == "cpu" else _LOGITS_ON_A_GPU
        arrays, first = [(sizes > 0).astype(np.int64)], 0
        while first < len(edges):
            last = first + 1
            while last < len(edges) and (last + 1 - first) * sizes[edges[last]] <= most:
                last += 1
            members = edges[first:last]
            column = np.zeros((len(members), sizes[members[-1]]), np.int64)
            for row, edge in enumerate(members):
                column[row, :sizes[edge]] = sets[edge]
            arrays += [members, column, sizes[members]]
            first = last
        self.has, *rest = to_device(device, *arrays)
        self.all_have = len(edges) == len(sets)
        self.groups = [(edge, column, torch.arange(column.shape[1], device=column.device) < size[:, None])
                       for edge, column, size in zip(rest[::3], rest[1::3], rest[2::3])]


def of_edges(kept: Sequence[KeptSets | None], rollout: np.ndarray, position: np.ndarray, device: Any) -> EdgeSets | None:
    """The sets of edges, which are tokens `position` of rollouts `rollout`. None if no edge has one."""
    if all(one is None for one in kept):
        return None
    none = np.zeros(0, np.int32)
    sets = [none if kept[r] is None else kept[r].at(t) for r, t in zip(rollout, position)]
    return EdgeSets(sets, device) if any(len(one) for one in sets) else None
