"""Rotary tables that transformers computes in each call, from the call's largest position: `longrope` and `dynamic`.

A rollout alone has the table of its own length. The calls of a phase are shorter, so `Phase.regime` gives the length: the rotary module gets
its last position as one more position id, and that row of the table is dropped afterwards.

    longrope    one table up to original_max_position_embeddings L tokens, another beyond: rollouts on both sides of L share no row
                and no padded call.
    dynamic     a table for each length beyond L, and the longest so far stays in use: refused from L tokens on.
"""

import contextlib
import functools

import numpy as np
import torch

from espalier.errors import Unsupported

LONGROPE, DYNAMIC = "longrope", "dynamic"


def _kinds(module):
    """The rope types of a rotary module by layer type (None: one for all layers)."""
    types = getattr(module, "rope_type", None)
    return {} if types is None else types if isinstance(types, dict) else {None: types}


def limits(base):
    """[(name of the module, LONGROPE or DYNAMIC, original length L)] of tables that depend on a call's largest position."""
    out = []
    for name, module in base.named_modules():
        for layer, kind in _kinds(module).items():
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            parameters = parameters if layer is None else parameters.get(layer) or {}
            scaled = kind != "default" and "long_mscale" in parameters  # Phi-3.5-MoE's table has another type name
            if not isinstance(kind, str) or not (kind == LONGROPE or scaled or DYNAMIC in kind):
                continue
            if DYNAMIC not in kind:
                out.append((name, LONGROPE, int(parameters["original_max_position_embeddings"])))
            else:
                out.append((name, DYNAMIC, int(module.original_max_seq_len)))
    return out


def regimes(base, lengths):
    """Lists of indices into `lengths`, ascending: one list for all rollouts with the same tables, shorter rollouts first."""
    bounds = [limit for _, kind, limit in limits(base) if kind == LONGROPE]
    passed = np.array([sum(length > bound for bound in bounds) for length in lengths])
    return [np.flatnonzero(passed == count) for count in np.unique(passed)]


def check(base, longest, by_regime):
    """Raises `Unsupported` if rollouts of up to `longest` tokens need tables that shared calls cannot have. `by_regime`: the caller runs
    rollouts of different `regimes` apart and sets `Phase.regime`."""
    got = "any length" if longest is None else f"{longest} tokens"
    for name, kind, limit in limits(base):
        if kind == DYNAMIC and (longest is None or longest >= limit):
            raise Unsupported(name, f"rollouts below {limit} tokens: a rotary table of type {kind} changes with a call's longest position",
                              got, "Another rope_type, or shorter rollouts")
        if kind == LONGROPE and not by_regime and (longest is None or longest > limit):
            raise Unsupported(name, f"rollouts of up to {limit} tokens: {kind} changes its rotary table there", got,
                              "espalier.hf.phased_step, or shorter rollouts")


@contextlib.contextmanager
def installed(base, current):
    """Context manager in which longrope modules make the table of the running phase's regime. `current()`: that phase, or None."""
    names = {name for name, kind, _ in limits(base) if kind == LONGROPE}
    handles = []
    for name, module in base.named_modules():
        if name in names:
            handles.append(module.register_forward_pre_hook(functools.partial(_longer, current), with_kwargs=True))
            handles.append(module.register_forward_hook(functools.partial(_without_last, current)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _longer(current, module, args, kwargs):
    phase = current()
    if phase is None or phase.regime is None:
        return None
    grow = lambda p: torch.cat([p, p.new_full((*p.shape[:-1], 1), phase.regime - 1)], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": grow(kwargs["position_ids"])}
    return (args[0], grow(args[1]), *args[2:]), kwargs


def _without_last(current, module, args, out):
    """Drops the last row of cos and sin, or of complex rotations: [..., T + 1, D] -> [..., T, D]."""
    phase = current()
    if phase is None or phase.regime is None:
        return None
    cut = lambda x: x[..., :-1, :]
    return cut(out) if torch.is_tensor(out) else type(out)(cut(x) for x in out)
