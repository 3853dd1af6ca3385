"""Copies between the host and a model's device: numbers to the device, losses to the host, without a wait in every wave.

A copy from pageable memory makes the host wait for all work queued before it. So the index arrays of a call are one pinned buffer, whose copy
is queued; and the host reads the losses of a step once, when it is done.
"""

import numpy as np
import torch


def queued(host, device):
    """A tensor of the host on a device. On a GPU the copy is queued, and the host does not wait for it. torch keeps the pinned buffer until the copy is done."""
    if torch.device(device).type == "cpu":
        return host
    if torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_device(device, *arrays):
    """int64 tensors of these arrays, in their shapes, by one copy."""
    arrays = [np.asarray(array, np.int64) for array in arrays]
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    flat = queued(torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])), device)
    return [part.view(array.shape) for part, array in zip(flat.split([array.size for array in arrays]), arrays)]


class Total:
    """A sum of losses, in the order in which they were added; `float()` waits for all of them once."""

    def __init__(self):
        self.losses = []

    def add(self, loss):
        self.losses.append(loss.detach().reshape(()).double())

    def __float__(self):
        return float(sum(torch.stack(self.losses).cpu().tolist())) if self.losses else 0.0
