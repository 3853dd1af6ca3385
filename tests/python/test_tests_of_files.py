"""make t: the tests of a file (tools/tests_of.py) from what was recorded (tools/recorded_tests.py)."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT
from record_tests import Folder, functions_of
from recorded_tests import PYTEST, KnownTest, Record, most_specific_first
from sweep_changes import chosen_tests
from built_tests import Entry
from tests_of import Tree, filters_of, fitting, in_turns

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
    written = "tests/unit/model/load_accounting_test.cpp"
    command = f"c++ -o tests/unit/model/CMakeFiles/moe_test.dir/load_accounting_test.cpp.o -c {written}"
    units = [{"file": str(ROOT / written), "directory": str(tmp_path), "command": command}]
    (tmp_path / "compile_commands.json").write_text(json.dumps(units))
    return Tree(Record([WIDE], {"espalier/model/load_accounting.cpp": [WIDE]}, {"espalier/model/load_accounting.cpp": [WIDE]}), tmp_path)


def test_a_test_that_was_not_recorded_belongs_to_the_header_that_it_includes(tree):
    own = tree.tests_of("tests/unit/model/load_accounting_test.cpp")
    assert own and {test.program for test in own} == {"moe_test"}
    for file in ("espalier/model/load_accounting.cpp", "espalier/model/load_accounting.h"):
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


def test_the_sweep_of_a_change_says_what_it_leaves_out():
    absent = KnownTest("C.Absent", "c_test", 0.1)
    counts = {("a_test", "A.Narrow"): 5, ("b_test", "B.Wide"): 3, ("b_test", "B.Slow"): 2, ("c_test", "C.Absent"): 0}
    assert chosen_tests([NARROW, SLOW, WIDE, absent], counts, 10) == ([NARROW, WIDE], [SLOW], [absent])


PROGRAM = r"""
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <thread>
extern "C" __attribute__((noinline)) void alpha() { asm volatile(""); }
extern "C" __attribute__((noinline)) void beta() { asm volatile(""); }
int main() {
  const auto note = reinterpret_cast<void (*)(const char*)>(dlsym(RTLD_DEFAULT, "espalier_note_entered"));
  alpha();
  note("first");
  alpha();
  std::thread([] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    beta();
  }).join();
  note("thread that blocks signals");
  if (fork() == 0) {
    beta();
    kill(getpid(), SIGKILL);
  }
  wait(nullptr);
  note("killed child");
  note("nothing");
}
"""


def test_a_recording_has_the_functions_that_were_entered_since_the_last_note(program, tmp_path):
    library = program.parent / "tests/support/libespalier_entered_functions.so"
    if not library.is_file():
        pytest.skip("the C++ tests are not built: no tests/support/libespalier_entered_functions.so")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    built = tmp_path / "program"
    subprocess.run(["g++", "-std=c++20", "-O1", "-pthread", "-o", built, tmp_path / "program.cpp", "-ldl"], check=True)
    tables = {"program": functions_of(built, ({"alpha": "a.cpp", "beta": "b.cpp"}, {}))}
    (tmp_path / "notes_of_it").mkdir()
    folder = Folder(tmp_path / "notes_of_it", tables)
    subprocess.run([built], env=folder.environment(library), check=True)
    alpha, beta = ("a.cpp", "alpha"), ("b.cpp", "beta")
    entered = {test: functions for test, (_, functions) in folder.notes(tables).items()}
    assert entered == {"first": {alpha}, "thread that blocks signals": {alpha, beta}, "killed child": {beta}, "nothing": set()}
