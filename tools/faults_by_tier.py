"""make faults: which tier of the tests notices which deliberate fault of tests/mutation/faults.py. Writes tests/mutation/noticed.txt.

    python tools/faults_by_tier.py --build build/faults [--only REGEX] [--jobs N]

The build folder is one with ESPALIER_FAULTS (cmake/EspalierFaults.cmake). Of the tests that were recorded to enter the file of a fault,
those of `make fast` run with the fault switched on, one case each, the most specific first, until one of them fails; then those of
`make test`. A test that fails without any fault counts for none. What neither notices is left to mutation_test, which
`make sweep` runs: it notices every fault. noticed.txt: `fault tier test` a line.
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

from recorded_tests import PYTEST, ROOT, Record
from run_tests import pytest_command, python_environment
from built_tests import entries_of
from tiers import FAST, LONG
from tests_of import Tree

sys.path.append(str(ROOT / "tests/mutation"))
from write_faulty_sources import table_of  # noqa: E402

TABLE, NOTICED = ROOT / "tests/mutation/faults.py", ROOT / "tests/mutation/noticed.txt"
SWEEP = ("sweep", "mutation_test")
AT_ONCE = 12  # tests of one program that run before the next program has its turn
PATIENCE = 240.0  # seconds of one program: a fault may make it wait for ever


def name_of(fault):
    return fault.name + (f"_and_{fault.together_with}" if fault.together_with else "")


class Runner:
    def __init__(self, build):
        self.build, self.entries = build, {entry.name: entry for entry in entries_of(build, "", sweep=False)[0] if entry.cases}
        self.broken = set()

    def failures(self, program, tests, fault):
        """Names of those of a program's tests that fail, one case each; a program that ends badly is a failure of the test that it was in."""
        more = {"ESPALIER_FAULT": ",".join(filter(None, [fault.name, fault.together_with]))} if fault else {}
        more |= {"ESPALIER_FAULT_ONCE": "1"} if fault and fault.once else {}
        more |= {"OMP_NUM_THREADS": "1", "ESPALIER_SWEEPS": "one"}
        with tempfile.TemporaryDirectory(prefix="espalier-faults-") as folder:
            report = Path(folder) / "report.xml"
            if program == PYTEST:
                files = [f"tests/python/{test.name}" for test in tests]
                command, where = pytest_command(report, "", "-x", files=files), str(ROOT)
                environment = python_environment(self.build, "") | more
            else:
                entry = self.entries[program]
                first = {}
                for test, case in entry.cases:
                    first.setdefault(test, case)
                cases = {first[test.name]: test.name for test in tests if test.name in first}
                command = [*entry.command, "--gtest_filter=" + ":".join(cases), "--gtest_fail_fast"]
                environment, where = dict(os.environ, GTEST_OUTPUT=f"xml:{report}", **more), entry.cwd
            try:
                done = subprocess.run(command, env=environment, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      timeout=PATIENCE, text=True, errors="replace")
                status, said = done.returncode, done.stdout
            except subprocess.TimeoutExpired as expired:
                status, said = None, (expired.stdout or b"").decode(errors="replace")
            return self.read(program, tests, report, status, said)

    def read(self, program, tests, report, status, said):
        if status == 0:
            return []
        if report.is_file() and report.stat().st_size:
            failed = [case for case in ElementTree.parse(report).getroot().iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
            names = [f"{case.get('classname')}.{case.get('name')}" for case in failed]
            return [test.name for test in tests if any(self.is_of(test, name, program) for name in names)][:1] or [tests[0].name]
        begun = re.findall(r"^\[ RUN      \] (\S+)", said, re.M)  # it crashed, or hangs
        return [test.name for test in tests if begun and self.is_of(test, begun[-1], program)] or [tests[0].name]

    @staticmethod
    def is_of(test, case, program):
        if program == PYTEST:
            return re.sub(r"\[.*", "", case).split(".")[-2:] == [test.name.split(".py::")[0], test.name.split("::")[1]]
        return test.name in (case, case.rsplit("/", 1)[0], re.sub(r"/\d+\.", ".", case))


def batches(tests):
    """[(program, tests)] in order; neighbours of one program together."""
    out, open_batches = [], {}
    for test in tests:
        batch = open_batches.get(test.program)
        if batch is None or len(batch) == AT_ONCE:
            batch = open_batches[test.program] = []
            out.append((test.program, batch))
        batch.append(test)
    return out


def who_notices(runner, tree, fault, file):
    """(tier, test) of a fault in a file."""
    tests = tree.entering(f"espalier/{file}")
    for tier, from_, to in (("fast", -1.0, FAST), ("test", FAST, LONG)):
        chosen = [test for test in tests if from_ < test.seconds <= to and (test.program == PYTEST or test.program in runner.entries)]
        # Python tests come last: torch and transformers are slow to begin.
        for program, some in batches([t for t in chosen if t.program != PYTEST] + [t for t in chosen if t.program == PYTEST]):
            for name in runner.failures(program, some, fault):
                if (program, name) in runner.broken:
                    continue
                alone = [test for test in some if test.name == name]
                if runner.failures(program, alone, None):
                    runner.broken.add((program, name))
                    continue
                return tier, name
    return SWEEP


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    faults = [fault for fault in table_of(TABLE) if fault.alone]
    # A fault of two lines has two entries of its name, one with a file.
    places = {fault.name: fault.file for fault in table_of(TABLE) if fault.file}
    wanted = [fault for fault in faults if re.search(arguments.only, fault.name)]
    runner, tree = Runner(build), Tree(Record.read(), build)
    known = dict(line.split(" ", 1) for line in NOTICED.read_text(encoding="utf-8").splitlines()) if NOTICED.is_file() else {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = pool.map(lambda fault: who_notices(runner, tree, fault, places[fault.name]), wanted)
        for number, (fault, (tier, test)) in enumerate(zip(wanted, found), 1):
            known[name_of(fault)] = f"{tier} {test}"
            print(f"[{number}/{len(wanted)}] {name_of(fault):46} {places[fault.name]:32} {tier:5} {test}", flush=True)
            NOTICED.write_text("".join(f"{name} {known[name]}\n" for name in dict.fromkeys(map(name_of, faults)) if name in known), encoding="utf-8")


if __name__ == "__main__":
    main()
