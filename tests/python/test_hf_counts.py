"""The table of counts in docs/python.md is what bench/gpu_counts.py counts."""

import sys

import pytest

from conftest import ROOT

pytest.importorskip("espalier.hf")
sys.path.insert(0, str(ROOT / "bench"))
import gpu_counts  # noqa: E402


def test_the_documented_counts_are_those_counted():
    assert gpu_counts.documented() == gpu_counts.table()
