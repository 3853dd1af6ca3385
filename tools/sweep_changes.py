"""What CI runs of the sweep: every case, under every instruction set, of the tests that enter what the last commits changed, the most
specific first, as many as take --seconds on two processors. It says which it left out, and begins no test after these seconds.

    python tools/sweep_changes.py --build build --seconds 240 [--since REVISION]

Without --since: the commits of the day before the last one.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from built_tests import entries_of, matches
from instruction_levels import levels_to_run
from recorded_tests import PYTEST, ROOT, Record
from run_tests import Job, Result, print_failures
from tests_of import Tree, in_turns
from tiers import LONG, long_tests

sys.path.append(str(ROOT / "tests/mutation"))
from write_faulty_sources import table_of  # noqa: E402


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")


def a_day_before():
    """The last commit that is a day older than HEAD; where the history does not go so far, its first one."""
    [last, *_] = git("log", "-1", "--format=%ct")
    [before, *_] = git("rev-list", "-1", f"--before={int(last) - 24 * 3600}", "HEAD")
    return before or git("rev-list", "--reverse", "HEAD")[0]


def times_that_it_runs(build):
    """{(program, test): how many cases, repetitions included}."""
    counts, (_, narrower) = Counter(), levels_to_run(build)
    entries, _ = entries_of(build, "", sweep=False)
    for entry in entries:
        for test, case in entry.cases or ():
            counts[entry.program.name, test] += 1 + (len(narrower) if matches(case, entry.label("rounding") or "-*") else 0)
    return counts


def chosen_tests(tests, counts, seconds):
    """(those that fit into `seconds` of two processors, those that do not, those that are not built here)."""
    chosen, left_out, absent, left, long = [], [], [], 2 * seconds, long_tests()
    for test in tests:
        times = 1 if test.program == PYTEST else counts[test.program, test.name]
        needed = max(test.seconds, LONG + 1 if test.name in long else 0) * times
        if times == 0:
            absent.append(test)
        elif needed <= left:
            chosen.append(test)
            left -= needed
        else:
            left_out.append(test)
    return chosen, left_out, absent


# Programs with deliberate faults: (program, table, GoogleTest filter of the faults). `make sweep` alone builds them.
FAULTS = (("mutation_test", "tests/mutation/faults.py", "Deliberate/Faults.IsNoticed/"),
          ("host_faults_test", "tests/cuda/host_faults.py", "All/EachHostFault.IsNoticed/"),
          ("cuda_calls_test", "tests/cuda/calls/call_faults.py", "All/EachCallFault.IsNoticed/"))
SECONDS_OF_A_BUILD, SECONDS_OF_A_FAULT = 90.0, 1.5


def faults_in(files):
    """[(program, patterns of its filter)] of the faults that stand in changed files, and of all of a table that changed."""
    out = []
    for program, table, test in FAULTS:
        faults = table_of(ROOT / table)
        places = {f"espalier/{fault.file}" for fault in faults if fault.file}
        if table not in files:  # a fault without a file stands in the text of another one
            faults = [f for f in faults if f"espalier/{f.file}" in files or (not f.file and places & set(files))]
        faults = [fault for fault in faults if fault.alone]
        if faults:
            out.append((program, [f"{test}{fault.name}*" for fault in faults]))
    return out


def run_faults(build, files, seconds):
    """Builds and runs the faults of changed files, as far as `seconds` allow. What came of it."""
    total = Result()
    for program, patterns in faults_in(files):
        needed = SECONDS_OF_A_BUILD + len(patterns) * SECONDS_OF_A_FAULT
        if needed > seconds:
            print(f"  left out, more than its seconds allow: {len(patterns)} faults of {program}")
            continue
        seconds -= needed
        subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1), "--target", program], check=True)
        [entry] = [entry for entry in entries_of(build, f"^{program}$")[0] if entry.name == program]
        with tempfile.TemporaryDirectory(prefix="espalier-tests-") as folder:
            report = Path(folder) / "report.xml"
            command = [*entry.command, f"--gtest_filter={':'.join(patterns)}"]
            result, output, _ = Job(program, command, report, dict(os.environ, GTEST_OUTPUT=f"xml:{report}", GTEST_COLOR="no"), entry.cwd).run()
        print(f"  faults of {program}: {result.text()}")
        if result.failed:
            print_failures(output)
        total.add(result)
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--since", default="")
    arguments = parser.parse_args()
    build, since = arguments.build.resolve(), arguments.since or a_day_before()
    files = [name for name in git("diff", "--name-only", "--diff-filter=d", since, "HEAD") if name and (ROOT / name).is_file()]
    tree = Tree(Record.read(), build)
    tests = in_turns([tree.tests_of(name) for name in files if re.search(r"\.(cpp|h|cu|cuh|py|def)$", name)])
    chosen, left_out, absent = chosen_tests(tests, times_that_it_runs(build), arguments.seconds)
    print(f"Sweep of the {len(files)} files changed since {since[:9]}: {len(chosen)} of the {len(tests)} tests that reach them, every case")
    for what, those in (("left out, more than its seconds allow", left_out), ("left to make sweep, which builds them", absent)):
        if those:
            names = [test.name for test in those]
            print(f"  {what}: {len(those)}: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}")
    faults = run_faults(build, files, arguments.seconds / 2)
    print(f"\n{faults.text()}", flush=True)
    if not chosen:
        return int(bool(faults.failed))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(test.name for test in chosen))
        names.flush()
        python = [] if any(test.program == PYTEST for test in chosen) else ["--no-python"]
        command = [sys.executable, ROOT / "tools/run_tests.py", "--build", build, "--tier", "sweep", "--sweeps", f"tests:{names.name}", "--seconds", str(arguments.seconds), *python]
        return subprocess.run(command).returncode or int(bool(faults.failed))


if __name__ == "__main__":
    sys.exit(main())
