"""Size and naming habits of the tree: no hand-written file above 800 lines, a median near 150, names that say something,
ASCII sources, and a file opens with what it owns (a .cpp beside its header may leave that to the header). Exit 1 with one line per fault.
"""

import re
import statistics
import sys
from pathlib import Path

from check_includes import ROOT, tracked

LIMIT_LINES = 800
LIMIT_MEDIAN = 250
FORBIDDEN = re.compile(r"(^|/)(utils?|common|helpers?|misc|core)(/|\.[a-z]+$)")
SOURCES = (".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".def")
LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def lines_of_includes(text):
    return "\n".join(re.findall(r'^#include ".*"', text, re.M))


def faults_of(name, text):
    lines = text.splitlines()
    if len(lines) > LIMIT_LINES:
        yield f"{name}: {len(lines)} lines, at most {LIMIT_LINES}"
    cpp = name.endswith((".h", ".cpp", ".cu", ".cuh"))
    # A .cpp beside its header, or the test of a header, may leave that to the header.
    stem = Path(name).name.removesuffix(".cpp").removesuffix("_test")
    has_header = name.endswith(".cpp") and f'/{stem}.h"' in lines_of_includes(text)
    if cpp and lines and not has_header and not lines[0].startswith("//"):
        yield f"{name}:1: a file opens with what it owns, found {lines[0][:60]!r}"
    if name.endswith((".h", ".cuh")) and "#pragma once" not in text:
        yield f"{name}: no #pragma once"
    for number, line in enumerate(lines, 1):
        if not line.isascii():
            yield f"{name}:{number}: not ASCII"
        if LEFT_OVER.search(line) and Path(name).name != "check_sizes.py":
            yield f"{name}:{number}: left over: {line.strip()[:80]}"


def main():
    faults, sizes = [], []
    for name in tracked("."):
        if FORBIDDEN.search(name):
            faults.append(f"{name}: the name says nothing")
        if not name.endswith(SOURCES):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith((".h", ".cpp", ".cu", ".cuh", ".py")) and text:
            sizes.append(text.count("\n"))
        faults += faults_of(name, text)
    median = statistics.median(sizes) if sizes else 0
    if median > LIMIT_MEDIAN:
        faults.append(f"median size {median:.0f} lines, at most {LIMIT_MEDIAN}")
    print("\n".join(faults + [f"{len(sizes)} sources, median {median:.0f} lines, longest {max(sizes, default=0)}"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
