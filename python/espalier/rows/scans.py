"""A recurrence over the segments of a call. Segments that take the same number of chunks run as one batch, padded to the longest of them with rows
that neither decay nor write; a chunk holds rows of one segment only.
"""

import torch


def over_segments(segments, rows, unit, run):
    """`run(batch, states)` -> (out, end states) for batches of segments; out of all rows in order. `rows` are [1, T, ...]; a row of zeros
    changes no state."""
    above, kept = segments.above(), segments.kept()
    ends, parts, places = {}, [], []
    for batch in segments.generations(unit):
        spans = [segments.all[index][:2] for index in batch]
        start = _starts([segments.all[index][2] for index in batch], ends, above)
        out, end = run({name: _batch(x, spans) for name, x in rows.items()}, start)
        for place, (index, (begin, length)) in enumerate(zip(batch, spans)):
            parts.append(out[place, :length])
            places.append((begin, len(parts) - 1))
            if kept[index]:
                ends[index] = end[place:place + 1]
    if segments.leave is not None:
        segments.leave(ends[len(segments.all) - 1])
    return torch.cat([parts[part] for _, part in sorted(places)])[None]


def start_of(parent, ends, above):
    """The state that a segment starts from; None: nothing."""
    return ends[parent] if parent >= 0 else above[-1 - parent]


def _starts(parents, ends, above):
    """[n, ...], or None where all start from nothing."""
    states = [start_of(parent, ends, above) for parent in parents]
    some = next((state for state in states if state is not None), None)
    if some is None:
        return None
    if all(state is states[0] for state in states):
        return some.expand(len(states), *some.shape[1:])
    return torch.cat([torch.zeros_like(some) if state is None else state for state in states])


def _batch(x, spans):
    """[1, T, ...] -> [n, longest, ...]. Zeros past a segment's end."""
    longest = max(length for _, length in spans)
    cut = [x[0, begin:begin + length] for begin, length in spans]
    pad = lambda part: part if len(part) == longest else torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])])
    return torch.stack([pad(part) for part in cut])
