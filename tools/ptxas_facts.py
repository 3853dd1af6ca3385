"""Facts of the compiled kernels, against the table in the repository (espalier/ops/cuda/ptxas.txt):

    compiler        the nvcc that compiled them
    source          each .cu file with a digest of its code and of the headers of this folder that it includes, without comments
    registers       for each kernel and architecture its instances, and the most registers, bytes of static shared
                    memory, stack and spills of any of them, by ptxas
    loop            for each kernel with matrix instructions what a tile costs a warp, by nvdisasm (tools/sass_loops.py)

Kernels of hopper/ are compiled for sm_90a alone, and multiply by warpgroups (HGMMA).

    tools/ptxas_facts.py [--build build]            compares; make check runs it. Exit 1 where they differ
    tools/ptxas_facts.py [--build build] --write    writes the table, after `make cuda`

Where there is an nvcc, a table of other sources is an error. Numbers are compared where the kernels were built, with the
nvcc of the table; what is not compared is said.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sass_loops import main_loops, products

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "espalier/ops/cuda"
TABLE = SOURCES / "ptxas.txt"
HEAD = (
    "# Written by tools/ptxas_facts.py --write.\n"
    "# registers: kernel, architecture: instances, most registers, bytes of static shared memory, of stack, of spills\n"
    "# loop: kernel, architecture: matrix instructions (HMMA; sm_90a: HGMMA) and all instructions of a tile, their ratio, LDSM, LDS, LDG, LDGSTS, LDL + STL\n"
)
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
KERNEL = re.compile(r"\b(\w+_kernel)\b(<[^(]*>)?")
INCLUDED = re.compile(r'^#include "(.*)"', re.M)


def nvcc():
    path = shutil.which("nvcc")
    return path or ("/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None)


def nvdisasm():
    packages = Path(sys.executable).parent.parent.glob("lib/python3*/site-packages/nvidia/cu13/bin/nvdisasm")
    own = ROOT / "build/python/nvidia/cu13/bin/nvdisasm"
    return shutil.which("nvdisasm") or next((str(path) for path in [own, *packages] if path.exists()), None)


def demangled(names):
    """Enumerators among the template arguments as their numbers."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    text = re.sub(r"\([\w:]+\)(?=\d)", "", done.stdout.replace("(anonymous namespace)::", ""))
    return dict(zip(names, text.splitlines()))


def kernel_sources():
    return sorted([*SOURCES.glob("*.cu"), *SOURCES.glob("hopper/*.cu")])


def log_of(kernel, folder):
    """Of nvcc's run for a kernel's source."""
    return folder / (kernel.relative_to(SOURCES).with_suffix("").as_posix().replace("/", "_") + ".ptxas")


def digest_of(source):
    """Of the code of a file and of what it includes from SOURCES, without comments and blanks."""
    seen, waiting, digest = set(), [source], hashlib.sha256()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        digest.update("".join(re.sub(r"//[^\n]*", "", text).split()).encode())
        waiting.extend(path for name in sorted(INCLUDED.findall(text)) if SOURCES in (path := ROOT / name).parents)
    return digest.hexdigest()[:12]


def lines_of_sources():
    return [f"source {path.relative_to(SOURCES).as_posix()}: {digest_of(path)}" for path in kernel_sources()]


def lines_of_registers(logs):
    found = []
    for log in logs:
        entry = None
        for line in log.read_text(encoding="utf-8").splitlines():
            if match := ENTRY.search(line):
                entry = [*match.groups(), 0, 0, 0, 0]
                found.append(entry)
            elif entry and (match := FRAME.search(line)):
                entry[4:] = [max(entry[4], int(match[1])), max(entry[5], int(match[2]) + int(match[3]))]
            elif entry and (match := USED.search(line)):
                entry[2:4] = [max(entry[2], int(match[1])), max(entry[3], int(match[2] or 0))]
    names = demangled(sorted({name for name, *_ in found}))
    facts = {}
    for name, architecture, *numbers in found:
        kernel = KERNEL.search(names[name])
        row = facts.setdefault((kernel[1] if kernel else names[name], architecture), [0, 0, 0, 0, 0])
        row[:] = [row[0] + 1, *map(max, row[1:], numbers)]
    return [f"registers {kernel}, {architecture}: {', '.join(map(str, row))}" for (kernel, architecture), row in sorted(facts.items())]


def lines_of_loops(cubins, tool):
    lines = []
    for cubin in cubins:
        text = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
        architecture = re.search(r"\.target\s+(sm_\d+a?)", text)[1]
        loops = main_loops(text)
        names = demangled(list(loops))
        for name, counts in loops.items():
            kernel = "".join(KERNEL.search(names[name]).groups(default="")).replace(" ", "")
            most, all_of_them = products(counts), sum(counts.values())
            local = counts["LDL"] + counts["STL"]
            loads = [counts[each] for each in ("LDSM", "LDS", "LDG", "LDGSTS")] + [local]
            lines.append(f"loop {kernel}, {architecture}: {most}, {all_of_them}, {all_of_them / most:.1f}, {', '.join(map(str, loads))}")
    return sorted(lines)


def is_of_these_sources(log):
    """Whether nvcc wrote it after the last change of the kernel and of what it includes from SOURCES."""
    listed = log.with_suffix(".d")
    if not log.exists() or not listed.exists():
        return False
    sources = [path for name in listed.read_text(encoding="utf-8").split() if SOURCES in (path := Path(name)).parents and path.exists()]
    return bool(sources) and log.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def differences(had, has, kind):
    """The lines of a kind that only one of two tables has, as text."""
    old, new = ({line for line in lines if line.startswith(kind + " ")} for lines in (had, has))
    return [("only in the table: " if line in old else "only here: ") + line for line in sorted(old ^ new)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    compiler, tool = nvcc(), nvdisasm()
    folder = ROOT / arguments.build / "library/ops/cuda"
    logs = [log_of(kernel, folder) for kernel in kernel_sources()]
    built = all(is_of_these_sources(log) for log in logs)
    had = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    has = lines_of_sources()
    if compiler:
        has.append("compiler " + re.search(r"V([\d.]+)", subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout)[1])
    if arguments.write and not (compiler and tool and built):
        print("the table needs nvcc, nvdisasm (tools/requirements-cuda-build.txt) and kernels built since they changed (make cuda)")
        return 1
    if built and tool:
        has += lines_of_registers(logs) + lines_of_loops(sorted((folder / "kept").glob("*.cubin")), tool)
    if arguments.write:
        TABLE.write_text(HEAD + "\n".join(sorted(has)) + "\n", encoding="utf-8")
        return 0
    if not compiler:
        print("no nvcc: nothing compared")
        return 0
    faults = differences(had, has, "source")
    if faults:
        print("the table is of other kernels: make cuda, then tools/ptxas_facts.py --write")
    elif differences(had, has, "compiler"):
        print("the table is of another nvcc: registers and loops are not compared")
    elif not built or not tool:
        what = "the kernels were not built since they changed (make cuda)" if tool else "no nvdisasm (tools/setup.sh)"
        print(f"{what}: registers and loops are not compared")
    else:
        faults = differences(had, has, "registers") + differences(had, has, "loop")
    print("".join(line + "\n" for line in faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
