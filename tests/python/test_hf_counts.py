"""The table of counts in docs/python.md is what bench/gpu_counts.py counts."""

import sys

import pytest

from conftest import ROOT

pytest.importorskip("espalier.hf")
sys.path.insert(0, str(ROOT / "bench"))
import gpu_counts  # noqa: E402
import torch  # noqa: E402

from espalier.rows import head  # noqa: E402


def test_chunks_of_logits_are_few_on_a_gpu():
    """4,096 rows of a vocabulary of 151,936: 2^26 logits at once, where a CPU has 2^22."""
    rows = {device: head.chunk_rows(torch.empty(0, 151936, device=device)) for device in ("meta", "cpu")}
    assert rows == {"meta": 441, "cpu": 27}


def test_the_documented_counts_are_those_counted():
    assert gpu_counts.documented() == gpu_counts.table()
