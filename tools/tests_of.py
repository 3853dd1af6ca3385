"""make t FILE=...: builds and runs the tests of a file and prints the commands.

    python tools/tests_of.py [FILE...] [--build FOLDER] [--seconds N] [--list]

Without a file: of all files that git sees as changed. The tests of a source are those that enter its functions (tests/recording,
written by `make record`), the most specific first, as many as take N seconds on two processors. A header has the tests of the files
that include it. A file of tests has its own. A test that was not recorded yet belongs to the files whose header its file includes.
--list prints them and runs nothing.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from check_includes import tracked
from recorded_tests import PYTEST, ROOT, KnownTest, Record
from run_tests import Job, pytest_command, python_environment, run_jobs
from built_tests import compiled_files, entries_of, matches

UNKNOWN_SECONDS = 1.0  # of a test that was not recorded
START_SECONDS = 1.0  # a program of tests, until its first test
MOST_PROGRAMS = 6  # each has to be linked
PYTEST_START_SECONDS = 8.0  # torch and transformers
CPP = (".cpp", ".cu", ".h", ".cuh", ".def", ".inc")
TEST_MACRO = re.compile(r"^(TYPED_TEST|TYPED_TEST_P|TEST|TEST_F|TEST_P)\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.M)
PYTHON_TESTS = re.compile(r"^tests/python/(.*/)?test_\w+\.py$")
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.M)


def programs_of_test_files(build):
    """{file of tests: the programs that it is compiled into}."""
    programs = defaultdict(set)
    for made, source in compiled_files(build).items():
        target = re.search(r"/CMakeFiles/(\w+)\.dir/", str(made))
        if source.is_relative_to(ROOT / "tests") and target and target[1].endswith(("_test", "_gradcheck")):
            programs[source.relative_to(ROOT).as_posix()].add(target[1])
    return programs


class Tree:
    """Who includes whom, and which test stands where, from the text of the sources."""

    def __init__(self, record, build):
        self.record, self.breadth, self.text = record, record.breadth(), {}
        self.program = programs_of_test_files(build)
        for name in tracked("."):
            if name.endswith(CPP) or PYTHON_TESTS.match(name):
                self.text[name] = (ROOT / name).read_text(encoding="utf-8")
        self.includers = defaultdict(set)
        for name, text in self.text.items():
            for included in INCLUDE.findall(text):
                for path in (included, os.path.normpath(os.path.join(os.path.dirname(name), included))):
                    if path in self.text:
                        self.includers[path].add(name)
        self.by_name = defaultdict(list)
        for test in record.tests:
            self.by_name[test.name.split("/")[-1]].append(test)

    def written_in(self, name):
        """Tests of a file of tests: as recorded, else under the name that it has."""
        if name.endswith(".py"):
            file = Path(name).name
            known = {test.name: test for test in self.record.tests if test.program == PYTEST}
            functions = re.findall(r"^\s*def (test_\w+)\(", self.text[name], re.M)
            return [known.get(f"{file}::{f}", KnownTest(f"{file}::{f}", PYTEST, UNKNOWN_SECONDS)) for f in functions]
        out = []
        for _, suite, test in TEST_MACRO.findall(self.text[name]):
            known = [one for one in self.by_name.get(f"{suite}.{test}", ()) if one.program in self.program[name]]
            out += known or [KnownTest(f"{suite}.{test}", program, UNKNOWN_SECONDS) for program in self.program[name]]
        return out

    def is_test(self, name):
        return bool(PYTHON_TESTS.match(name)) or (name.startswith("tests/") and bool(TEST_MACRO.search(self.text.get(name, ""))))

    def entering(self, name):
        """Tests that enter a source, the most specific first."""
        best = self.record.best.get(name, [])
        rest = sorted(set(self.record.reached.get(name, [])) - set(best), key=lambda test: (self.breadth[test], test.seconds, test.name))
        return best + rest

    def tests_of(self, name):
        if self.is_test(name):
            return self.written_in(name)
        header = name if name.endswith((".h", ".cuh", ".def", ".inc")) else re.sub(r"\.(cpp|cu)$", ".h", name)
        including = sorted(self.includers.get(header, ()), key=lambda other: (os.path.dirname(other) != os.path.dirname(name), other))
        # Tests that are written for it, whether recorded or not, then what was seen to enter it.
        stem = Path(name).stem
        own = [test for other in including if self.is_test(other) and Path(other).stem.startswith(stem) for test in self.written_in(other)]
        found = own + self.entering(name)
        if name == header:  # it has no functions of its own that are recorded
            found += self.entering(re.sub(r"\.h$", ".cpp", name))
            found += in_turns([self.entering(other) for other in including if not self.is_test(other)])
        found += [test for other in including if self.is_test(other) for test in self.written_in(other)]
        if not found and name.endswith(CPP):  # nobody was seen to enter it: what its folder's tests are
            folder = os.path.dirname(name).replace("espalier/", "tests/unit/", 1)
            found = [test for other in self.text if other.startswith(folder + "/") and self.is_test(other) for test in self.written_in(other)]
        return list(dict.fromkeys(found))


def in_turns(lists):
    """One list of several: first what is first in each."""
    return list(dict.fromkeys(one[place] for place in range(max(map(len, lists), default=0)) for one in lists if place < len(one)))


def fitting(tests, seconds):
    """Those that two processors run within `seconds`, in order; a program costs its start, and pytest a longer one."""
    chosen, left, started = [], 2 * seconds, set()
    for test in tests:
        start = 0 if test.program in started else PYTEST_START_SECONDS if test.program == PYTEST else START_SECONDS
        if test.seconds + start <= left and (test.program in started or len(started) < MOST_PROGRAMS):
            chosen.append(test)
            started.add(test.program)
            left -= test.seconds + start
    return chosen, left


def patterns_of(test, cases, all_cases):
    """The shortest filter of GoogleTest that has these cases and no others of the program."""
    suite, _, name = test.rpartition(".")
    for pattern in (test, f"{test}/*", f"{suite}/*.{name}"):
        if [case for _, case in all_cases if matches(case, pattern)] == cases:
            return [pattern]
    return cases


def filters_of(tests, entries, left):
    """{name of a program: patterns of its filter}: every test with one case, and with all of them while they fit into the seconds that are left."""
    out = {}
    for test in tests:
        entry = next((e for e in entries if e.name == test.program), None)
        cases = [case for group, case in entry.cases if test.name in (group, group.split("/")[-1])] if entry else []
        further = (len(cases) - 1) * test.seconds
        if cases and further <= left:
            left -= further
        else:
            cases = cases[:1]
        if cases:
            out.setdefault(test.program, []).extend(patterns_of(test.name, cases, entry.cases))
    return out


def jobs_of(tests, build, left, reports):
    programs = {test.program for test in tests} - {PYTEST}
    entries, _ = entries_of(build, "^(" + "|".join(sorted(programs)) + ")$") if programs else ([], [])
    jobs = []
    by_name = {entry.name: entry for entry in entries}
    for name, cases in filters_of(tests, entries, left).items():
        entry = by_name[name]
        report = reports / f"{entry.name}.xml"
        environment = dict(os.environ, GTEST_OUTPUT=f"xml:{report}", GTEST_COLOR="no", **({"OMP_NUM_THREADS": "1"} if entry.label("threads") else {}))
        jobs.append(Job(entry.name, [str(entry.program), f"--gtest_filter={':'.join(cases)}"], report, environment, entry.cwd))
    python = [test.name for test in tests if test.program == PYTEST]
    if python:
        report = reports / "pytest.xml"
        paths = {path.name: path.relative_to(ROOT) for path in (ROOT / "tests/python").rglob("test_*.py")}
        files = [f"{paths[file]}::{test}" for file, test in (name.split("::") for name in python) if file in paths]
        jobs.append(Job(PYTEST, pytest_command(report, "", files=files), report, python_environment(build, ""), str(ROOT)))
    return jobs


def changed_files():
    done = subprocess.run(["git", "status", "--porcelain", "--no-renames"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line[3:] for line in done.stdout.splitlines() if (ROOT / line[3:]).is_file()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compile jobs")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    names = [Path(os.path.abspath(file)).relative_to(ROOT).as_posix() for file in arguments.files] or changed_files()
    absent = [name for name in names if not (ROOT / name).is_file()]
    if absent or not names:
        sys.exit(f"make t: expected FILE=a file of this tree, as espalier/model/layer.cpp, found {absent[0] + ', which does not exist' if absent else 'none, and nothing is changed'}")
    tree = Tree(Record.read(), build)
    tests = in_turns([tree.tests_of(name) for name in names])
    if not tests:
        sys.exit(f"make t: no test is known to reach {', '.join(names)}; make fast runs one case of every test")
    chosen, left = fitting(tests, arguments.seconds)
    print(f"{len(chosen)} of {len(tests)} tests that reach {', '.join(names)}, the most specific first")
    if arguments.list:
        print("\n".join(f"{test.seconds:7.2f} s  {test.program:28} {test.name}" for test in chosen))
        return 0
    targets = sorted({test.program for test in chosen} - {PYTEST}) + (["espalier_cli", "espalier_core"] if any(t.program == PYTEST for t in chosen) else [])
    print(shlex.join(command := ["cmake", "--build", os.path.relpath(build), "--parallel", str(arguments.jobs), "--target", *targets]), flush=True)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        return 1
    with tempfile.TemporaryDirectory(prefix="espalier-tests-") as reports:
        jobs = jobs_of(chosen, build, left, Path(reports))
        for job in jobs:
            print(shlex.join([os.path.relpath(job.command[0]), *(word for word in job.command[1:] if "junit" not in word)]), flush=True)
        result, _ = run_jobs(jobs, min(2, os.cpu_count() or 1))
    print("\n".join(["", *(f"  failed: {name}" for name in result.failed), result.text()]))
    return 1 if result.failed or not result.passed else 0


if __name__ == "__main__":
    sys.exit(main())
