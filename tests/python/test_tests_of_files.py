"""make t: the tests of a file (tools/tests_of.py) from what was recorded (tools/recorded_tests.py)."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT
from recorded_tests import PYTEST, KnownTest, Record, most_specific_first
from tests_of import Tree, filters_of, fitting, in_turns
from test_cases import Entry

NARROW, WIDE, SLOW = KnownTest("A.Narrow", "a_test", 0.1), KnownTest("B.Wide", "b_test", 0.1), KnownTest("B.Slow", "b_test", 50.0)


def test_what_is_written_is_read_again(tmp_path):
    record = Record([WIDE, NARROW, SLOW], {"espalier/a.cpp": [NARROW, SLOW]}, {"espalier/a.cpp": [WIDE, NARROW, SLOW]})
    record.write(tmp_path)
    again = Record.read(tmp_path)
    assert again.tests == [NARROW, SLOW, WIDE]
    assert again.best == record.best and set(again.reached["espalier/a.cpp"]) == {WIDE, NARROW, SLOW}


def test_the_most_specific_comes_first_and_every_function_is_entered():
    functions = {NARROW: {"f"}, WIDE: {"f", "g"}, SLOW: {"g"}}
    assert most_specific_first(functions, {NARROW: 2, WIDE: 100, SLOW: 100}, {NARROW: 0.1, WIDE: 0.1, SLOW: 50}) == [NARROW, WIDE]


def test_two_processors_have_the_seconds_twice():
    chosen, left = fitting([NARROW, SLOW, WIDE], 10)
    assert chosen == [NARROW, WIDE] and left == pytest.approx(20 - 0.2 - 2)
    assert in_turns([[1, 2, 3], [4, 1]]) == [1, 4, 2, 3]


def test_all_cases_of_a_test_run_while_they_fit():
    entry = Entry("a_test", [], "", [], None, [("A.Narrow", f"A.Narrow/{n}") for n in range(3)] + [("A.Narrower", "A.Narrower")])
    assert filters_of([NARROW], [entry], 0.25) == {"a_test": ["A.Narrow/*"]}
    assert filters_of([NARROW], [entry], 0.15) == {"a_test": ["A.Narrow/0"]}


@pytest.fixture
def tree(tmp_path):
    """Of this tree's sources, where one test was recorded, and a test's file that was compiled into moe_test."""
    written = "tests/unit/moe/load_accounting_test.cpp"
    command = f"c++ -o tests/unit/moe/CMakeFiles/moe_test.dir/load_accounting_test.cpp.o -c {written}"
    units = [{"file": str(ROOT / written), "directory": str(tmp_path), "command": command}]
    (tmp_path / "compile_commands.json").write_text(json.dumps(units))
    return Tree(Record([WIDE], {"espalier/moe/load_accounting.cpp": [WIDE]}, {"espalier/moe/load_accounting.cpp": [WIDE]}), tmp_path)


def test_a_test_that_was_not_recorded_belongs_to_the_header_that_it_includes(tree):
    own = tree.tests_of("tests/unit/moe/load_accounting_test.cpp")
    assert own and {test.program for test in own} == {"moe_test"}
    for file in ("espalier/moe/load_accounting.cpp", "espalier/moe/load_accounting.h"):
        assert tree.tests_of(file)[:len(own)] == own and WIDE in tree.tests_of(file)


def test_a_file_of_python_tests_has_its_own(tree):
    names = [test.name for test in tree.tests_of("tests/python/test_tests_of_files.py")]
    assert "test_tests_of_files.py::test_a_file_of_python_tests_has_its_own" in names
    assert {test.program for test in tree.tests_of("tests/python/test_tests_of_files.py")} == {PYTEST}


@pytest.mark.parametrize("file", ["espalier/no_such_file.cpp", "LICENSE"])
def test_a_file_without_tests_is_named(file, tmp_path):
    (tmp_path / "compile_commands.json").write_text("[]")
    done = subprocess.run([sys.executable, ROOT / "tools/tests_of.py", "--build", tmp_path, "--list", file], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and file in done.stderr
