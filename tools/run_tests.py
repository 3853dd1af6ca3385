"""Runs the tests of a build folder and says what happened: pytest, then the GoogleTest binaries (from ctest's list).

    python tools/run_tests.py --build build [--tier fast|test|sweep] [--sweeps CHOICE] [--no-python] [--no-cpp] [--only REGEX]
                              [--jobs N] [--seconds N] [--times FILE]

A tier is a choice of cases (tools/tiers.py) and of repetitions:

  fast   one case of every test that is quick, once
  test   the share of the day, `--sweeps K/14` another one. The cases that judge float32 or bfloat16 run once more, under one of the
         narrower instruction sets of the processor, and some of those that are too small for threads on all threads.
  sweep  every case, under every instruction set, on every device (entries of ctest with the label `sweep` run here alone)

--times writes what every case costs in seconds (json), which record_tests.py --times takes into the record.
One line per binary with its cases and seconds; the output of what failed; the skipped cases with their reasons; the
instruction sets; and as the last line exactly `N passed, N failed, N skipped`, where N counts single test cases. Exit 1 when
a case failed, when a binary ended without a report, or when fewer cases ran than tests/minimum_cases.txt says of the tier,
repetitions not counted (a test that silently disappears is a failure).
"""

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from instruction_levels import BFLOAT16_ALONE, described, environment_of, levels_to_run
from built_tests import entries_of, matches
from tiers import Choice, day_of_run, share_of

ROOT = Path(__file__).resolve().parent.parent
BINARY_TIMEOUT = 900.0  # seconds
NOTHING_SELECTED = 5  # pytest's exit status
STOP_AT = "ESPALIER_STOP_AT"  # seconds since 1970, after which tests/python/conftest.py and Job begin no further test
PYTHON_ABSENT = "tests/python"  # the name under which all Python tests are skipped together


@dataclass
class Result:
    passed: int = 0
    failed: list = field(default_factory=list)  # "Suite.Case" or "binary: what happened"
    skipped: list = field(default_factory=list)  # (case, reason)
    seconds: dict = field(default_factory=dict)  # of cases that ran

    def add(self, other):
        self.passed += other.passed
        for name, seconds in other.seconds.items():  # the longest, of a case that runs several times
            self.seconds[name] = max(seconds, self.seconds.get(name, 0))
        self.failed += other.failed
        self.skipped += other.skipped

    def cases(self):
        return self.passed + len(self.failed) + len(self.skipped)

    def text(self):
        return f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def skip_reason(element):
    """GoogleTest writes "file:line" and the reason on the next lines, pytest puts the reason into `message`."""
    message = (element.get("message") or element.text or "").strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r".*:\d+$", lines[0]):
        lines = lines[1:]
    return " ".join(lines) or "no reason given"


# A case costs the seconds of processors that it takes, which other work beside it hardly changes, or a part of its time: it may wait, or
# start what others end. That work stretches the time of a case about so many times.
WAITS = 3


def read_report(path):
    """Reads a JUnit-like report (GoogleTest's and pytest's XML have the same elements)."""
    result = Result()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.append(name)
        elif case.find("skipped") is not None:
            result.skipped.append((name, skip_reason(case.find("skipped"))))
        elif case.get("status") != "notrun":
            result.passed += 1
        if case.get("status") != "notrun":
            spent = [one.get("value") for one in case.iter("property") if one.get("name") == "processor_seconds"]
            result.seconds[name] = max(float(spent[0]) if spent else 0.0, float(case.get("time") or 0) / WAITS)
    return result


def run_logged(command, environment, cwd, timeout):
    """Returns (exit status or None after a timeout, output of both streams)."""
    try:
        done = subprocess.run(command, env=environment, cwd=cwd, timeout=timeout, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace")
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output


def describe_end(status):
    if status is None:
        return f"stopped after {BINARY_TIMEOUT:.0f} s"
    return f"ended by signal {-status}" if status < 0 else f"ended with exit status {status}"


def collect(report, status, name, silent_status=0):
    """The result of one program from its report; a bad end that the report does not explain is a failure of its own."""
    try:
        result = read_report(report)
    except (OSError, ElementTree.ParseError):
        if status == silent_status:
            return Result(passed=1)  # a ctest entry that is not a GoogleTest binary: one case
        return Result(failed=[f"{name}: {describe_end(status)} without a report"])
    if status != 0 and not result.failed:
        result.failed.append(f"{name}: {describe_end(status)}")
    return result


@dataclass
class Job:
    """One program of tests. `level`: the instruction set it is held to (tools/instruction_levels.py), empty for none."""

    name: str
    command: list
    report: Path
    environment: dict
    cwd: str
    repeated: bool = False  # otherwise than before: its cases are counted, but not as cases that must exist
    alone: bool = False  # nothing runs beside it

    def run(self):
        """Returns (result, output, seconds)."""
        start = time.monotonic()
        if time.time() > float(os.environ.get(STOP_AT, "inf")):
            return Result(skipped=[(self.name, "left out: the seconds of this run were over")]), "", 0.0
        status, output = run_logged(self.command, self.environment, self.cwd, BINARY_TIMEOUT)
        if status == NOTHING_SELECTED and self.repeated and "pytest" in self.command:  # the chosen tests may judge no rounding
            return Result(), output, time.monotonic() - start
        result = collect(self.report, status, self.name)
        if not result.cases():
            result.failed.append(f"{self.name}: no case was selected")
        return result, output, time.monotonic() - start


def run_jobs(jobs, at_once):
    """Runs them, `at_once` side by side, the longest known first, then those that run alone. Returns (result of all, cases
    that are repetitions)."""
    total, repetitions, number = Result(), 0, 0
    width = max((len(job.name) for job in jobs), default=0)
    for alone in (False, True):
        with ThreadPoolExecutor(1 if alone else at_once) as pool:
            running = {pool.submit(job.run): job for job in jobs if job.alone == alone}
            for future in as_completed(running):
                job, (result, output, seconds) = running[future], future.result()
                number += 1
                print(f"[{number:2}/{len(jobs)}] {job.name:{width}}  {seconds:6.1f} s  {result.text()}", flush=True)
                if result.failed:
                    print_failures(output)
                total.add(result)
                repetitions += result.cases() if job.repeated else 0
    return total, repetitions


def chosen_cases(entry, choice):
    """Those of a GoogleTest program's cases that a choice of tools/tiers.py has."""
    cases = defaultdict(list)
    for test, case in entry.cases:
        cases[test].append(case)
    kind = lambda what, names: matches(names[0], entry.label(what) or "-*")  # noqa: E731
    return [case for test, names in cases.items() for case in choice.cases(test, names, kind("pairs", names), kind("products", names))]


def cpp_jobs(build, only, reports, level, others, choice, sweep):
    """`others`: instruction sets of the repetitions. `sweep`: entries that run in the sweep alone, too."""
    jobs = []
    entries, missing = entries_of(build, only, sweep)
    for entry in entries:
        judged, threaded = entry.label("rounding"), entry.label("threads")
        if "sweep" in entry.labels and not sweep or choice.only and entry.cases is None:
            continue

        def job(called, sets, more, selected="*", entry=entry, **how):
            report, command = reports / f"{called}.xml", entry.command
            if entry.cases is not None:
                chosen = [case for case in chosen_cases(entry, choice) if matches(case, selected)]
                if not chosen:  # a share may have none of a program
                    return []
                flags = reports / f"{called}.flags"
                flags.write_text("--gtest_filter=" + ":".join(chosen))
                command = [*command, f"--gtest_flagfile={flags}"]
            environment = dict(os.environ, GTEST_OUTPUT=f"xml:{report}", GTEST_COLOR="no", **environment_of(sets), **more)
            environment.setdefault("GOMP_SPINCOUNT", "1000")  # as the program: two binaries share the processors
            return [Job(called, command, report, environment, entry.cwd, **how)]

        one = {"OMP_NUM_THREADS": "1"} if threaded else {}
        jobs += job(entry.name, level, one)
        for other in others if judged else []:
            jobs += job(f"{entry.name} ({other})", other, one, judged, repeated=True)
        if threaded and choice.text != "fast":
            jobs += job(f"{entry.name} (all threads)", level, {}, threaded, repeated=True, alone=True)
    if not jobs and not missing:
        print("no C++ tests in this build folder (GoogleTest missing when it was configured?)")
    # The largest binaries run longest: they come first, and the short repetitions fill up at the end.
    size = lambda job: next(Path(word) for word in job.command if Path(word).is_file()).stat().st_size  # noqa: E731
    return sorted(jobs, key=lambda job: (job.repeated, -size(job))), Result(failed=[] if choice.only else [f"{name}: not built" for name in missing])


def print_failures(output):
    """Of a GoogleTest log only what stands between RUN and FAILED; otherwise its end."""
    blocks = re.findall(r"^\[ RUN      \].*?\n(?:(?!\[ RUN).*\n)*?\[  FAILED  \] .* ms\)$", output, re.M)
    text = "\n".join(blocks) if blocks else output[-6000:]
    print("\n".join("    " + line[:500] for line in text.splitlines()[:400]), flush=True)


def python_environment(build, level):
    environment = dict(os.environ, ESPALIER_BINARY=str(build / "espalier"), **environment_of(level))
    environment.setdefault("GOMP_SPINCOUNT", "1000")  # threads that spin for long take the processor from each other
    environment.setdefault("ESPALIER_PYTHON", sys.executable)  # has what the tests need; the build's may have only torch
    if build.resolve() != ROOT / "build":  # where the Python package looks
        environment.setdefault("ESPALIER_CORE_LIBRARY", str(build.resolve() / "libespalier_core.so"))
    extra = build / "python"
    if extra.is_dir():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(extra), environment.get("PYTHONPATH")]))
    return environment


def python_absence(build):
    """Why the Python tests cannot run here, or nothing."""
    probe = subprocess.run([sys.executable, "-c", "import pytest, torch, transformers"], env=python_environment(build, ""),
                           capture_output=True, text=True)
    if probe.returncode == 0:
        return None
    return probe.stderr.strip().splitlines()[-1] if probe.stderr.strip() else describe_end(probe.returncode)


def pytest_command(report, only, *more, files=("tests/python",)):
    command = [sys.executable, "-m", "pytest", *files, "-q", "--no-header", "-p", "no:cacheprovider", "-o",
               "junit_family=xunit2", "-o", "junit_duration_report=call", f"--junitxml={report}", *more]
    return command + (["-k", only] if only else [])


def run_python(build, only, reports, level, at_once):
    """All of them, as conftest.py orders them; two processes share them where pytest-xdist is there (a file's cases stay together)."""
    report, environment = reports / "pytest.xml", python_environment(build, level)
    spread = ["-n", str(at_once), "--dist", "loadfile", "--no-loadscope-reorder"] if at_once > 1 and importlib.util.find_spec("xdist") else []
    start = time.monotonic()
    status = subprocess.run(pytest_command(report, only, "--durations=5", *spread), cwd=ROOT, env=environment).returncode
    # Only --only may select nothing.
    result = collect(report, 0 if status == NOTHING_SELECTED and only else status, "pytest", silent_status=None)
    print(f"[python] {time.monotonic() - start:6.1f} s  {result.text()}", flush=True)
    return result


def python_jobs(build, reports, others):
    jobs = []
    files = [str(file) for file in sorted((ROOT / "tests/python").glob("test_*.py")) if "mark.rounding" in file.read_text()]
    for level in others:
        report = reports / f"pytest-{level}.xml"
        command = pytest_command(report, "bfloat16" if level in BFLOAT16_ALONE else "", "-m", "rounding", files=files)
        jobs.append(Job(f"python ({level})", command, report, python_environment(build, level), str(ROOT), True))
    return jobs


def minimum_cases(tier):
    """Of tests/minimum_cases.txt: `tier number` a line."""
    return dict(line.split() for line in (ROOT / "tests/minimum_cases.txt").read_text().splitlines())[tier]


def summarise(total, repetitions, tier):
    """Prints what was skipped and failed, and the last line; adds the failure of too few cases of a whole tier."""
    cases = total.cases() - repetitions
    # Where the Python tests cannot run at all, that stands among the skipped ones with its reason.
    if tier and PYTHON_ABSENT not in dict(total.skipped) and cases < int(minimum_cases(tier)):
        total.failed.append(f"{cases} cases ran, tests/minimum_cases.txt wants {minimum_cases(tier)} of the tier {tier}")
    if total.skipped:
        print("\nSkipped:")
        for reason, count in Counter(reason for _, reason in total.skipped).most_common():
            names = [name for name, other in total.skipped if other == reason]
            print(f"  {count} x {reason}: {', '.join(names[:4])}{', ...' if count > 4 else ''}")
    if total.failed:
        print("\nFailed:")
        print("\n".join(f"  {name}" for name in total.failed))
    print(f"\n{total.text()}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--only", default="", help="C++: regular expression on binaries; Python: pytest -k")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="programs that run side by side")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("--no-cpp", action="store_true")
    parser.add_argument("--tier", choices=("fast", "test", "sweep"), default="sweep")
    parser.add_argument("--sweeps", default="", help="all, fast, one or K/N (tools/tiers.py) in place of the tier's own choice")
    parser.add_argument("--day", type=datetime.date.fromisoformat, default=day_of_run(), help="chooses the share, the instruction set and the pairs of the tier test")
    parser.add_argument("--seconds", type=float, help="no test begins later than that; what is left is skipped, and named")
    parser.add_argument("--times", type=Path, help="a file for the seconds of every case")
    arguments = parser.parse_args()
    sweep = arguments.tier == "sweep"
    try:
        choice = Choice(arguments.sweeps or {"fast": "fast", "test": share_of(arguments.day), "sweep": "all"}[arguments.tier])
    except ValueError as error:
        parser.error(f"--sweeps: {error}")
    os.environ["ESPALIER_SWEEPS"] = choice.text  # tests/python/conftest.py, tests/cuda/mutate_kernels.py
    if arguments.seconds:
        os.environ[STOP_AT] = str(time.time() + arguments.seconds)
    os.environ["ESPALIER_DAY"] = arguments.day.isoformat()  # tests/support/covering.cpp
    whole_tier = "" if arguments.sweeps or arguments.only or arguments.no_python or arguments.no_cpp else arguments.tier
    build, start = arguments.build.resolve(), time.monotonic()
    level, narrower = levels_to_run(build)
    others = narrower if sweep else [] if arguments.tier == "fast" else narrower[arguments.day.toordinal() % len(narrower):][:1] if narrower else []

    total, jobs = Result(), []
    with tempfile.TemporaryDirectory(prefix="espalier-tests-") as folder:
        if not arguments.no_cpp:
            jobs, missing = cpp_jobs(build, arguments.only, Path(folder), level, others, choice, sweep)
            total.add(missing)
        if not arguments.no_python:
            absence = python_absence(build)
            if absence:
                print(f"[python] not run: {absence}")
                total.skipped.append((PYTHON_ABSENT, f"this Python lacks what its tests need: {absence}"))
            else:
                total.add(run_python(build, arguments.only, Path(folder), level, arguments.jobs))
                jobs += python_jobs(build, Path(folder), others) if not arguments.only else []
        ran, repetitions = run_jobs(jobs, arguments.jobs)
        total.add(ran)
    print(f"\n{described(level, others, narrower)}; {time.monotonic() - start:.0f} s")
    if choice.text != "all":
        print(f"Tier {arguments.tier}, {arguments.day}: the choice {choice.text} of tools/tiers.py; make sweep runs everything")
    if arguments.times:
        arguments.times.write_text(json.dumps(total.seconds, indent=0))
    summarise(total, repetitions, whole_tier)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
