"""The most memory held since the trainer last reset its statistics."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class Peak:
    """Context manager. After the block, `bytes` is the peak of memory allocated on the GPU, or without a GPU the process's peak resident memory.
    The peaks are torch's and the kernel's own. The trainer reads them too, so they are never reset here, and memory held before the block
    counts."""

    def __enter__(self):
        self.bytes = 0
        return self

    def __exit__(self, *_):
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated()
            return
        try:
            self.bytes = next(int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            self.bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
