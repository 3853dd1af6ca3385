"""The main loops of kernels in nvdisasm's text: what a tile costs a warp.

A kernel is a graph of blocks: instructions up to a label or a branch. Its main loop is the strongly connected part with
the most matrix instructions (HMMA, or HGMMA where warpgroups multiply). Without the edges into its first block the loop is cut open, and every way from
that block back to it is a round. Rounds differ by branches, so one is chosen: the most of these, then the most copies to
shared memory (LDGSTS), then the fewest instructions. That is a tile whose rows all see all keys, while the next tile is
fetched. A loop whose products are loops themselves (heads above 128 elements) has no count: how often those run is not
in the text.
"""

import re
from collections import Counter

SECTION = re.compile(r"^\.text\.(\S+):$")
LABEL = re.compile(r"^(\.L_x_\d+):$")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);?\s*(?:\}|/\*.*)?$")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
MATRIX = ("HMMA", "HGMMA")
ENDS = ("BRA", "EXIT", "RET", "BRX", "JMP")


class Block:
    def __init__(self):
        self.counts, self.next = Counter(), []


def blocks_of(lines):
    """The blocks of one kernel by number, with the numbers of those that follow."""
    blocks, place, jumps, falls = [Block()], {}, [], True

    def begin():
        if falls:
            blocks[-1].next.append(len(blocks))
        blocks.append(Block())

    for line in lines:
        if match := LABEL.match(line):
            begin()
            falls = True
            place[match[1]] = len(blocks) - 1
        elif match := INSTRUCTION.match(line):
            predicate, name, rest = match.groups()
            name, *kinds = name.split(".")
            if name != "NOP":  # what never runs (a load between copies and barriers) takes an issue slot all the same
                blocks[-1].counts["never" if (predicate or "").strip() == "@!PT" else name] += 1
            if name in ENDS and "DIV" not in kinds:  # BRA.DIV: for warps that a shuffle finds apart
                if target := TARGET.search(rest):
                    jumps.append((len(blocks) - 1, target[1]))
                # A branch by a uniform predicate or by "UP0," names it as an operand.
                falls = bool(predicate) or (name == "BRA" and rest.strip().startswith(("U", "!U", "P", "!P")))
                begin()
                falls = True
    for at, label in jumps:
        blocks[at].next.append(place[label])
    return blocks


def products(counts):
    return sum(counts[name] for name in MATRIX)


def connected(nodes, edges):
    """The strongly connected parts of a graph that hold a cycle (Tarjan), each a set of nodes."""
    index, low, stack, parts = {}, {}, [], []
    for root in nodes:
        if root in index:
            continue
        work = [(root, iter(edges(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(edges(other))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part = set()
                    while node not in part:
                        part.add(stack.pop())
                    if len(part) > 1 or node in edges(node):
                        parts.append(part)
    return parts


def best_round(blocks, part):
    """Instructions of the chosen round by name, or None where products are loops themselves."""
    first = min(node for node in part if any(node in blocks[other].next for other in range(len(blocks)) if other not in part))
    inside = {node: [to for to in blocks[node].next if to in part and to != first] for node in part}
    for inner in connected(sorted(part), inside.__getitem__):
        if any(products(blocks[node].counts) for node in inner):
            return None
    done = {}

    def value(counts):
        return products(counts), counts["LDGSTS"], -sum(counts.values())

    def from_node(node, above):
        """The best way from here to the end of the round; a loop inside is passed through, not repeated."""
        if node not in done:
            ways = [from_node(to, above | {node}) for to in inside[node] if to not in above]
            ways = [way for way in ways if way is not None]
            if first in blocks[node].next:
                ways.append(Counter())
            done[node] = blocks[node].counts + max(ways, key=value) if ways else None
        return done[node]

    return from_node(first, frozenset())


def main_loops(text):
    """{mangled kernel: instructions of a round of its main loop by name}, of kernels with matrix instructions in a loop."""
    kernels, lines = {}, None
    for line in text.splitlines():
        if match := SECTION.match(line):
            lines = kernels.setdefault(match[1], [])
        elif line.startswith("\t.section"):
            lines = None
        elif lines is not None:
            lines.append(line)
    found = {}
    for name, of_kernel in kernels.items():
        blocks = blocks_of(of_kernel)
        parts = connected(range(len(blocks)), lambda node, blocks=blocks: blocks[node].next)
        part = max(parts, key=lambda part: sum(products(blocks[node].counts) for node in part), default=None)
        if part and any(products(blocks[node].counts) for node in part):
            counts = best_round(blocks, part)
            if counts:
                found[name] = counts
    return found
