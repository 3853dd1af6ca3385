"""Bytes of the tensors that operations make on one kind of device and that still exist, counted operation by operation.

Counted are storages, once each, as torch hands them out: not what an operation takes and gives back inside, and not an allocator's rounding. Also
tensors without memory count (FakeTensorMode), as if they had theirs.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """`now`: bytes that exist; `timeline`: the same after each operation."""

    def __init__(self, kind="cpu"):
        super().__init__()
        self.kind, self.now, self.timeline, self._known = kind, 0, [], WeakIdKeyDictionary()

    @property
    def peak(self):
        return max(self.timeline, default=0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for storage in self._storages((args, kwargs)):  # what was there before does not count
            self._known.setdefault(storage, 0)
        out = function(*args, **(kwargs or {}))
        for storage in self._storages(out):
            if storage not in self._known:
                self._known[storage] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.timeline.append(self.now)
        return out

    def _storages(self, tree):
        return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.device.type == self.kind]

    def _gone(self, size):
        self.now -= size
