"""One order of work for ranks that share collectives but not their programs."""


def common_order(everyone, letters, opens, closes):
    """One sequence of (letter, ranks with an action) that contains the sequence of every rank. `letters`: those that occur, the ones to take first in
    front. A rank without an action of its own for a letter makes an empty one.

    An action `closes` ends an earlier action `opens`, an empty one an empty one. So openings come first: a rank without a closing of its own then
    has an empty one to end. If it has none left, all ranks make an empty opening.
    """
    at = [0] * len(everyone)
    empty = [0] * len(everyone)
    out = []
    while any(a < len(own) for a, own in zip(at, everyone)):
        upcoming = [own[a] if a < len(own) else "" for a, own in zip(at, everyone)]
        letter = next(letter for letter in letters if letter in upcoming)
        who = [rank for rank, own in enumerate(upcoming) if own == letter]
        if letter == closes and any(empty[rank] == 0 for rank in range(len(everyone)) if rank not in who):
            letter, who = opens, []
        for rank in range(len(everyone)):
            if rank in who:
                at[rank] += 1
            else:
                empty[rank] += (letter == opens) - (letter == closes)
        out.append((letter, who))
    return out
