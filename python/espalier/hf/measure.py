"""The most memory held since the trainer last reset its statistics."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class Peak:
    """`bytes` after the block: the most memory allocated on the GPU, without one the most that the process held resident. The marks are
    torch's and the kernel's own, which the trainer reads too: they are read and never reset, so memory held before the block counts."""

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
