"""Bytes of the tensors that operations make on one kind of device and that still exist, counted operation by operation.

Each storage that torch returns counts once. Memory that an operation allocates and frees internally does not count, nor does an allocator's
rounding. Tensors without memory (FakeTensorMode) count as if they had theirs.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`now`: bytes that exist; `timeline`: the same after each operation."""

    def __init__(self, kind="cpu"):
        super().__init__()
        self.kind, self.now, self.timeline = kind, 0, []
        self._known = {}  # storages that exist, by address: the finalizer that notices their end, and their bytes

    @property
    def peak(self):
        return max(self.timeline, default=0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._see(args, False)  # earlier tensors do not count
        if kwargs:
            self._see(kwargs.values(), False)
        out = function(*args, **(kwargs or {}))
        self._see((out,), True)
        self.timeline.append(self.now)
        return out

    def _see(self, things, counts):
        for thing in things:
            if isinstance(thing, torch.Tensor):
                if thing.device.type == self.kind:
                    self._see_storage(thing.untyped_storage(), counts)
            elif isinstance(thing, (list, tuple)):
                self._see(thing, counts)

    def _see_storage(self, storage, counts):
        at = storage._cdata
        if at not in self._known:
            size = storage.nbytes() if counts else 0
            self._known[at] = weakref.ref(storage, lambda _: self._gone(at)), size
            self.now += size

    def _gone(self, at):
        self.now -= self._known.pop(at)[1]
