"""A plan as this rank's micro-batches: open a trunk, run a wave, close a trunk.

Megatron runs micro-batches in order on every pipeline stage, forward and backward. This is the order that shared prompts need, so the three kinds
are micro-batches of Megatron's own schedules. `open` sends a trunk's output on and keeps its graph; its backward sends zeros. `close` computes
nothing forward; its backward runs the kept graph.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist

_LETTERS = {"open": "O", "wave": "W", "close": "C"}
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
        for letter, slot, who in common_order(everyone):
            one = next(own) if dist.get_rank(group) in who else MicroBatch(_KINDS[letter])
            one.slot = slot
            out.append(one)
        program = out
    return program + [MicroBatch("wave") for _ in range(-len(program) % multiple)]


def common_order(everyone):
    """[(letter, slot, ranks with an item of their own)]: one order that contains the program of every rank, of the letters O, W and C.

    Trunks that open together have one slot, and they close together: the backward of a layer with experts returns the rows that its forward
    exchanged. A rank without a trunk of its own opens one of rows that no loss reads. A slot closes as soon as all ranks that own a trunk in
    it are at its closing; of the ranks that wait, those with the latest slot always are.
    """
    at, stacks, owners, order, slots = [0] * len(everyone), [[] for _ in everyone], {}, [], 0
    while True:
        upcoming = ["" if i == len(own) else own[i] for i, own in zip(at, everyone)]
        if not any(upcoming):
            return order
        closing = [stack[-1] if letter == "C" else None for letter, stack in zip(upcoming, stacks)]
        ready = [slot for slot in closing if slot is not None and all(closing[rank] == slot for rank in owners[slot])]
        if ready:
            letter, slot, who = "C", max(ready), owners.pop(max(ready))
        else:
            letter = max("OW", key=upcoming.count)
            who, slot = [rank for rank, own in enumerate(upcoming) if own == letter], None
            if letter == "O":
                slot, slots = slots, slots + 1
                owners[slot] = who
        for rank in who:
            at[rank] += 1
            if letter == "O":
                stacks[rank].append(slot)
            elif letter == "C":
                stacks[rank].pop()
        order.append((letter, slot, who))


def counted(program):
    return Counter(one.kind for one in program)
