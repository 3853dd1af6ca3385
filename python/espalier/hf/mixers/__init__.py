"""Layers whose rows learn of earlier rows by a state: short convolutions, the gated delta rule, Mamba.

Such a module's own forward runs over all rows of a call at once: its projections, norms and gates are each row's own. Only the
functions that it calls to look back along the sequence (`FUNCTIONS`) are replaced, in a copy of its forward, while a step runs: each
segment of the call then starts from where its parent ended, and the first from where the last open trunk did (espalier.rows.segments). A
`Trunk` (attention.py) holds the states that its rows leave and the sums of their gradients.
"""

import contextlib
import functools
import inspect
import threading
import types
import weakref

import torch

from espalier.hf.checkpoints import Place
from espalier.hf.mixers import mamba, packages, positions, scans
from espalier.rows import convolution
from espalier.rows.segments import Segments

# The functions of transformers that look back along a sequence, by the names under which a mixer's forward calls them.
FUNCTIONS = {
    "causal_conv1d_fn": convolution.over_segments,
    "torch_chunk_gated_delta_rule": scans.delta_rule,
    "chunk_kimi_delta_attention": scans.delta_rule,
    "mamba2_chunk_scan": scans.mamba2,
    "mamba_selective_scan": mamba.selective_scan,
    "mamba2_split_conv1d_scan_combined": scans.none,  # a whole layer in one kernel, which starts from nothing: the parts run instead
    "mamba_inner_fn": scans.none,
}
_NEEDED = {name for name, ours in FUNCTIONS.items() if ours is not scans.none}


def mixers(model):
    """{name: module} of all modules whose forward calls one of `FUNCTIONS`."""
    return {name: module for name, module in model.named_modules() if _calls(module)}


def _calls(module):
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return set()
    return _NEEDED & set(forward.__code__.co_names) & set(forward.__globals__)


class _Active(threading.local):
    """The phase of the call that runs in this thread: what calls of the model and of its layers are given as `espalier`. A checkpointed layer runs again
    inside the backward, with the phase of its first run."""

    def __init__(self):
        self.told, self.checkpoints = [(None, None)], []  # phases, and the Places where they were told

    @property
    def phase(self):
        return self.told[-1][0]

    def enter(self, module, args, kwargs):
        self.told.append((kwargs.get("espalier", self.phase), Place()))
        own = vars(module).get("_gradient_checkpointing_func") if self.phase is not None else None
        self.checkpoints.append(own)
        if own is not None:
            module._gradient_checkpointing_func = lambda layer, *args, **more: own(functools.partial(self.under, self.phase, layer), *args, **more)

    def leave(self, module, *_):
        self.told.pop()
        own = self.checkpoints.pop()
        if own is not None:
            module._gradient_checkpointing_func = own

    def under(self, phase, layer, *args, **kwargs):
        self.told.append((phase, Place()))
        try:
            return layer(*args, **kwargs)
        finally:
            self.told.pop()


_active: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by model: what one installation checkpointed, the next may run again


def install(model):
    """Replaces the forward of every mixer of a transformers model, which stays as it is without a phase. Returns what undoes it."""
    active, modules = _active.setdefault(model, _Active()), dict(model.named_modules())
    undo = [module.register_forward_pre_hook(positions.tell_depths, with_kwargs=True).remove
            for module in modules.values() if positions.counts_rows(module)]
    above, found = set(), mixers(model)
    if found:
        packages.note_missing(next(model.parameters()).device.type, set().union(*map(_calls, found.values())))
    for name, module in found.items():
        undo.append(_replace_forward(module, torch.compiler.disable(_forward(name, module, active))))
        parts = name.split(".")
        above |= {".".join(parts[:n]) for n in range(len(parts))}
    for name in above:
        if name in modules:
            undo.append(modules[name].register_forward_pre_hook(active.enter, with_kwargs=True).remove)
            undo.append(modules[name].register_forward_hook(active.leave, always_call=True).remove)
    return lambda: [action() for action in reversed(undo)]


@contextlib.contextmanager
def installed(model):
    undo = install(model)
    try:
        yield
    finally:
        undo()


def _replace_forward(module, forward):
    before = module.__dict__.get("forward")
    module.forward = forward

    def undo():
        del module.forward
        if before is not None:
            module.forward = before

    return undo


def _segments(phase, key):
    """The segments of a phase's call. A checkpointed layer that runs again makes the state behind them too, unread."""
    keep = lambda state: phase.captures.take_state(key, state) if phase.capturing else None
    return Segments(phase.sets, key, keep if phase.captures is not None else None)


def _forward(name, module, active):
    plain, original = module.forward, inspect.unwrap(type(module).forward)
    calls = {}

    def replaced(function):
        ours, theirs = FUNCTIONS[function], original.__globals__[function]

        def call(*args, **kwargs):
            calls[function] = calls.get(function, 0) + 1
            return ours(theirs, _segments(active.phase, (name, function, calls[function])), *args, **kwargs)

        return call

    names = set(FUNCTIONS) & set(original.__code__.co_names) & set(original.__globals__)
    copy = types.FunctionType(original.__code__, {**original.__globals__, **{n: replaced(n) for n in names}}, original.__name__,
                              original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        phase, place = active.told[-1]
        if phase is None:
            return plain(*args, **kwargs)
        phase.check_place(name, since=place)
        calls.clear()
        return copy(module, *args, **kwargs)

    return forward
