"""The GoogleTest programs of a build folder and their cases, as ctest and the programs list them. A *case* is what GoogleTest runs
("Models/Families.EveryPlanEqualsAutograd/qwen3"); its *test* is the name without parameters ("Models/Families.EveryPlanEqualsAutograd")."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Entry:
    """An entry of ctest. `cases`: (test, case) pairs that its own filter leaves, None where it is no GoogleTest program."""

    name: str
    command: list
    cwd: str
    labels: list
    program: Path
    cases: list | None = None

    def label(self, what):
        """The GoogleTest filter that espalier_test (cmake/EspalierTargets.cmake) was given as PAIRS, PRODUCTS, ROUNDING or THREADS, or nothing."""
        return next((label.removeprefix(f"{what}=") for label in self.labels if label.startswith(f"{what}=")), None)


def compiled_files(build):
    """{object: source} of everything that the build folder compiles."""
    units = json.loads((build / "compile_commands.json").read_text())
    return {Path(unit["directory"], re.search(r" -o (\S+) ", unit["command"])[1]): Path(unit["file"]) for unit in units}


def property_of(test, name):
    return next((p["value"] for p in test.get("properties", []) if p["name"] == name), None)


def program_of(command):
    """The test binary, before which `cmake -E env NAME=VALUE` may stand."""
    return next(Path(word) for word in reversed(command) if Path(word).is_file())


def matches(case, chosen):
    """GoogleTest's own rule for a filter: patterns with * and ?, between colons, those behind a minus are left out."""
    wanted, _, unwanted = chosen.partition("-")
    several = lambda text: "|".join(re.escape(p).replace(r"\*", ".*").replace(r"\?", ".") for p in text.split(":"))  # noqa: E731
    return bool(re.fullmatch(several(wanted or "*"), case)) and not (unwanted and re.fullmatch(several(unwanted), case))


def read_list(text):
    """(test, case) pairs of --gtest_list_tests, in order. A suite of types ends with /0, /1, ..., which is a parameter, too."""
    pairs, suite, group = [], None, None
    for line in text.splitlines():
        name = line.split("  # ")[0].rstrip()
        if line.startswith("  "):
            pairs.append((group + name.strip().rsplit("/", 1)[0], suite + name.strip()))
        elif name.endswith("."):
            suite, group = name, re.sub(r"/\d+\.$", ".", name) if "# TypeParam" in line else name
    return pairs


def cases_of_programs(build, programs):
    """{program: its pairs}; read again where a program is newer than build/tests/cases.json."""
    kept_file = build / "tests/cases.json"
    try:
        kept = json.loads(kept_file.read_text())
    except (OSError, ValueError):
        kept = {}
    made = {}
    for program in programs:
        stamp = program.stat().st_mtime_ns
        if kept.get(str(program), {}).get("stamp") != stamp:
            done = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
            kept[str(program)] = {"stamp": stamp, "pairs": read_list(done.stdout) if done.returncode == 0 else None}
        made[program] = kept[str(program)]["pairs"]
    kept_file.write_text(json.dumps(kept))
    return made


def entries_of(build, only="", sweep=True):
    """(entries, names that are not built). ctest's own list, in its order; without `sweep` no entry of `make sweep` need be built."""
    done = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], capture_output=True, text=True)
    listed = json.loads(done.stdout).get("tests", []) if done.returncode == 0 else []
    entries, missing = [], []
    for test in listed:
        if not re.search(only, test["name"]):
            continue
        labels = property_of(test, "LABELS") or []
        if "command" not in test or any(word.startswith(f"{build}/tests/") and not Path(word).is_file() for word in test["command"]):
            missing += [test["name"]] if sweep or "sweep" not in labels else []
            continue
        program = program_of(test["command"])
        entries.append(Entry(test["name"], test["command"], property_of(test, "WORKING_DIRECTORY") or str(build),
                             labels, program))
    of_build = [entry for entry in entries if entry.program.is_relative_to(build / "tests")]
    pairs = cases_of_programs(build, sorted({entry.program for entry in of_build}))
    for entry in of_build:
        own = next((word.removeprefix("--gtest_filter=") for word in entry.command if word.startswith("--gtest_filter=")), "*")
        if pairs[entry.program] is not None:
            entry.cases = [pair for pair in map(tuple, pairs[entry.program]) if matches(pair[1], own)]
    return entries, missing
