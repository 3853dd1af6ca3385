"""tools/setup.sh and the Python that PYTHON names: one that cannot be used is an error that says why, before anything is made or installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

VERSIONS = dict(line.split() for line in (ROOT / "tools/torch_versions.txt").read_text().splitlines() if line[0] != "#")


def refused(python):
    """The lines of its standard error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([ROOT / "tools/setup.sh", "program"], env=environment | {"PYTHON": str(python)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()


def python_with_torch(folder, version):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    package = next((folder / "lib").glob("python3*")) / "site-packages/torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder / "bin/python"


@pytest.mark.parametrize("version", ["2.9.1+cpu", "3.0.0"])
def test_another_torch_is_named_with_the_two_ways_out(version, tmp_path):
    python = python_with_torch(tmp_path / "venv", version)
    found, remedy = refused(python)[-2:]
    assert found == f"[setup] PYTHON={python} has torch {version}, expected {VERSIONS['oldest']} to {VERSIONS['newest']}"
    assert f"pip install 'torch=={VERSIONS['newest']}.*'" in remedy and f"torch {VERSIONS['downloaded']} into .venv" in remedy


def test_another_python_is_named(tmp_path):
    old = Path(tmp_path / "python")
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo Python 3.10.13\n")
    old.chmod(0o755)
    assert refused(old)[-1] == f"[setup] PYTHON={old}: expected a Python 3.11 or newer, got Python 3.10.13"
    assert refused(tmp_path / "none")[-1] == f"[setup] PYTHON={tmp_path / 'none'}: no such program"
