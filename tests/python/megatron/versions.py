"""The Pythons with Megatron-Core that this machine has, and runs of several ranks in one of them."""

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
ABSENT = "Megatron-Core is not installed: tools/setup.sh tests puts 0.16.1 into .venv, and 0.19.2 into .venv-megatron if there is a Python 3.12 or newer"


@functools.cache
def pythons():
    """{version of megatron-core: its Python}, the oldest first. ESPALIER_MEGATRON_PYTHONS lists other Pythons."""
    named = os.environ.get("ESPALIER_MEGATRON_PYTHONS")
    candidates = named.split(os.pathsep) if named else [sys.executable, str(ROOT / ".venv-megatron/bin/python")]
    found = {}
    for python in candidates:
        code = "import importlib.metadata as m; print(m.version('megatron-core'))"
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment())
        except OSError:
            continue
        if done.returncode == 0:
            found[done.stdout.strip()] = python
    return dict(sorted(found.items()))


@functools.cache
def has(version, package):
    """True if the Python with this version of megatron-core has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([pythons()[version], "-c", code], env=environment()).returncode == 0


def environment(**more):
    paths = [str(HERE), str(ROOT / "python"), *([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])]
    return dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(paths), **more)


def outputs_of_ranks(python, program, folder, world, arguments, patience=1800, **more):
    """Runs `program FOLDER RANK WORLD ARGUMENTS...` once for each rank. Returns (exit statuses, outputs)."""
    processes = [subprocess.Popen([python, str(HERE / program), str(folder), str(rank), str(world), *arguments], env=environment(**more), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=patience)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs
