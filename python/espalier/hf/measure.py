"""The most memory that a step held."""

import resource
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """`bytes` after the block: allocated on the GPU where there is one, else the process's resident set. Where the kernel does not
    let a process reset its own mark, the resident set's peak since the process began.
    """

    def __enter__(self):
        self.bytes = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                _RESET.write_text("5")
            except OSError:
                pass
        return self

    def __exit__(self, *_):
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated()
            return
        try:
            self.bytes = next(int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            self.bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
