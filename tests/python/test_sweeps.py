"""ESPALIER_SWEEPS=K/N: every test but the long ones runs in every share, and the shares together run all cases once
(tools/test_shares.py, conftest.py, tests/support/main.cpp)."""

import os
import re
import subprocess
import types
from pathlib import Path

import pytest

from conftest import ROOT, cases_of_share
from test_shares import long_tests, names_of_share, read_share

SHARES = 8


def split_by_shares(cases, chosen, long=()):
    """`cases` and what chosen(K) returns: lists of (test, case); `long`: those of the tests that are long."""
    parts = [chosen(share) for share in range(1, SHARES + 1)]
    assert set().union(*parts) == set(cases)
    assert all({test for test, _ in part} >= {test for test, _ in cases if test not in long} for part in parts)
    assert all(sum(each in part for part in parts) == 1 for each in cases if each[0] in long)
    assert max(map(len, parts)) < len(cases) / 2


class Item(types.SimpleNamespace):
    __hash__ = object.__hash__  # as pytest's own


def test_of_pytest():
    parent = types.SimpleNamespace(name="test_file.py")
    items = [Item(path=Path("test_file.py"), parent=parent, originalname=name, name=f"{name}[{case}]", nodeid=f"test_file.py::{name}[{case}]")
             for name, count in (("alone", 1), ("two", 2), ("many", 100), ("long", 1), ("long_too", 3)) for case in range(count)]
    long = {"test_file.py::long", "test_file.py::long_too"}
    named = lambda items: [(item.originalname, item.name) for item in items]  # noqa: E731
    split_by_shares(named(items), lambda share: named(cases_of_share(items, share, SHARES, long)), {"long", "long_too"})
    assert cases_of_share(items, *read_share("all"), long) == items


def listed(binary, sweeps, *more):
    """[(test, case)] of a GoogleTest binary, whose list names the suite before its cases; suites of types end with /0, /1, ..."""
    done = subprocess.run([binary, "--gtest_list_tests", *more], env=dict(os.environ, ESPALIER_SWEEPS=sweeps), capture_output=True, text=True, check=True)
    out, suite = [], None
    for line in done.stdout.splitlines():
        name = line.split("#")[0].rstrip()
        if not line.startswith(" "):
            suite = name if name.endswith(".") else suite
        else:
            out.append((re.sub(r"/\d+\.$", ".", suite) + name.split("/")[0].strip(), suite + name.strip()))
    return out


def test_of_googletest(program):
    binary = program.parent / "tests/unit/ops/attention_test"
    if not binary.is_file():
        pytest.skip("the C++ tests are not built: no tests/unit/ops/attention_test")
    split_by_shares(listed(binary, "all"), lambda share: listed(binary, f"{share}/{SHARES}"))
    some = listed(binary, "1/8", "--gtest_filter=*-*Backward*")
    assert some and set(some) == {each for each in listed(binary, "1/8") if "Backward" not in each[1]}


def test_long_tests_of_googletest(program):
    binary = program.parent / "tests/parallel/layouts_test"
    if not binary.is_file():
        pytest.skip("the C++ tests are not built: no tests/parallel/layouts_test")
    everything, parts = listed(binary, "all"), {share: listed(binary, f"{share}/{SHARES}") for share in range(1, SHARES + 1)}
    split_by_shares(everything, parts.get, long_tests())
    for long in long_tests() & {test for test, _ in everything}:
        cases = [case for test, case in everything if test == long]
        for share, part in parts.items():  # both languages choose the same
            assert [case for test, case in part if test == long] == names_of_share(cases, share, SHARES, is_long=True)


@pytest.mark.parametrize("text", ["0/8", "9/8", "1", "a/8", "1/", "1/8x", "-1/8"])
def test_a_wrong_share_is_refused_with_an_example(text, program):
    with pytest.raises(ValueError, match="as 1/8"):
        read_share(text)
    binary = program.parent / "tests/unit/ops/attention_test"
    if binary.is_file():
        done = subprocess.run([binary], env=dict(os.environ, ESPALIER_SWEEPS=text), capture_output=True, text=True)
        assert done.returncode == 2 and "as 1/8" in done.stderr


def test_long_tests_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.cpp"))
    for name in long_tests():
        if "::" in name:
            file, test = name.split("::")
            assert re.search(rf"^def {test}\(", (ROOT / "tests/python" / file).read_text(encoding="utf-8"), re.M), name
        else:
            suite, test = name.split("/")[-1].split(".")
            assert re.search(rf"\bTEST(_F|_P)?\(\s*{suite}\s*,\s*{test}\s*\)", sources), name
