"""Which cases a run of the tests has (tools/tiers.py): every test but the long ones is in every share, the shares together are
all cases, and the fast tier has one case of every quick test."""

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import instruction_levels
import tiers
from conftest import ROOT, chosen_items
from built_tests import matches, read_list
from tiers import FAST, LONG, SHARES, Choice, long_tests, share_of

SECONDS = {"test_file.py::long": LONG + 1, "test_file.py::long_too": LONG + 1, "test_file.py::slow": (FAST + LONG) / 2}


class Item(types.SimpleNamespace):
    __hash__ = object.__hash__  # as pytest's own

    def get_closest_marker(self, name):
        return name if self.originalname == name else None


@pytest.fixture
def items():
    parent = types.SimpleNamespace(name="test_file.py")
    counts = (("alone", 1), ("two", 2), ("many", 100), ("slow", 3), ("product", 3), ("long", 1), ("long_too", 3))
    return [Item(path=Path("test_file.py"), parent=parent, originalname=name, name=f"{name}[{case}]", nodeid=f"test_file.py::{name}[{case}]")
            for name, count in counts for case in range(count)]


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(tiers, "seconds_of_tests", lambda: SECONDS)


def names(items):
    return [item.name for item in items]


def test_shares_are_all_cases_and_every_share_has_every_quick_test(items):
    parts = [names(chosen_items(items, Choice(f"{share}/{SHARES}"))) for share in range(1, SHARES + 1)]
    assert set().union(*parts) == {name for name in names(items) if not name.startswith("product")}
    for part in parts:
        assert {name.split("[")[0] for name in part} >= {"alone", "two", "many", "slow"}
        assert len(part) < len(items) / 2
    for name in names(items):
        assert not name.startswith("long") or sum(name in part for part in parts) == 1


def test_shares_take_equally_long():
    """As far as single tests allow."""
    seconds = {f"Long.{number}": LONG + 1 + number % 11 for number in range(100)} | {"Long.Lone": 40.0, "Quick.One": LONG}
    first = tiers.first_shares_of_long_tests(seconds, SHARES)
    spent = [sum(seconds[test] for test in first if first[test] == share) for share in range(SHARES)]
    assert set(first) == set(seconds) - {"Quick.One"} and max(spent) - min(spent) <= LONG + 1 + 10


def test_the_fast_tier_has_the_first_case_of_quick_tests(items):
    assert names(chosen_items(items, Choice("fast"))) == ["alone[0]", "two[0]", "many[0]"]
    assert names(chosen_items(items, Choice("one"))) == ["alone[0]", "two[0]", "many[0]", "slow[0]", "product[0]", "long[0]", "long_too[0]"]
    assert chosen_items(items, Choice("all")) == items


def test_a_share_has_all_pairs_and_no_product():
    assert Choice("1/8").cases("Any.Test", ["a", "b"], pairs=True) == ["a", "b"]
    assert Choice("1/8").cases("Any.Test", ["a", "b"], product=True) == Choice("fast").cases("Any.Test", ["a", "b"], product=True) == []
    assert Choice("fast").cases("Any.Test", ["a", "b"], pairs=True) == ["a"]
    assert Choice("all").cases("Any.Test", ["a", "b"], product=True) == ["a", "b"]


def test_named_tests_have_all_their_cases(items, tmp_path):
    (tmp_path / "some").write_text("test_file.py::slow\ntest_file.py::long\n")
    assert names(chosen_items(items, Choice(f"tests:{tmp_path / 'some'}"))) == ["slow[0]", "slow[1]", "slow[2]", "long[0]"]


def test_days_that_follow_each_other_run_all_shares():
    first = datetime.date(2026, 11, 28)
    assert {share_of(first + datetime.timedelta(days=n)) for n in range(SHARES)} == {f"{k}/{SHARES}" for k in range(1, SHARES + 1)}


LISTING = """Running main() from tests/support/main.cpp
Plain.
  One
  Two
Models/Families.
  EveryPlan/qwen3  # GetParam() = qwen3
  EveryPlan/llama  # GetParam() = llama
Typed/0.  # TypeParam = float
  Adds
Typed/1.  # TypeParam = double
  Adds
"""


def test_a_list_of_googletest_is_read_with_tests_without_parameters():
    assert read_list(LISTING) == [
        ("Plain.One", "Plain.One"), ("Plain.Two", "Plain.Two"),
        ("Models/Families.EveryPlan", "Models/Families.EveryPlan/qwen3"), ("Models/Families.EveryPlan", "Models/Families.EveryPlan/llama"),
        ("Typed.Adds", "Typed/0.Adds"), ("Typed.Adds", "Typed/1.Adds")]


@pytest.mark.parametrize("chosen, kept", [
    ("*", "One Two"), ("Plain.O*", "One"), ("-Plain.O*", "Two"), ("*.One:*.Two-Plain.Tw?", "One"), ("Other.*", "")])
def test_filters_mean_what_they_mean_to_googletest(chosen, kept):
    assert [case for case in ("One", "Two") if matches(f"Plain.{case}", chosen)] == kept.split()


def test_the_list_of_a_program_is_what_googletest_runs(program):
    binary = program.parent / "tests/unit/ops/attention_test"
    if not binary.is_file():
        pytest.skip("the C++ tests are not built: no tests/unit/ops/attention_test")

    def listed(*more):
        return read_list(subprocess.run([binary, "--gtest_list_tests", *more], capture_output=True, text=True, check=True).stdout)

    chosen = "*-*Backward*:*/avx2*"
    assert listed(f"--gtest_filter={chosen}") == [pair for pair in listed() if matches(pair[1], chosen)] != []


@pytest.mark.parametrize("text", ["0/8", "9/8", "1", "a/8", "1/", "1/8x", "-1/8", "slow"])
def test_a_wrong_choice_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="as 1/14"):
        Choice(text)
    done = subprocess.run([sys.executable, ROOT / "tools/tiers.py", "--day=2026-11-28", "--", text], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 1 and "as 1/14" in done.stderr


def test_long_tests_exist():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.cpp"))
    for name in long_tests():
        if "::" in name:
            file, test = name.split("::")
            assert re.search(rf"^def {test}\(", (ROOT / "tests/python" / file).read_text(encoding="utf-8"), re.M), name
        else:
            suite, test = name.split("/")[-1].split(".")
            assert re.search(rf"\bTEST(_F|_P)?\(\s*{suite}\s*,\s*{test}\s*\)", sources), name


@pytest.mark.skipif(platform.machine() == "aarch64", reason="needs no other machine's tools")
def test_an_aarch64_build_names_the_tools_that_a_machine_lacks(tmp_path):
    for tool in ("bash", "dirname", "uname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    for arguments, status in ((["--if-possible"], 0), ([], 2)):
        done = subprocess.run(["bash", ROOT / "tools/aarch64.sh", *arguments], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert "lacks g++-aarch64-linux-gnu qemu-user" in done.stdout and "apt-get install" in done.stdout


def test_every_instruction_set_of_the_kernels_has_its_limits_for_the_libraries():
    text = (ROOT / "espalier/base/compiled_sets.h").read_text()
    names = re.findall(r'row\("(\w+)", \w+, \w+\)', text)
    assert names and set(names) == set(instruction_levels.LIBRARIES)
    assert {name for other in instruction_levels.ARCHITECTURES.values() for name in other} == {"neon"}
