"""The one order of calls of ranks that meet in every layer (espalier.rows.joint_order)."""

import random

import pytest

from espalier.rows.joint_order import joint_order


def nested(generator, waves, depth=0):
    """A random program of one rank. `waves`: how it runs a response's rows; with FB a trunk may run again for its backward."""
    out, ends = "", ["B", "FB"] if waves == "FB" else ["B"]
    for _ in range(generator.randint(0 if depth == 0 else 1, 3)):
        out += waves if depth == 3 or generator.random() < .5 else "F" + nested(generator, waves, depth + 1) + generator.choice(ends)
    return out


def programs(seed, waves):
    generator = random.Random(seed)
    if seed % 4 == 0 and waves == "P":
        return ["".join(generator.choice("NP") for _ in range(generator.randint(0, 8))) for _ in range(generator.randint(1, 4))]
    return [nested(generator, waves) for _ in range(generator.randint(1, 4))]


@pytest.mark.parametrize("waves,slots", [("FB", False), ("P", False), ("P", True)])
def test_the_order_holds_each_rank_s_own(waves, slots):
    """And every empty backward has an empty forward. An order is at most twice as long as the longest program on average."""
    longer = []
    for seed in range(400):
        everyone = programs(seed, waves)
        order = joint_order(everyone, slots)
        for rank, own in enumerate(everyone):
            assert "".join(letter for letter, _, who in order if rank in who) == own, seed
            held = 0
            for letter, _, who in order:
                held += 0 if rank in who else {"F": 1, "B": -1}.get(letter, 0)
                assert held >= 0, f"seed {seed}: an empty backward without an empty forward"
        longer.append(len(order) / max(1, *map(len, everyone)))
    assert sum(longer) / len(longer) < 2


def test_backwards_of_one_slot_run_together():
    for seed in range(400):
        everyone, opened = programs(seed, "P"), {}
        order, stacks = joint_order(everyone, slots=True), [[] for _ in everyone]
        for letter, slot, who in order:
            if letter == "F":
                assert slot not in opened, "every slot opens once"
                opened[slot] = who
                for rank in who:
                    stacks[rank].append(slot)
            if letter == "B":
                assert who == opened[slot] and all(stacks[rank].pop() == slot for rank in who), seed
        assert not any(stacks), "every slot closes"


@pytest.mark.parametrize("slots", [False, True])
def test_equal_ranks_keep_their_program(slots):
    own = "FPFPPBPBN"
    assert joint_order([own] * 3, slots) == [(letter, slot if slots else None, [0, 1, 2]) for letter, slot in zip(own, (0, None, 1, None, None, 1, None, 0, None))]
