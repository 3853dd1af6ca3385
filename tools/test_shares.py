"""Shares of the tests, ESPALIER_SWEEPS=K/N: of every test with several cases those whose name falls to share K of N, and at least
one; of a long test (tests/long_tests.txt) those alone, so that it may have none. Shares 1 to N together are all cases.
tests/support/main.cpp chooses by the same rule. As a program it refuses an argument that is no share."""

import re
import sys
import zlib
from pathlib import Path

LONG_TESTS = Path(__file__).resolve().parent.parent / "tests/long_tests.txt"


def read_share(text):
    """(K, N) of "K/N", 1 <= K <= N; "all" is (1, 1). ValueError for anything else."""
    found = re.fullmatch(r"(\d+)/(\d+)", "1/1" if text == "all" else text, re.ASCII)
    if not (found and 1 <= int(found[1]) <= int(found[2])):
        raise ValueError(f"expected all or K/N with 1 <= K <= N, as 1/8, got {text!r}")
    return int(found[1]), int(found[2])


def long_tests():
    """Names of tests/long_tests.txt: Suite.Test of C++, file.py::test of Python, both without parameters."""
    lines = (line.split("#")[0].strip() for line in LONG_TESTS.read_text(encoding="utf-8").splitlines())
    return {line for line in lines if line}


def names_of_share(names, share, shares, is_long=False):
    """Those of a test's case names that fall to the share, in order."""
    chosen = [name for name in names if zlib.crc32(name.encode()) % shares == share - 1]
    if is_long or chosen:
        return chosen
    return names[:1]


if __name__ == "__main__":
    try:
        read_share(sys.argv[1])
    except ValueError as error:
        sys.exit(f"SWEEPS: {error}")
