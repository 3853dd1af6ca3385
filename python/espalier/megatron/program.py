"""A plan as this rank's micro-batches: open a trunk, run a wave, close a trunk.

Megatron runs micro-batches in order on every pipeline stage, forward and backward. This is the order that shared prompts need, so the three kinds
are micro-batches of Megatron's own schedules. `open` sends a trunk's output on and keeps its graph; its backward sends zeros. `close` computes
nothing forward; its backward runs the kept graph.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist

from espalier.rows.joint_order import joint_order

_LETTERS = {"open": "F", "wave": "P", "close": "B"}  # of joint_order
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}


@dataclass
class MicroBatch:
    """`index`: of the plan's item; None: rows that no loss reads, for ranks that have less to do than others. `last_of`: trunks that nothing behind
    this micro-batch reads. `slot`: of trunks that ranks open and close together."""
    kind: str
    index: int | None = None
    slot: int | None = None
    last_of: list = field(default_factory=list)


def program_of(steps, items, gradients):
    """The micro-batches of a plan's program (native.Plan.program). Without gradients nothing is closed."""
    out = []
    for forward, index in steps:
        if forward:
            out.append(MicroBatch("open" if items[index].trunk else "wave", index))
        elif items[index].trunk:
            if gradients:
                out.append(MicroBatch("close", index))
            out[-1].last_of.append(index)
    return out


def aligned(program, group, multiple):
    """The program in which all ranks of `group` run micro-batches of the same kinds in the same order, their number a multiple of `multiple`."""
    if group is not None and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, "".join(_LETTERS[one.kind] for one in program), group)
        own, out = iter(program), []
        for letter, slot, who in joint_order(everyone, slots=True):
            one = next(own) if dist.get_rank(group) in who else MicroBatch(_KINDS[letter])
            one.slot = slot
            out.append(one)
        program = out
    return program + [MicroBatch("wave") for _ in range(-len(program) % multiple)]


def counted(program):
    return Counter(one.kind for one in program)
