"""A limit on memory that the system enforces: a control group of version 1 below the test's own, or systemd's scope."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def _own_group():
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return None


@contextlib.contextmanager
def memory_limit(limit):
    """Yields (words before a command, settings of subprocess.run) that hold a process to `limit` bytes; skips where nothing does."""
    own = _own_group()
    group = own and own / f"espalier-test-{os.getpid()}"
    try:
        if group:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError:
        group = None
    if group:
        try:
            yield [], {"preexec_fn": lambda: (group / "cgroup.procs").write_text(str(os.getpid()))}
        finally:
            group.rmdir()
        return
    for scope in (["systemd-run", "--scope", "--quiet"], ["systemd-run", "--user", "--scope", "--quiet"]):
        words = [*scope, "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0", "--"]
        if shutil.which("systemd-run") and subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            yield words, {}
            return
    pytest.skip("no control group can be made here: the system enforces no limit on memory")
