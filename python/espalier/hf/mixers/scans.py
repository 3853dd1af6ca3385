"""Recurrences that take a state and return one: the gated delta rule (also per channel, KDA) and Mamba-2's chunked scan.

The model's own functions run, over batches of segments (espalier.rows.scans).
"""

import inspect

import torch

from espalier.rows.scans import over_segments

_CHUNK = 64  # of the delta rule in transformers and in its kernels


def none(*_, **__):
    return None


def delta_rule(theirs, segments, *args, **kwargs):
    """query, key, value [1, T, H, D], g [1, T, H] or [1, T, H, D], beta [1, T, H] -> (out [1, T, H, D], None)."""
    given = arguments(theirs, args, kwargs)
    rows = {name: given.pop(name) for name in ("query", "key", "value", "g", "beta")}
    unit = given.setdefault("chunk_size", _CHUNK)
    run = lambda batch, start: theirs(**batch, **{**given, "initial_state": start, "output_final_state": True})
    return over_segments(segments, rows, unit, run), None


def mamba2(theirs, segments, *args, **kwargs):
    """hidden_states [1, T, H, D], dt [1, T, H], B and C [1, T, G, N] -> [1, T, H, D]. dt's bias, softplus and limits are applied here, as
    the model's function would, so that rows of padding have dt = 0."""
    given = arguments(theirs, args, kwargs)
    dt, bias, limit = given.pop("dt"), given.pop("dt_bias", None), given.pop("dt_limit", (0.0, float("inf")))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = torch.nn.functional.softplus(dt) if given.pop("dt_softplus", False) else dt
    rows = dict(dt=dt.clamp(min=limit[0], max=limit[1]), **{name: given.pop(name) for name in ("hidden_states", "B", "C")})
    run = lambda batch, start: theirs(**batch, **{**given, "initial_states": start, "return_final_states": True})
    return over_segments(segments, rows, given["chunk_size"], run)


def arguments(function, args, kwargs):
    """The arguments by name, without those that the function ignores."""
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    bound.pop("kwargs", None)
    return bound
