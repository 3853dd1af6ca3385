"""Recurrences that take a state and return one: the gated delta rule (also per channel, KDA) and Mamba-2's chunked scan.

The model's own functions run. Segments that take the same number of chunks run as one batch, padded to the longest of them with rows
that neither decay nor write; a chunk holds rows of one segment only.
"""

import inspect

import torch

_CHUNK = 64  # of the delta rule in transformers and in its kernels


def none(*_, **__):
    return None


def delta_rule(theirs, segments, *args, **kwargs):
    """query, key, value [1, T, H, D], g [1, T, H] or [1, T, H, D], beta [1, T, H] -> (out [1, T, H, D], None)."""
    given = arguments(theirs, args, kwargs)
    rows = {name: given.pop(name) for name in ("query", "key", "value", "g", "beta")}
    unit = given.setdefault("chunk_size", _CHUNK)
    run = lambda batch, start: theirs(**batch, **{**given, "initial_state": start, "output_final_state": True})
    return _over_segments(segments, rows, unit, run), None


def mamba2(theirs, segments, *args, **kwargs):
    """hidden_states [1, T, H, D], dt [1, T, H], B and C [1, T, G, N] -> [1, T, H, D]. dt's bias, softplus and limits are applied here, as
    the model's function would, so that rows of padding have dt = 0."""
    given = arguments(theirs, args, kwargs)
    dt, bias, limit = given.pop("dt"), given.pop("dt_bias", None), given.pop("dt_limit", (0.0, float("inf")))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = torch.nn.functional.softplus(dt) if given.pop("dt_softplus", False) else dt
    rows = dict(dt=dt.clamp(min=limit[0], max=limit[1]), **{name: given.pop(name) for name in ("hidden_states", "B", "C")})
    run = lambda batch, start: theirs(**batch, **{**given, "initial_states": start, "return_final_states": True})
    return _over_segments(segments, rows, given["chunk_size"], run)


def arguments(function, args, kwargs):
    """The arguments by name, without those that the function ignores."""
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    bound.pop("kwargs", None)
    return bound


def _over_segments(segments, rows, unit, run):
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
    if segments.captures is not None:
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
