"""`make gpu-check` on a machine without a GPU: it says so; and where something calls itself one, the script stops at the first use of
the device and leaves no half of a result."""

import os
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

RESULTS = ("bench/results", "docs/hardware")


def gpu_check(folder):
    """With what is in `folder` before everything else."""
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([ROOT / "tools/gpu_check.sh"], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def command(folder, name, *lines):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(("#!/bin/sh", *lines, "")))
    (folder / name).chmod(0o755)


def results():
    return {path: path.read_bytes() for folder in RESULTS for path in (ROOT / folder).rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def without_gpu():
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU: make gpu-check itself is the test")


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path):
    command(tmp_path / "first", "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2", "exit 9")
    done = gpu_check(tmp_path / "first")
    assert done.returncode == 0 and done.stdout == "gpu-check: no GPU on this machine: nothing was checked\n" and not done.stderr


def test_a_gpu_that_cannot_be_used_ends_it_with_nothing_written(program, tmp_path):
    if program.resolve() != (ROOT / "build/espalier").resolve():
        pytest.skip(f"the script runs build/espalier, the tests {program}")
    command(tmp_path / "first", "nvidia-smi", 'case "$1" in -L) echo "GPU 0: NVIDIA H100";; *) echo "NVIDIA H100";; esac')
    command(tmp_path / "first", "make", 'echo "make $*"')  # what it would build is built, or is what is missing
    before = results()
    done = gpu_check(tmp_path / "first")
    assert done.returncode == 8, done.stderr
    assert "make all cuda" in done.stdout and "device error at --device cuda" in done.stderr
    assert results() == before
