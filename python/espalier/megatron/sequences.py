"""The sequences of a trainer's micro-batches as a prefix tree, and the program of a step that keeps these micro-batches.

A sequence may be shared up to the first row whose logits the loss reads. Rows that micro-batches have in common become trunks. Rows that only
sequences of one micro-batch have in common run once in it. A micro-batch is one wave, which may read several trunks.
"""

from dataclasses import dataclass, field

import numpy as np

from espalier.megatron.program import MicroBatch

_LEAST = 32  # rows that a node must save, because a trunk takes two more micro-batches


@dataclass(eq=False)
class Sequence:
    """One sequence of a micro-batch. `tokens`: its rows. `first`: the first row whose logits the loss reads. `at`: the place of its row 0 among the
    micro-batch's rows. `node`: the innermost node that it belongs to."""
    batch: int
    tokens: np.ndarray
    first: int
    at: int
    node: "Node | None" = None

    @property
    def own(self):
        """The first row that runs for this sequence alone."""
        return 0 if self.node is None else self.node.end


@dataclass(eq=False)
class Node:
    """Rows [begin, end) that all `sequences` have in common."""
    begin: int
    end: int
    sequences: list
    children: list = field(default_factory=list)
    parent: "Node | None" = None

    @property
    def trunk(self):
        """True if the sequences are in several micro-batches."""
        return len(self.batches) > 1

    @property
    def batches(self):
        return {sequence.batch for sequence in self.sequences}

    @property
    def path(self):
        """The trunks above, outermost first."""
        return () if self.parent is None else (*self.parent.path, self.parent) if self.parent.trunk else self.parent.path

    @property
    def tokens(self):
        return self.sequences[0].tokens[self.begin:self.end]


def tree_of(sequences, least=_LEAST):
    """The nodes that save at least `least` rows, parents first. Sets each sequence's `node`."""
    kept = []

    def keep(node, parent, begin):
        node.begin, node.parent, children, node.children = begin, parent, node.children, []
        if (node.end - begin) * (len(node.sequences) - 1) >= least:  # the rows of a smaller node belong to its children
            kept.append(node)
            if parent is not None:
                parent.children.append(node)
            for sequence in node.sequences:
                sequence.node = node
            parent, begin = node, node.end
        for child in children:
            keep(child, parent, begin)

    for node in _nodes(sorted(sequences, key=lambda s: s.tokens[:s.first].astype(">i8").tobytes()), 0):
        keep(node, None, 0)
    return kept


def _nodes(members, depth):
    """The nodes of sorted sequences whose first `depth` rows are equal."""
    members, found, begin = [s for s in members if s.first > depth], [], 0
    for at in range(1, len(members) + 1):
        if at == len(members) or members[at].tokens[depth] != members[begin].tokens[depth]:
            group, begin = members[begin:at], at
            if len(group) > 1:
                end = _common(group[0], group[-1], depth)
                found.append(Node(depth, end, group, _nodes(group, end)))
    return found


def _common(a, b, depth):
    """The number of rows that two sequences have in common. In a sorted list, all between them have these rows, too."""
    n = min(a.first, b.first)
    different = np.flatnonzero(a.tokens[depth:n] != b.tokens[depth:n])
    return depth + int(different[0]) if len(different) else n


def program_of(batches, nodes, nested, gradients):
    """The micro-batches of a step: `index` is a Node to open or close, or the number of a trainer's micro-batch. Next comes the micro-batch that needs the
    fewest new rows of trunks. `nested`: trunks close in the opposite order of their opening, for ranks that open and close together."""
    trunks = [(node, node.batches, node.end - node.begin) for node in nodes if node.trunk]
    left, opened, out = list(range(batches)), [], []
    is_open = lambda node: any(node is one for one in opened)
    while left:
        new = {batch: sum(rows for node, readers, rows in trunks if batch in readers and not is_open(node)) for batch in left}
        batch = min(left, key=lambda batch: new[batch]) if opened else left[0]
        for node, readers, _ in trunks:
            if batch in readers and not is_open(node):
                out.append(MicroBatch("open", node))
                opened.append(node)
        out.append(MicroBatch("wave", batch))
        left.remove(batch)
        for node in reversed(opened[:]):
            if node.batches.isdisjoint(left):
                opened.remove(node)
                if gradients:
                    out.append(MicroBatch("close", node))
                out[-1].last_of.append(node)
            elif nested:
                break
    return out


@dataclass
class Run:
    """Rows [begin, begin + len(tokens)) of a micro-batch's own, seen by later rows up to `end`. `sequences`: whose rows they are."""
    tokens: np.ndarray
    position: int
    begin: int
    end: int
    sequences: list


def rows_of(batch, sequences, nodes):
    """[(trunks above, runs)]: the rows of one micro-batch, runs in order."""
    groups = {}  # trunks above -> (sequences, nodes) that stand below them
    group = lambda path: groups.setdefault(tuple(map(id, path)), (path, [], []))
    for s in sequences:
        if s.batch == batch and (s.node is None or s.node.trunk):
            group(() if s.node is None else (*s.node.path, s.node))[1].append(s)
    for node in nodes:
        if node.batches == {batch} and (node.parent is None or node.parent.trunk):
            group(node.path)[2].append(node)
    sets, at = [], 0

    def add(runs, tokens, position, sequences):
        nonlocal at
        runs.append(Run(tokens, position, at, at + len(tokens), sequences))
        at += len(tokens)
        return runs[-1]

    def below(node, runs):
        run = add(runs, node.tokens, node.begin, node.sequences)
        for s in node.sequences:
            if s.node is node:
                add(runs, s.tokens[node.end:], node.end, [s])
        for child in node.children:
            below(child, runs)
        run.end = at

    for path, own, inside in groups.values():
        runs = []
        for s in own:
            add(runs, s.tokens[s.own:], s.own, [s])
        for node in inside:
            below(node, runs)
        sets.append((path, runs))
    return sets
