"""`make gpu-check` and the GPU bundle on a machine without a GPU.

Without a GPU the check says so. Where something calls itself a GPU, the check ends with exit code 8 and writes no result. The bundle is
rehearsed with the emulated device, outside of the source tree and without a network.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

RESULTS = ("bench/results", "docs/hardware")


def gpu_check(folder, *arguments):
    """With the programs of `folder` before all others."""
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([ROOT / "tools/gpu_check.sh", *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


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
    done = gpu_check(tmp_path / "first", "--only", "selftest-own")
    assert done.returncode == 8, done.stderr
    assert "make all cuda" in done.stdout and "device error at --device cuda" in done.stdout
    assert results() == before


@pytest.fixture(scope="module")
def bundle(program, tmp_path_factory):
    build = program.resolve().parent
    if build != ROOT / "build" or not (build / "libespalier_emulated.so").is_file():
        pytest.skip("the emulated device is not built beside build/espalier (make test builds it)")
    folder = tmp_path_factory.mktemp("bundle") / "gpu-bundle"
    done = subprocess.run([ROOT / "tools/gpu_bundle.sh", folder, "--rehearsal"], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def rehearsed(bundle, out, *arguments):
    """first_hour.py with neither the tree nor a network; where namespaces are not allowed, with a network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ESPALIER_", "PYTHONPATH", "LD_"))}
    apart = ["unshare", "-rn"] if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0 else []
    command = [*apart, sys.executable, bundle / "first_hour.py", "--device", "emulate", "--out", out, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"}, cwd=bundle, timeout=500)


def test_the_bundle_runs_without_the_tree_and_without_a_network(bundle, tmp_path):
    done = rehearsed(bundle, tmp_path / "out", "--only", "facts,hf,llama,nccl,selftest-flash", "--limit", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {found["stage"]: found for found in (json.loads(path.read_text()) for path in (tmp_path / "out").glob("[0-9]*.json"))}
    assert {name: found["status"] for name, found in results.items()} == {
        "facts": "passed", "hf": "passed", "llama": "passed", "nccl": "skipped", "selftest-flash": "skipped"}
    assert results["llama"]["result"]["cells"] and results["hf"]["result"]["rows"] < results["hf"]["result"]["rows_without_sharing"]
    assert "2 GPUs needed" in results["nccl"]["reason"] and "FlashAttention" in results["selftest-flash"]["reason"]
    page = (tmp_path / "out/first_hour.md").read_text()
    assert all(name in page for name in results)


def test_a_stage_that_crashes_or_hangs_costs_only_itself(bundle, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken, symlinks=True)
    real = broken / "espalier/bin/espalier"
    real.rename(real.with_name("real"))
    real.write_text('#!/bin/sh\ncase "$*" in *"--attention own"*) kill -9 $$;; *"--attention flash"*) sleep 100;; *) exec "$(dirname "$0")/real" "$@";; esac\n')
    real.chmod(0o755)
    done = rehearsed(broken, tmp_path / "out", "--only", "facts,selftest-own,selftest-flash,llama", "--limit", "20")
    assert done.returncode == 6
    status = {found["stage"]: found["status"] for found in (json.loads(path.read_text()) for path in (tmp_path / "out").glob("[0-9]*.json"))}
    assert status == {"facts": "passed", "selftest-own": "failed", "selftest-flash": "timed out", "llama": "passed"}


def test_an_unknown_stage_is_refused_with_the_list(bundle, tmp_path):
    done = rehearsed(bundle, tmp_path / "out", "--only", "selftests")
    assert done.returncode == 2 and "selftest-own" in done.stderr
