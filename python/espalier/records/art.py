"""OpenPipe ART's packed tensors: a folder with one raw file per field, tokens.pt, group_ids.pt, parent_ids.pt, input_pos.pt
(int64), assistant_mask.pt (bool), logprobs.pt, advantages.pt, weights.pt (float32), rows end to end.

A row holds prefix trees. A run of tokens with one group id is a node. Its parent_id is the group id of the node that it continues, or
its own if it begins a sequence; input_pos counts along the path. A path to a node that no node continues is a rollout. The files do
not contain the length of a row, and it is not needed: a parent comes before its children, in the same row.

The prompt ends before the first token of assistant_mask. ART's loss uses the sampler's logprobs as the old policy's, and
multiplies each token's loss by its weight. So the record gets them as old and rollout log-probs, and advantage times weight as advantage.
"""

import math
from pathlib import Path

from .errors import RecordError
from .left_out import refuse_media
from .neutral import Place, record, series
from .tensors import bytes_per_number, numbers_of

NAME = "ART packed tensors"
FIELDS = {"tokens": "int64", "group_ids": "int64", "parent_ids": "int64", "input_pos": "int64", "assistant_mask": "bool",
          "logprobs": "float32", "advantages": "float32", "weights": "float32"}
_PADDING = -1  # of group and parent


def matches(folder):
    return all((Path(folder) / f"{name}.pt").is_file() for name in ("tokens", "group_ids", "parent_ids"))


def records(folder, notes):
    columns = {name: _column(Path(folder) / f"{name}.pt", dtype) for name, dtype in FIELDS.items()}
    count = len(columns["tokens"])
    for name, values in columns.items():
        if len(values) != count:
            raise RecordError(f"{folder}/{name}.pt", f"{count} numbers, as in tokens.pt", str(len(values)))
    left = {file.stem: True for file in Path(folder).glob("*.pt") if file.stem not in FIELDS}
    refuse_media(folder, left)
    notes.leave(left)
    notes.add("ART packed tensors: the sampler's log-probs are those of the old policy too, the temperature is not in it (--temperature, by default 1)")
    nodes = _nodes(folder, columns)
    continued = {node.parent for node in nodes}
    leaves = [node for at, node in enumerate(nodes) if at not in continued]
    for index, leaf in enumerate(leaves):
        yield _record(Place(folder, index), _path(nodes, leaf), columns)


def _column(path, dtype):
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(str(path), "a readable file", error.strerror or str(error)) from None
    if len(data) % bytes_per_number(dtype):
        raise RecordError(str(path), f"raw {dtype} numbers", f"{len(data)} bytes", "It was cut short or damaged; write it again")
    return numbers_of(data, dtype)


class _Node:
    def __init__(self, begin, end, parent):
        self.begin, self.end, self.parent = begin, end, parent  # a range of the columns; an index into the nodes, or None


def _nodes(folder, columns):
    groups, parents, positions = columns["group_ids"], columns["parent_ids"], columns["input_pos"]
    nodes, latest, at, count = [], {}, 0, len(groups)
    while at < count:
        group, parent, begin = groups[at], parents[at], at
        at += 1
        while at < count and groups[at] == group and parents[at] == parent and (
                group == _PADDING or positions[at] == positions[at - 1] + 1):
            at += 1
        if group == parent == _PADDING:
            continue
        above = None if parent == group else latest.get(parent)
        if parent != group and above is None:
            raise RecordError(f"{folder}: token {begin}", f"the node {parent} before the nodes that continue it", "none")
        expected = 0 if above is None else positions[nodes[above].end - 1] + 1
        if positions[begin] != expected:
            raise RecordError(f"{folder}: token {begin}: input_pos", str(expected), str(positions[begin]))
        latest[group] = len(nodes)
        nodes.append(_Node(begin, at, above))
    if not nodes:
        raise RecordError(folder, "at least one token", "padding only")
    return nodes


def _path(nodes, leaf):
    """The ranges of the columns that make up the path to a leaf, from the first token on."""
    ranges = []
    while leaf is not None:
        ranges.insert(0, (leaf.begin, leaf.end))
        leaf = None if leaf.parent is None else nodes[leaf.parent]
    return ranges


def _record(place, ranges, columns):
    def whole(name):
        return [value for begin, end in ranges for value in columns[name][begin:end]]

    mask = [int(value) for value in whole("assistant_mask")]
    begin = mask.index(1) if 1 in mask else len(mask)
    tokens, loss_mask = whole("tokens"), mask[begin:]
    logprobs = whole("logprobs")[begin:]
    if all(math.isnan(value) for value, counts in zip(logprobs, loss_mask) if counts):
        logprobs = None  # sampled without log-probs
    advantage = [a * w for a, w in zip(whole("advantages")[begin:], whole("weights")[begin:])]
    return record(place, tokens[:begin], tokens[begin:], loss_mask, advantage=series(place, "advantages", advantage, loss_mask),
                  old_logprobs=series(place, "logprobs", logprobs and list(logprobs), loss_mask), rollout_logprobs=series(place, "logprobs", logprobs, loss_mask))
