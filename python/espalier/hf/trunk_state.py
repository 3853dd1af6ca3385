"""A trunk's saved state between its forward and its backward: everything (`keep`), the inputs of its layers (`recompute`), or everything in host memory
(`offload`).

`recompute`: each decoder layer is a non-reentrant checkpoint of torch. It keeps its inputs, and runs once more just before its backward, so only one
layer's activations exist at a time. Waves send gradients to keys and values inside a layer; torch's checkpoint keeps their graph and recomputes
only its tensors. A model whose layers cannot be checkpointed runs again as a whole before the backward (`by_layers`).
`offload`: tensors that autograd saves are copied to host memory (pinned if there is a GPU) and are copied back when the backward needs them.
Copies are queued on the stream of the computation, and the host waits for none of them.
"""

import contextlib
import functools
import weakref

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from espalier.errors import Error
from espalier.hf import attention, indexed, ranks, rotary
from espalier.hf.checkpoints import Place
from espalier.hf.model_parts import attention_layers, base_model, decoder_layers
from espalier.hf.mixers import mixers

_SMALL = 1 << 12  # bytes; smaller tensors stay on the device


def by_layers(model):
    """True if "recompute" can checkpoint the model layer by layer. False under FSDP, whose hooks count forwards; for compiled layers; if the user
    already checkpoints layers; and for layers that would not know their phase when they run again: those with a state, those that drop keyword
    arguments or choose their keys, and those that make a rotary table of `rotary.limits` themselves."""
    base = base_model(model)
    if ranks.sharded(model) or hasattr(model, "_orig_mod") or mixers(base) or indexed.indexers(base) or not decoder_layers(base):
        return False
    if any(hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None for module in base.modules()):
        return False
    if any(getattr(module, "gradient_checkpointing", False) and module.training for module in base.modules()):
        return False
    tables = {base.get_submodule(name) for name, _, _ in rotary.limits(base)}
    if any(module in tables for layer in decoder_layers(base) for module in layer.modules()):
        return False
    return not any(module in attention.told_by_context for _, module in attention_layers(base).values())


@contextlib.contextmanager
def layers_checkpointed(model):
    """Context manager: within it, every decoder layer is a checkpoint."""
    undo = [_checkpoint(layer, Place()) for layer in decoder_layers(base_model(model))]
    try:
        yield
    finally:
        for action in undo:
            action()


def _checkpoint(layer, place):
    plain, before = layer.forward, layer.__dict__.get("forward")
    ours = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)

    def forward(*args, **kwargs):
        return ours(*args, **kwargs) if place.encloses() else plain(*args, **kwargs)  # the user's checkpoint around the layer runs it again without ours

    layer.forward = forward

    def undo():
        if before is None:
            del layer.forward
        else:
            layer.forward = before

    return undo


def _contexts():
    """Contexts of a layer's two runs: none for the first; for the second the function modes of the first, which are not active in a backward."""
    modes = contextlib.ExitStack()
    return contextlib.nullcontext(), _Entered(modes, _get_current_function_mode_stack())


class _Entered(contextlib.AbstractContextManager):
    def __init__(self, stack, modes):
        self.stack, self.modes = stack, modes

    def __enter__(self):
        for mode in self.modes:
            self.stack.enter_context(mode)

    def __exit__(self, *error):
        return self.stack.__exit__(*error)


def check_offload(model):
    if ranks.device_of(model).type == "cpu":
        raise Error("option", "trunk_state", "'keep' or 'recompute' of a model on a CPU", "'offload', which moves activations to the host's memory",
                    "trunk_state='recompute' saves memory on any device", 2)
    if ranks.sharded(model):
        raise Error("option", "trunk_state", "'keep' or 'recompute' of a model that FSDP shards", "'offload', which would move gathered weights",
                    "trunk_state='recompute'", 2)


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Context manager for a call of the model: tensors that autograd saves move to host memory. Parameters and buffers stay on the device, and so do
    the keys and values that `held`, a Trunk, holds anyway. `bytes`: moved so far."""

    def __init__(self, model, held):
        self.stays = {_storage(x) for x in (*model.parameters(), *model.buffers())}
        self.held, self.copies, self.bytes = held, WeakIdKeyDictionary(), 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, x):
        if x.numel() * x.element_size() <= _SMALL or _storage(x) in self.stays or _storage(x) in {
                _storage(kept) for of_layers in (self.held.k, self.held.v) for kept in of_layers.values()}:
            return x
        copies = self.copies.setdefault(x.untyped_storage(), {})
        place = (x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        if place not in copies:  # a tensor that several operations save is copied once
            copies[place] = _Copy(x)
            self.bytes += x.numel() * x.element_size()
        return copies[place]

    @staticmethod
    def _unpack(packed):
        return packed.on_device() if isinstance(packed, _Copy) else packed


class _Copy:
    """A saved tensor in host memory. While the backward uses it, all users share one copy on the device."""

    def __init__(self, x):
        self.device, self.back = x.device, lambda: None
        self.host = _host_buffer(x)
        self.host.copy_(x, non_blocking=True)

    def on_device(self):
        found = self.back()
        if found is None:
            found = self.host.to(self.device, non_blocking=True)
            self.back = weakref.ref(found)
        return found


def _host_buffer(x):
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type != "cpu" and torch.cuda.is_available())


def _storage(x):
    return x.untyped_storage()._cdata
