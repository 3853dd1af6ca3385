"""What ptxas says of the kernels, against the table in the repository (espalier/ops/cuda/ptxas.txt): a line a kernel and
architecture with its instances, and the most registers, stack and spilled bytes of any of them.

    tools/ptxas_facts.py [--build build]            compares; make check runs it. Exit 1 where they differ
    tools/ptxas_facts.py [--build build] --write    writes the table, after `make cuda`

Without what nvcc wrote (no nvcc, or nothing built since a kernel changed) it says so and compares nothing.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "espalier/ops/cuda"
TABLE = SOURCES / "ptxas.txt"
HEAD = "# kernel, architecture: instances, most registers, stack bytes, spilled bytes (tools/ptxas_facts.py --write)\n"
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
KERNEL = re.compile(r"\b(\w+_kernel)\b")


def demangled(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines()))


def facts_of(logs):
    """{(kernel, architecture): [instances, registers, stack, spilled]}"""
    found = []
    for log in logs:
        entry = None
        for line in log.read_text(encoding="utf-8").splitlines():
            if match := ENTRY.search(line):
                entry = [*match.groups(), 0, 0, 0]
                found.append(entry)
            elif entry and (match := FRAME.search(line)):
                entry[3:] = [max(entry[3], int(match[1])), max(entry[4], int(match[2]) + int(match[3]))]
            elif entry and (match := USED.search(line)):
                entry[2] = max(entry[2], int(match[1]))
    names = demangled(sorted({name for name, *_ in found}))
    facts = {}
    for name, architecture, registers, stack, spilled in found:
        kernel = KERNEL.search(names[name])
        row = facts.setdefault((kernel.group(1) if kernel else names[name], architecture), [0, 0, 0, 0])
        row[:] = [row[0] + 1, max(row[1], registers), max(row[2], stack), max(row[3], spilled)]
    return facts


def is_of_these_sources(log):
    """Whether nvcc wrote it after the last change of the kernel and of what it includes from SOURCES."""
    listed = log.with_suffix(".d")
    if not log.exists() or not listed.exists():
        return False
    sources = [path for name in listed.read_text(encoding="utf-8").split() if SOURCES in (path := Path(name)).parents and path.exists()]
    return bool(sources) and log.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def text_of(facts):
    rows = (f"{kernel}, {architecture}: {', '.join(map(str, row))}\n" for (kernel, architecture), row in sorted(facts.items()))
    return HEAD + "".join(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    folder = ROOT / arguments.build / "library/ops/cuda"
    logs = [folder / f"{kernel.stem}.ptxas" for kernel in sorted(SOURCES.glob("*.cu"))]
    if not all(is_of_these_sources(log) for log in logs):
        print("kernels were not compiled since they changed (make cuda does it, where nvcc is): nothing compared")
        return 0
    text = text_of(facts_of(logs))
    if arguments.write:
        TABLE.write_text(text, encoding="utf-8")
        return 0
    had, has = set(TABLE.read_text(encoding="utf-8").splitlines()), set(text.splitlines())
    for line in sorted(had ^ has):
        print(("only in the table: " if line in had else "only in this build: ") + line)
    return 1 if had != has else 0


if __name__ == "__main__":
    sys.exit(main())
