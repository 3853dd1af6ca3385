"""clang-tidy over the sources, those that name ATen included.

    python tools/tidy.py --build build [--changed REVISION] [--minutes N]

Without --changed every source of espalier/ and cli/; with it those that differ from the revision (HEAD: what is not
committed), and those that include a header that does. --minutes ends the run early: the order is drawn from the commit, so that
one run after the other comes to every file, and the last line says how many were reached. Exit 1 with the findings.

The database of the build names GCC's precompiled header, which clang cannot read; a copy without it lies in BUILD/tidy.
"""

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("espalier/", "cli/")


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def without_precompiled_header(words):
    out = []
    for word in words:
        if word.endswith("cmake_pch.hxx") and out[-1] == "-include":
            out.pop()
        elif word not in ("-Winvalid-pch", "-fpch-preprocess"):
            out.append(word)
    return out


def files_of(entry):
    """The file of an entry, or the files that are compiled as one by it (ESPALIER_UNITY in cmake/EspalierTargets.cmake)."""
    path = Path(entry["file"])
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.M) if path.parent.name == "Unity" else [entry["file"]]


def write_database(build):
    """{file below ROOT: its entry}; a file that is compiled for several instruction sets stands there once."""
    entries = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        compiler = next(i for i, word in enumerate(words) if Path(word).name in ("c++", "g++"))  # a cache may stand before it
        for file in files_of(entry):
            path = Path(os.path.relpath(file, ROOT)).as_posix()
            arguments = [file if word == entry["file"] else word for word in without_precompiled_header(words[compiler:])]
            entries[path] = {"directory": entry["directory"], "file": file, "arguments": arguments}
    (build / "tidy").mkdir(exist_ok=True)
    (build / "tidy/compile_commands.json").write_text(json.dumps(list(entries.values())))
    return entries


def includers(headers):
    """Sources and headers that include one of the headers, directly or not."""
    found, every = set(headers), git("ls-files", "*.h", "*.cpp")
    included = {name: set(re.findall(r'^#include "([^"]+)"', (ROOT / name).read_text(encoding="utf-8"), re.M))
                for name in every if (ROOT / name).exists()}
    while True:
        more = {name for name, names in included.items() if names & found} - found
        if not more:
            return found
        found |= more


def chosen_files(entries, revision):
    names = sorted(name for name in entries if name.startswith(FOLDERS))
    if revision:
        changed = set(git("diff", "--name-only", revision)) | set(git("ls-files", "--others", "--exclude-standard"))
        touched = includers({name for name in changed if name.endswith(".h")}) | changed
        names = [name for name in names if name in touched]
    random.Random(git("rev-parse", "HEAD")[0]).shuffle(names)
    return names


def check(tidy, build, name):
    done = subprocess.run([tidy, "-p", build / "tidy", "--quiet", "--warnings-as-errors=*", ROOT / name], capture_output=True, text=True)
    return done.returncode, done.stdout + (done.stderr if "error:" in done.stderr else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--tidy", default="clang-tidy")
    parser.add_argument("--changed", metavar="REVISION")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    if not (build / "compile_commands.json").is_file():
        print(f"clang-tidy needs {build}/compile_commands.json, which make writes")
        return 1
    names = chosen_files(write_database(build), arguments.changed)
    end, failed, reached, unreadable = time.monotonic() + 60 * arguments.minutes, 0, 0, []

    def task(name):
        return (None, "") if time.monotonic() > end else check(arguments.tidy, build, name)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(task, name): name for name in names}
        for future in as_completed(running):
            status, output = future.result()
            reached += status is not None
            if status and "[clang-diagnostic-error]" in output:
                unreadable.append(running[future])
            elif status:
                failed += 1
                print(f"{running[future]}:\n{output.strip()}", flush=True)
    if unreadable:
        print(f"clang-tidy: clang cannot read what GCC can (its built-in functions, the ranges of its library): {', '.join(sorted(unreadable))}")
    print(f"clang-tidy: {reached} of {len(names)} {'changed ' if arguments.changed else ''}files, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
