"""make record: runs one case of every test of a build folder without unity and writes down its seconds and which files it enters
(tools/recorded_tests.py). C++ as it is built: tests/recording/entered_functions.cpp puts breakpoints where functions begin.
Python by a call that tests/recording/sitecustomize.py puts into functions when they are imported.

    python tools/record_tests.py --build build/each [--only REGEX] [--jobs N] [--no-python] [--no-cpp]
    python tools/record_tests.py --build build --times FILE

With --only, --no-python or --no-cpp what the folder --raw has of other tests stays. With --times nothing runs: the seconds are those that
tools/run_tests.py --times FILE wrote, of the longest of a test's cases, also for tests of which it is not known yet what they enter.
"""

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recorded_tests import FOLDER, PYTEST, ROOT, KnownTest, Record, most_specific_first
from built_tests import compiled_files, entries_of

OF_TESTS = re.compile(r"^tests/(.*_test\.cpp|.*_gradcheck\.cpp|python/(.*/)?(test_\w+|conftest)\.py|support/main\.cpp)$")  # their tests are known
FILES_AT_ONCE = 8  # of Python tests in one process, which imports torch and transformers once
FAULTS = "faults"  # a table without a program: the lines of deliberate faults (tests/mutation/fault_of_environment.cpp)
LIBRARIES = ("espalier", "espalier_copies", "libespalier_core.so", "libespalier_emulated.so",
             "tests/cuda/libespalier_emulated_kernels.so", "tests/cuda/libespalier_emulation.so")


def sources_of_symbols(build):
    """({symbol of all files: source}, {(base name of a source, local symbol): sources}) of all objects."""
    everywhere, local = {}, defaultdict(set)
    objects = compiled_files(build)
    built = {str(o): source for o, source in objects.items() if o.is_file() and source.is_relative_to(ROOT) and not source.is_relative_to(build)}
    # Copies with deliberate faults stand for the files that they are copies of.
    for o, source in objects.items():
        parts = source.parts
        if o.is_file() and "faulty" in parts:
            original = ROOT / "espalier" / Path(*parts[parts.index("faulty") + 1:])
            if original.is_file():
                built[str(o)] = original
    for start in range(0, len(built), 100):
        some = list(built)[start:start + 100]
        listing = subprocess.run(["nm", "--defined-only", "-A", *some], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            o, _, rest = line.partition(":")
            parts = rest.split()
            if len(parts) == 3 and parts[1] == "T":
                everywhere[parts[2]] = built[o].relative_to(ROOT).as_posix()
            elif len(parts) == 3 and parts[1] == "t":
                local[built[o].name, parts[2]].add(built[o].relative_to(ROOT).as_posix())
    return everywhere, local


def functions_of(program, symbols):
    """[(where it begins, source, symbol)] of a program or library, ascending. Parts that the compiler split off are no functions."""
    everywhere, local = symbols
    listing = subprocess.run(["readelf", "-sW", program], capture_output=True, text=True, check=True).stdout
    found, file = {}, ""
    for line in listing.splitlines():
        parts = line.split()
        if len(parts) < 8 or not parts[0].endswith(":"):
            continue
        kind, binding, section, name = parts[3], parts[4], parts[6], parts[7]
        if kind == "FILE":
            file = name
        if kind != "FUNC" or section == "UND" or name.endswith(".cold") or int(parts[2], 0) == 0:
            continue
        candidates = {everywhere.get(name)} - {None} if binding == "GLOBAL" else local.get((file, name), set())
        if len(candidates) == 1:
            found[int(parts[1], 16)] = (*candidates, name)
    return [(at, *found[at]) for at in sorted(found)]


class Folder:
    """What a recording process finds in $ESPALIER_RECORDING."""

    def __init__(self, path, tables):
        self.path = Path(path)
        for name, functions in tables.items():
            (self.path / f"{name}.functions").write_bytes(struct.pack(f"<{len(functions)}Q", *(at for at, _, _ in functions)))
            (self.path / f"{name}.entered").write_bytes(bytes(len(functions)))
        if FAULTS in tables:
            (self.path / f"{FAULTS}.names").write_text("".join(f"{name}\n" for _, _, name in tables[FAULTS]), encoding="utf-8")

    def environment(self, library, **more):
        return dict(os.environ, ESPALIER_RECORDING=str(self.path), LD_PRELOAD=str(library), OMP_NUM_THREADS="1", **more)

    def notes(self, tables):
        """{test: (seconds, functions and files that it entered)}."""
        out = {}
        notes = self.path / "notes"
        for line in notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []:
            test, seconds, *parts = line.split("\t")
            if not test:
                continue
            before, entered = out.get(test, (0.0, set()))
            for part in parts:
                name, _, items = part.partition(":")
                if name == "python":
                    entered |= {(file, file) for file in items.split(",")}
                else:
                    entered |= {tables[name][int(i)][1:] for i in items.split(",")}
            out[test] = max(before, float(seconds)), entered
        return out


def first_cases(pairs):
    first = {}
    for test, case in pairs:
        first.setdefault(test, case)
    return first


def tables_of(names, tables):
    return {name: tables[name] for name in (*names, *(Path(library).name for library in LIBRARIES), FAULTS) if name in tables}


def record_program(entry, tables, library, names=None):
    """{KnownTest: entered} of one GoogleTest program. `names`: {case that runs: its name there}, the first case of every test unless given."""
    if names is None:
        names = {case: test for test, case in first_cases(entry.cases).items()}
    with tempfile.TemporaryDirectory(prefix="espalier-recording-") as path:
        folder = Folder(path, tables_of([entry.program.name], tables))
        flags = Path(path) / "flags"
        flags.write_text("--gtest_filter=" + ":".join(names))
        done = subprocess.run([*entry.command, f"--gtest_flagfile={flags}", "--gtest_brief=1"], cwd=entry.cwd, env=folder.environment(library),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        notes = folder.notes(tables)
    lost = set(names) - set(notes)
    if done.returncode != 0 or lost:
        print(f"{entry.name}: exit status {done.returncode}, no note of {len(lost)} tests\n{done.stdout[-2000:]}", flush=True)
    print(f"{entry.name}: {len(notes)} tests, {sum(seconds for seconds, _ in notes.values()):.1f} s", flush=True)
    return {KnownTest(names[case], entry.name, seconds): entered for case, (seconds, entered) in notes.items() if case in names}


def record_pytest(build, files, tables, library, choice="one"):
    """{KnownTest: entered} of files of tests/python, in one process; the cases that a choice of tools/tiers.py has."""
    with tempfile.TemporaryDirectory(prefix="espalier-recording-") as path:
        folder = Folder(path, tables_of([], tables))
        search = os.pathsep.join(filter(None, [str(ROOT / "tests/recording"), str(build / "python"), os.environ.get("PYTHONPATH")]))
        environment = folder.environment(library, PYTHONPATH=search, ESPALIER_BINARY=str(build / "espalier"), ESPALIER_SWEEPS=choice,
                                         ESPALIER_CORE_LIBRARY=str(build / "libespalier_core.so"),  # its functions begin elsewhere than those of another build's
                                         PYTHONDONTWRITEBYTECODE="1", ESPALIER_PYTHON=sys.executable)
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "notes_of_pytest", *map(str, files)],
                              cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        notes = folder.notes(tables)
    if done.returncode not in (0, 5):
        print(f"exit status {done.returncode}\n{done.stdout[-6000:]}", flush=True)
    print(f"{', '.join(file.name for file in files)}: {len(notes)} tests, {sum(seconds for seconds, _ in notes.values()):.1f} s", flush=True)
    return {KnownTest(test, PYTEST, seconds): entered for test, (seconds, entered) in notes.items()}


def groups_of_python_tests(only, wanted=lambda file: True):
    """Files of tests/python, as many as one process runs together."""
    files = [file for file in sorted((ROOT / "tests/python").rglob("test_*.py")) if re.search(only, file.name) and wanted(file)]
    return [files[start:start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE)]


def write_raw(raw, files, entered_by):
    """What the tests of programs or of Python files entered, a file for each of them in the folder `raw`."""
    raw.mkdir(parents=True, exist_ok=True)
    for file in files:
        of_file = {test: entered for test, entered in entered_by.items() if file.name in (test.program, test.name.split("::")[0])}
        lines = [[[test.name, test.program, test.seconds], sorted(entered)] for test, entered in of_file.items()]
        (raw / f"{file.name}.json").write_text(json.dumps(lines), encoding="utf-8")


def read_raw(raw):
    """{KnownTest: {(file, function)}} of everything in the folder."""
    lines = [one for file in sorted(raw.glob("*.json")) for one in json.loads(file.read_text(encoding="utf-8"))]
    return {KnownTest(*key): {tuple(pair) for pair in entered} for key, entered in lines}


def record_of(entered_by):
    """The Record of {KnownTest: {(file, function)}}."""
    of_file = defaultdict(lambda: defaultdict(set))
    for test, entered in entered_by.items():
        for file, function in entered:
            if not OF_TESTS.search(file):
                of_file[file][test].add(function)
    in_all = {test: len(entered) for test, entered in entered_by.items()}
    seconds = {test: test.seconds for test in entered_by}
    best = {file: most_specific_first(tests, in_all, seconds) for file, tests in of_file.items()}
    return Record(list(entered_by), best, {file: list(tests) for file, tests in of_file.items()})


def with_times(record, seconds, entries):
    """The record with the `seconds` of cases {"class.case": seconds} that a run of `entries` had."""
    test_of = {case: (test, entry.name) for entry in entries for test, case in entry.cases}
    longest = {}
    for case, spent in seconds.items():
        found = re.fullmatch(r"tests\.python\.(?:\w+\.)*(test_\w+)\.(\w+)(\[.*)?", case, re.S)
        test = (f"{found[1]}.py::{found[2]}", PYTEST) if found else test_of.get(case)
        if test:
            longest[test] = max(spent, longest.get(test, 0.0))
    known = {(test.name, test.program): test for test in record.tests}
    now = {key: KnownTest(*key, longest.get(key, known[key].seconds if key in known else 0.0)) for key in {*known, *longest}}
    renewed = lambda tests: [now[test.name, test.program] for test in tests]  # noqa: E731
    return Record(list(now.values()), {file: renewed(tests) for file, tests in record.best.items()},
                  {file: renewed(tests) for file, tests in record.reached.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--only", default="", help="regular expression on names of programs and files")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("--no-cpp", action="store_true")
    parser.add_argument("--times", type=Path, help="what tools/run_tests.py --times wrote")
    parser.add_argument("--raw", type=Path, default=ROOT / "build/recording", help="a folder of what each program entered; earlier runs' files there count, too")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    library = build / "tests/support/libespalier_entered_functions.so"
    entries, _ = entries_of(build, arguments.only)
    entries = [entry for entry in entries if entry.cases and entry.name == entry.program.name]
    if arguments.times:
        with_times(Record.read(), json.loads(arguments.times.read_text(encoding="utf-8")), entries).write(FOLDER)
        return
    symbols = sources_of_symbols(build)
    wanted = [entry.program for entry in entries] + [build / name for name in LIBRARIES if (build / name).is_file()]
    tables = {program.name: functions_of(program, symbols) for program in wanted}
    jobs = [] if arguments.no_cpp else [([entry.program], record_program, entry, tables, library) for entry in entries]
    if not arguments.no_python:
        jobs += [(files, record_pytest, build, files, tables, library) for files in groups_of_python_tests(arguments.only)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda job: write_raw(arguments.raw, job[0], job[1](*job[2:])), jobs))
    record_of(read_raw(arguments.raw)).write(FOLDER)


if __name__ == "__main__":
    main()
