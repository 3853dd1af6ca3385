"""The table of deliberate faults (tests/mutation/faults.py) cannot fall behind the engine: what does not fit is an error."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT
from faults_by_tier import AT_ONCE, NOTICED, SWEEP, Runner, batches, name_of
from recorded_tests import PYTEST, KnownTest

sys.path.insert(0, str(ROOT / "tests" / "mutation"))
from faults import FAULTS, Fault  # noqa: E402
from write_faulty_sources import TableError, with_faults  # noqa: E402

SOURCE = "int add(int a, int b) {\n  return a + b;\n}\n"
SUM = Fault("difference", "a sum is a difference", "add.cpp", "a + b", "ON ? a - b : TEXT")


def test_a_fault_stands_behind_its_switch_and_the_line_beside_it():
    assert with_faults(SOURCE, [SUM]) == SOURCE.replace("a + b", '::espalier::mutation::active("difference") ? a - b : a + b')


@pytest.mark.parametrize("text", ["a * b", "int b"])
def test_a_text_that_is_not_there_once_is_refused(text):
    with pytest.raises(TableError, match="add.cpp has [02] times"):
        with_faults(SOURCE + SOURCE.replace("a + b", "b + a"), [Fault("lost", "", "add.cpp", text, "")])


def test_texts_of_two_faults_do_not_overlap():
    with pytest.raises(TableError, match="inside that of"):
        with_faults(SOURCE, [SUM, Fault("other", "", "add.cpp", "return a", "return b")])


def test_the_table_is_checked_against_the_engine(tmp_path):
    script = str(ROOT / "tests" / "mutation" / "write_faulty_sources.py")
    fits = subprocess.run([sys.executable, script, str(ROOT / "espalier")], capture_output=True, text=True)
    assert fits.returncode == 0 and fits.stdout.endswith(" 0 that do not fit the engine\n")
    (tmp_path / "empty").mkdir()
    other = subprocess.run([sys.executable, script, str(tmp_path / "empty"), str(tmp_path / "out")], capture_output=True, text=True)
    assert other.returncode == 1 and not (tmp_path / "out").exists()


def known_tests():
    """Suite.Test of all C++ tests and file.py::test of all Python tests."""
    cpp = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.cpp"))
    names = {f"{suite}.{test}" for suite, test in re.findall(r"\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", cpp)}
    for path in (ROOT / "tests/python").rglob("test_*.py"):
        names |= {f"{path.name}::{test}" for test in re.findall(r"^\s*def (test_\w+)\(", path.read_text(encoding="utf-8"), re.M)}
    return names


def without_parameters(case):
    """Suite.Test of Prefix/Suite.Test/parameter and of Suite/0.Test."""
    if "::" in case:
        return case
    suite, test = case.split(".", 1)
    parts = [part for part in suite.split("/") if not part.isdigit()]
    return f"{parts[-1]}.{test.split('/')[0]}"


def test_every_fault_has_a_test_that_notices_it():
    """make faults writes the table again; with --only NAME, the line of one fault."""
    noticed = [line.split(" ", 2) for line in NOTICED.read_text(encoding="utf-8").splitlines()]
    assert [fault for fault, _, _ in noticed] == list(dict.fromkeys(name_of(fault) for fault in FAULTS if fault.alone))
    known = known_tests()
    for fault, tier, case in noticed:
        if tier == "sweep":
            assert case == SWEEP[1], fault
        else:
            assert tier in ("fast", "test") and without_parameters(case) in known, f"{fault}: {case}"


def test_make_test_notices_120_faults():
    tiers = [line.split(" ")[1] for line in NOTICED.read_text(encoding="utf-8").splitlines()]
    assert sum(tier != "sweep" for tier in tiers) >= 120


def test_neighbours_of_a_program_face_a_fault_together():
    tests = [KnownTest(f"A.{n}", "a_test", 0.3 * AT_ONCE) for n in range(4)]
    tests.insert(1, python := KnownTest("test_file.py::test_one", PYTEST, 1.0))
    assert batches(tests) == [("a_test", [tests[0], *tests[2:4]]), (PYTEST, [python]), ("a_test", tests[4:])]


def test_a_case_counts_only_if_it_passes_without_the_fault(monkeypatch):
    """A.1 fails always, A.2 with the fault alone; each is asked once without it."""
    tests, asked = [KnownTest(f"A.{n}", "a_test", 0.1) for n in range(3)], []

    def failures(program, some, fault, all_threads):
        names = [test.name for test in some]
        asked.append((names, fault))
        return [name for name in names if name == "A.1" or name == "A.2" and fault][:1]

    runner = Runner(None, None)
    monkeypatch.setattr(runner, "failures", failures)
    assert runner.notice(tests, SUM) == "A.2" and runner.broken == {("a_test", "A.1")}
    assert runner.notice(tests, SUM) == "A.2" and sum(fault is None for _, fault in asked) == 2
    assert runner.notice(tests[:1], SUM) is None
