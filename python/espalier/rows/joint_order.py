"""One order of calls for ranks that meet in every layer (sharded weights, experts) and have different items.

The engine has a rule of its own (espalier/program/joint_order.h): an event without rows needs no graph there. Here a backward needs its forward.
"""


def joint_order(everyone, slots=False):
    """[(letter, slot, ranks with an action of their own)]: one order that contains the sequence of every rank.

    Letters: F is a forward whose backward comes later, B the backward of a rank's latest such forward, P both at once, N a forward alone. A rank
    without an action of its own makes an empty call. An empty backward needs an empty forward: if a rank has none left and no rank has another
    forward to make, all of them make an empty one.

    `slots`: forwards that run together have one slot, and their backwards run together, since the backward of a layer with experts returns the rows
    that its forward exchanged. A slot closes as soon as all ranks with a forward of their own in it are at its backward; of the ranks that wait,
    those with the latest slot always are. Otherwise every empty forward will do (slot None).
    """
    at, stacks, owners = [0] * len(everyone), [[] for _ in everyone], {}
    empty, order, count = [0] * len(everyone), [], 0
    while any(i < len(own) for i, own in zip(at, everyone)):
        upcoming = ["" if i == len(own) else own[i] for i, own in zip(at, everyone)]
        who, slot = [rank for rank, letter in enumerate(upcoming) if letter == "B"], None
        if slots:
            ready = [slot for slot, of_slot in owners.items() if all(rank in who and stacks[rank][-1] == slot for rank in of_slot)]
            slot = max(ready, default=None)
            who = owners.pop(slot, [])
        elif not all(empty[rank] or rank in who for rank in range(len(everyone))):
            who = []
        letter = "B" if who else max("FPN", key=upcoming.count)
        if letter != "B":
            who = [rank for rank, own in enumerate(upcoming) if own == letter]
        if letter == "F" and slots:
            slot, count = count, count + 1
            owners[slot] = who
        for rank in range(len(everyone)):
            if rank not in who:
                empty[rank] += {"F": 1, "B": -1}.get(letter, 0)
                continue
            at[rank] += 1
            if letter == "F":
                stacks[rank].append(slot)
            elif letter == "B" and slots:
                stacks[rank].pop()
        order.append((letter, slot, who))
    return order
