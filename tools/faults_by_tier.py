"""make faults: which tier of the tests notices which deliberate fault of tests/mutation/faults.py. Writes tests/mutation/noticed.txt.

    python tools/faults_by_tier.py --build build/faults [--only REGEX] [--jobs N] [--no-python] [--again]

The build folder is one with ESPALIER_FAULTS (cmake/EspalierFaults.cmake). First every case of `make fast` and of a share of `make test` runs
once without a fault that is on, and the lines of the faults note that they are reached. Then each fault faces the cases that
reach its line, the most specific first, until one of them fails. Python tests run by the first cases that `make fast` has.
A case that fails without any fault counts for none. What no case of the two tiers notices is left to mutation_test, which `make sweep` runs:
it notices every fault.

noticed.txt: `fault tier case` a line. It is written after each fault, and the folder BUILD/reached holds what each program reached, so that a run that was
stopped goes on where it was: faults that have a line are left out, unless --again is given.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record_tests import FAULTS, groups_of_python_tests, read_raw, record_program, record_pytest, write_raw
from recorded_tests import PYTEST, ROOT
from run_tests import chosen_cases, pytest_command, python_environment
from built_tests import entries_of, matches
from tiers import Choice

sys.path.append(str(ROOT / "tests/mutation"))
from write_faulty_sources import table_of  # noqa: E402

TABLE, NOTICED = ROOT / "tests/mutation/faults.py", ROOT / "tests/mutation/noticed.txt"
SHARE = "1/14"  # of `make test`
SWEEP = ("sweep", "mutation_test")
AT_ONCE = 4.0  # seconds of cases of one program that run before the next program has its turn: each has to start
PATIENCE = 240.0  # seconds of one program: a fault may make it wait for ever


def name_of(fault):
    return fault.name + (f"_and_{fault.together_with}" if fault.together_with else "")


class Cases:
    """The cases of the two tiers. `all_threads`: programs that run on one thread with cases that are repeated on all of them."""

    def __init__(self, build):
        self.entries = {e.name: e for e in entries_of(build, "", sweep=False)[0] if e.cases and "sweep" not in e.labels and e.name == e.program.name}
        fast, share = Choice("fast"), Choice(SHARE)
        self.fast = {name: set(chosen_cases(entry, fast)) for name, entry in self.entries.items()}
        self.share = {name: set(chosen_cases(entry, share)) for name, entry in self.entries.items()}

    def tier(self, test):
        return "fast" if test.program == PYTEST or test.name in self.fast[test.program] else "test"

    def on_one_thread(self, program):
        return bool(self.entries[program].label("threads"))

    def on_all_threads(self, test):
        return test.program != PYTEST and self.on_one_thread(test.program) and matches(test.name, self.entries[test.program].label("threads"))


class Runner:
    def __init__(self, build, cases):
        self.build, self.cases = build, cases
        self.sound, self.broken = set(), set()  # of the cases that failed: those that pass without a fault, and the others

    def failures(self, program, tests, fault, all_threads=False):
        """Names of those of a program's cases that fail; a program that ends badly is a failure of the case that it was in."""
        more = {"ESPALIER_FAULT": ",".join(filter(None, [fault.name, fault.together_with]))} if fault else {}
        more |= {"ESPALIER_FAULT_ONCE": "1"} if fault and fault.once else {}
        more |= {"GOMP_SPINCOUNT": "1000", "ESPALIER_SWEEPS": "one"}
        with tempfile.TemporaryDirectory(prefix="espalier-faults-") as folder:
            report = Path(folder) / "report.xml"
            if program == PYTEST:
                files = [f"tests/python/{test.name}" for test in tests]
                command, where = pytest_command(report, "", "-x", files=files), str(ROOT)
                environment = python_environment(self.build, "") | more | {"OMP_NUM_THREADS": "1"}
            else:
                entry, flags = self.cases.entries[program], Path(folder) / "flags"
                flags.write_text("--gtest_filter=" + ":".join(test.name for test in tests))
                command, where = [*entry.command, f"--gtest_flagfile={flags}", "--gtest_fail_fast"], entry.cwd
                more |= {"OMP_NUM_THREADS": "1"} if self.cases.on_one_thread(program) and not all_threads else {}
                environment = dict(os.environ, GTEST_OUTPUT=f"xml:{report}", GTEST_COLOR="no", **more)
            try:
                done = subprocess.run(command, env=environment, cwd=where, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      timeout=PATIENCE, text=True, errors="replace")
                status, said = done.returncode, done.stdout
            except subprocess.TimeoutExpired as expired:
                status, said = None, (expired.stdout or b"").decode(errors="replace")
            return self.read(program, tests, report, status, said)

    @staticmethod
    def read(program, tests, report, status, said):
        if status == 0:
            return []
        if report.is_file() and report.stat().st_size:
            failed = [case for case in ElementTree.parse(report).getroot().iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
            names = [f"{case.get('classname')}.{case.get('name')}" for case in failed]
        else:  # it crashed, or hangs
            names = re.findall(r"^\[ RUN      \] (\S+)", said, re.M)[-1:]
        if program == PYTEST:
            names = ["::".join([name.split(".")[-2] + ".py", name.split(".")[-1]]) for name in (re.sub(r"\[.*", "", name, flags=re.S) for name in names)]
        return [test.name for test in tests if test.name in names][:1] or [tests[0].name]

    def notice(self, tests, fault, all_threads=False):
        """The first of the cases, in order, that fails with the fault and not without it, or nothing."""
        for program, some in batches(tests):
            left = [test for test in some if (program, test.name) not in self.broken]
            while left:
                failed = self.failures(program, left, fault, all_threads)
                if not failed:
                    break
                alone = [test for test in left if test.name in failed]
                case = (program, alone[0].name)
                if case in self.sound or not self.failures(program, alone, None, all_threads):
                    self.sound.add(case)
                    return alone[0].name
                self.broken.add(case)
                left = [test for test in left if test not in alone]
        return None


def batches(tests):
    """[(program, tests)] in order; what one program has next, together."""
    out, open_batches = [], {}
    for test in tests:
        batch = open_batches.get(test.program)
        if batch is None or sum(one.seconds for one in batch) + test.seconds > AT_ONCE:
            batch = open_batches[test.program] = []
            out.append((test.program, batch))
        batch.append(test)
    return out


def who_notices(runner, cases, reaching, fault):
    """(tier, case) of a fault, from the cases that reach its line in order."""
    # Python tests come last: torch and transformers are slow to begin.
    in_order = [test for test in reaching if test.program != PYTEST] + [test for test in reaching if test.program == PYTEST]
    for tier in ("fast", "test"):
        found = runner.notice([test for test in in_order if cases.tier(test) == tier], fault)
        if found:
            return tier, found
    found = runner.notice([test for test in in_order if cases.on_all_threads(test)], fault, all_threads=True)
    return ("test", found) if found else SWEEP


def reach(build, cases, faults, jobs, python):
    """{fault: cases that reach its line, the most specific first}; programs that the folder has since they were built run no more."""
    raw, library = build / "reached", build / "tests/support/libespalier_entered_functions.so"
    tables = {FAULTS: [(0, fault.file, fault.name) for fault in faults]}
    known = lambda file, *of: (raw / f"{file.name}.json").is_file() and all((raw / f"{file.name}.json").stat().st_mtime > o.stat().st_mtime for o in of)  # noqa: E731
    todo = []
    for name, entry in cases.entries.items():
        chosen = cases.fast[name] | cases.share[name]
        if chosen and not known(entry.program, entry.program):
            todo.append(([entry.program], record_program, entry, tables, library, {case: case for _, case in entry.cases if case in chosen}))
    if python:
        stale = lambda file: not known(file, file, build / "espalier")  # noqa: E731
        todo += [(files, record_pytest, build, files, tables, library, "fast") for files in groups_of_python_tests("", stale)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda job: write_raw(raw, job[0], job[1](*job[2:])), todo))
    entered = read_raw(raw)
    of_cases = {test: {name for _, name in entered[test]} & {fault.name for fault in faults} for test in entered}
    order = sorted((test for test in entered if of_cases[test]), key=lambda test: (len(of_cases[test]), test.seconds, test.name))
    return {fault.name: [test for test in order if fault.name in of_cases[test]] for fault in faults}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--only", default="", help="regular expression on names of faults")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--no-python", action="store_true", help="faults that no C++ test notices have no line then")
    parser.add_argument("--again", action="store_true", help="faults that have a line, too")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    table = table_of(TABLE)
    faults = [fault for fault in table if fault.alone]
    known = dict(line.split(" ", 1) for line in NOTICED.read_text(encoding="utf-8").splitlines()) if NOTICED.is_file() else {}
    wanted = [fault for fault in faults if re.search(arguments.only, fault.name) and (arguments.again or name_of(fault) not in known)]
    cases = Cases(build)
    # A fault of two lines has two entries of its name, one with a file.
    reaching = reach(build, cases, [fault for fault in table if fault.file], arguments.jobs, not arguments.no_python)
    runner = Runner(build, cases)

    def of_fault(fault):
        return fault, who_notices(runner, cases, reaching[fault.name], fault)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for number, (fault, (tier, case)) in enumerate(pool.map(of_fault, wanted), 1):
            if arguments.no_python and (tier, case) == SWEEP:
                continue
            known[name_of(fault)] = f"{tier} {case}"
            print(f"[{number}/{len(wanted)}] {name_of(fault):46} {len(reaching[fault.name]):4} {tier:5} {case}", flush=True)
            NOTICED.write_text("".join(f"{name} {known[name]}\n" for name in dict.fromkeys(map(name_of, faults)) if name in known), encoding="utf-8")


if __name__ == "__main__":
    main()
