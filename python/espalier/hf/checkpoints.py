"""Activation checkpointing that a model's modules do not name: wrappers around the `forward` of a layer, of its class or of a whole model.

A checkpointed part runs again inside the backward. A layer that gets its phase as a keyword argument gets it again. Other code reads the phase from
where its call began; it must not run again from a checkpoint that began later, because that checkpoint does not know the phase.
"""

import sys

import torch

from espalier.errors import Unsupported

ADVICE = 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'

_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)


class Place:
    """A point of a forward, such as the beginning of the model's call: whether gradients are on, and the innermost checkpoint around it."""

    def __init__(self):
        self.gradients, self.checkpoint = torch.is_grad_enabled(), _innermost()

    def encloses(self):
        """False if a non-reentrant checkpoint began after this point: behind it, the rest of this forward runs again."""
        now = _innermost()
        return now is None or now is self.checkpoint

    def check_encloses(self, where):
        if not self.encloses():
            raise Unsupported(where, "checkpointed layers that know their rows when they run again", "a checkpoint of another maker around them", ADVICE)

    def check_graph(self, where):
        """Raises `Unsupported` within a reentrant checkpoint: a layer's forward without a graph, inside the forward of an autograd function."""
        if self.gradients and not torch.is_grad_enabled() and _in_autograd_function():
            raise Unsupported(where, "non-reentrant gradient checkpointing", "a layer that an autograd function runs without a graph", ADVICE)


def _innermost():
    """An object of the non-reentrant checkpoint of torch's that saves tensors now, its own for each, or None."""
    hooks = _hooks(True)
    return hooks[0] if hooks and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.") else None


def _in_autograd_function():
    """True if a function on the stack has a context of autograd's as its first argument."""
    frame = sys._getframe(2)
    while frame is not None:
        first = frame.f_code.co_varnames[:min(frame.f_code.co_argcount, 1)]
        if first and isinstance(frame.f_locals.get(first[0]), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False
