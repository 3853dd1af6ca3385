"""Runs every test of a build folder and says what happened: GoogleTest binaries (from ctest's list), then pytest.

    python tools/run_tests.py --build build [--no-python] [--no-cpp] [--only REGEX]

One line per binary with its cases and seconds; the output of what failed; the skipped cases with their reasons; and as the
last line exactly `N passed, N failed, N skipped`, where N counts single test cases. Exit 1 when a case failed, when a
binary ended without a report, or when fewer cases exist than tests/minimum_cases.txt says (a test that silently
disappears is a failure).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY_TIMEOUT = 900.0  # seconds
PYTHON_ABSENT = "tests/python"  # the name under which all Python tests are skipped together


@dataclass
class Result:
    passed: int = 0
    failed: list = field(default_factory=list)  # "Suite.Case" or "binary: what happened"
    skipped: list = field(default_factory=list)  # (case, reason)

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def text(self):
        return f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def skip_reason(element):
    """GoogleTest writes "file:line" and the reason on the next lines, pytest puts the reason into `message`."""
    message = (element.get("message") or element.text or "").strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r".*:\d+$", lines[0]):
        lines = lines[1:]
    return " ".join(lines) or "no reason given"


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


def listed_tests(build):
    command = ["ctest", "--test-dir", str(build), "--show-only=json-v1"]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout).get("tests", []) if done.returncode == 0 else []


def run_cpp(build, only, reports):
    total = Result()
    tests = [t for t in listed_tests(build) if re.search(only, t["name"])]
    if not tests:
        print("no C++ tests in this build folder (GoogleTest missing when it was configured?)")
    width = max((len(t["name"]) for t in tests), default=0)
    for number, test in enumerate(tests, 1):
        name = test["name"]
        if "command" not in test:
            total.add(Result(failed=[f"{name}: not built"]))
            continue
        report = reports / f"{name}.xml"
        environment = dict(os.environ, GTEST_OUTPUT=f"xml:{report}", GTEST_COLOR="no")
        cwd = next((p["value"] for p in test.get("properties", []) if p["name"] == "WORKING_DIRECTORY"), str(build))
        start = time.monotonic()
        status, output = run_logged(test["command"], environment, cwd, BINARY_TIMEOUT)
        result = collect(report, status, name)
        print(f"[{number:2}/{len(tests)}] {name:{width}}  {time.monotonic() - start:6.1f} s  {result.text()}", flush=True)
        if result.failed:
            print_failures(output)
        total.add(result)
    return total


def print_failures(output):
    """Of a GoogleTest log only what stands between RUN and FAILED; otherwise its end."""
    blocks = re.findall(r"^\[ RUN      \].*?\n(?:(?!\[ RUN).*\n)*?\[  FAILED  \] .* ms\)$", output, re.M)
    text = "\n".join(blocks) if blocks else output[-6000:]
    print("\n".join("    " + line[:500] for line in text.splitlines()[:400]), flush=True)


def run_python(build, only, reports):
    environment = dict(os.environ, ESPALIER_BINARY=str(build / "espalier"), PYTHONDONTWRITEBYTECODE="1")
    extra = build / "python"
    if extra.is_dir():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(extra), environment.get("PYTHONPATH")]))
    probe = subprocess.run([sys.executable, "-c", "import pytest, torch, transformers"], env=environment,
                           capture_output=True, text=True)
    if probe.returncode != 0:
        reason = probe.stderr.strip().splitlines()[-1] if probe.stderr.strip() else describe_end(probe.returncode)
        print(f"[python] not run: {reason}")
        return Result(skipped=[(PYTHON_ABSENT, f"this Python lacks what its tests need: {reason}")])
    report = reports / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "tests/python", "-q", "--no-header", "--durations=5", "-p", "no:cacheprovider",
               "-o", "junit_family=xunit2", f"--junitxml={report}"]
    if only:
        command += ["-k", only]
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    # 5: nothing was selected, which only --only may cause
    result = collect(report, 0 if status == 5 and only else status, "pytest", silent_status=None)
    print(f"[python] {time.monotonic() - start:6.1f} s  {result.text()}", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--only", default="", help="C++: regular expression on binaries; Python: pytest -k")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("--no-cpp", action="store_true")
    arguments = parser.parse_args()
    build = arguments.build.resolve()

    total = Result()
    with tempfile.TemporaryDirectory(prefix="espalier-tests-") as folder:
        if not arguments.no_cpp:
            total.add(run_cpp(build, arguments.only, Path(folder)))
        if not arguments.no_python:
            total.add(run_python(build, arguments.only, Path(folder)))

    # Where the Python tests cannot run at all, that stands among the skipped ones with its reason.
    minimum_file = ROOT / "tests/minimum_cases.txt"
    everything = not (arguments.only or arguments.no_python or arguments.no_cpp) and PYTHON_ABSENT not in dict(total.skipped)
    cases = total.passed + len(total.failed) + len(total.skipped)
    if everything and minimum_file.exists() and cases < int(minimum_file.read_text()):
        total.failed.append(f"{cases} cases exist, tests/minimum_cases.txt wants {minimum_file.read_text().strip()}")
    if total.skipped:
        print("\nSkipped:")
        for reason, count in Counter(reason for _, reason in total.skipped).most_common():
            names = [name for name, other in total.skipped if other == reason]
            print(f"  {count} x {reason}: {', '.join(names[:4])}{', ...' if count > 4 else ''}")
    if total.failed:
        print("\nFailed:")
        print("\n".join(f"  {name}" for name in total.failed))
    print(f"\n{total.text()}", flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
