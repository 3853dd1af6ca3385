"""A plan as this rank's micro-batches: open a trunk, run a wave, close a trunk.

Megatron runs micro-batches in order on every pipeline stage, forward and backward. That is the order that shared prompts need, so the three kinds
are micro-batches of Megatron's own schedules. `open` sends a trunk's output on and keeps its graph; its backward sends zeros. `close` computes
nothing forward; its backward runs the kept graph.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist

from espalier.rows.order import common_order

_LETTERS = {"open": "O", "wave": "W", "close": "C"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}


@dataclass
class MicroBatch:
    """`index`: of the plan's item; None: rows that no loss reads, for ranks that have less to do than others. `last_of`: trunks that nothing behind
    this micro-batch reads."""
    kind: str
    index: int | None = None
    last_of: list = field(default_factory=list)


def program_of(items, gradients):
    """The micro-batches of a plan's items, depth first. Without gradients nothing is closed."""
    out, above = [], []

    def close():
        index = above.pop()
        if gradients:
            out.append(MicroBatch("close", index))
        out[-1].last_of.append(index)

    for index, item in enumerate(items):
        while above and above[-1] != item.parent:
            close()
        out.append(MicroBatch("open" if item.trunk else "wave", index))
        if item.trunk:
            above.append(index)
    while above:
        close()
    return out


def aligned(program, group, multiple):
    """The program in which all ranks of `group` run micro-batches of the same kinds in the same order, their number a multiple of `multiple`."""
    if group is not None and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, "".join(_LETTERS[one.kind] for one in program), group)
        rank, own, out = dist.get_rank(group), iter(program), []
        for letter, who in common_order(everyone, "OWC", "O", "C"):
            out.append(next(own) if rank in who else MicroBatch(_KINDS[letter]))
        program = out
    return program + [MicroBatch("wave") for _ in range(-len(program) % multiple)]


def counted(program):
    return Counter(one.kind for one in program)
