"""The examples run as they stand."""

import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT


def run(name, *arguments):
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, str(ROOT / "examples" / name), *arguments], capture_output=True, text=True, timeout=280,
                          env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    run_rows, without = map(int, re.search(r"(\d+) rows run instead of (\d+)", done.stdout).groups())
    assert run_rows < without / 2
    return done.stdout


def test_plain_loop():
    assert "pass: " in run("plain_loop.py", "--steps", "2")


def test_trl_grpo():
    pytest.importorskip("trl")
    run("trl_grpo.py", "--steps", "1")
