"""Changes of the kernels' sources, one at a time, each of which some test has to notice.

    tests/cuda/mutate_kernels.py --build build                          those of mutation_sample.txt, as in `make test`
    tests/cuda/mutate_kernels.py --build build --count 20 [--seed 1]    as many, drawn at random
    tests/cuda/mutate_kernels.py --build build --all [--file head.cu]   all of them; a survivor is printed as it is found

A change is an operator for its opposite, a whole number for the next, a barrier or a jump left out. Its file is compiled
against the emulation and put before the test's own kernels (LD_PRELOAD); noticed is what fails, ends or hangs the test.
Changes that do not compile are not counted; changes that leave every result as it is stand in harmless_mutations.txt,
with the reason. Exit 1 where one survives.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "espalier/ops/cuda"
TESTS_OF = {
    "attention_plain.cu": "Attention/*", "attention_tiles.cu": "Attention/*:TiledAttention.*", "choice.cu": "Optimizer/*",
    "columns.cu": "Rows/*:Products/*", "expert_rows.cu": "Experts/*", "head.cu": "Head/*", "moving.cu": "Moving/*",
    "norm.cu": "Rows/*", "optimizer.cu": "Optimizer/*", "rotate.cu": "Rows/*", "router.cu": "Experts/*", "swiglu.cu": "Rows/*",
}
OPPOSITES = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || ",
             " || ": " && ", " + ": " - ", " - ": " + ", " * ": " / ", " / ": " * ", " % ": " / ", " += ": " -= "}
LEFT_OUT = re.compile(r"\b(__syncthreads\(\);|__syncwarp\(\);|continue;|cp_async_wait<\d>\(\);|cp_async_commit\(\);)")
NUMBER = re.compile(r"(?<![\w.<])(\d+)(?![\w.>])")
NO_CODE = re.compile(r"^\s*(//|#|template|static_assert|ESPALIER_INSTANTIATE|__global__|namespace|using )")


def code_of(line):
    return "" if NO_CODE.match(line) else line.split("//")[0]


def mutations_of(source):
    """(line number from 0, begin, end, what stands there instead)"""
    for number, line in enumerate(source.splitlines()):
        code = code_of(line)
        for old, new in OPPOSITES.items():
            for found in re.finditer(re.escape(old), code):
                yield number, found.start(), found.end(), new
        for found in LEFT_OUT.finditer(code):
            yield number, found.start(), found.end(), ";"
        for found in NUMBER.finditer(code):
            yield number, found.start(), found.end(), str(int(found[1]) + 1)


def mutated(source, mutation):
    number, begin, end, instead = mutation
    lines = source.splitlines(keepends=True)
    lines[number] = lines[number][:begin] + instead + lines[number][end:]
    return "".join(lines), lines[number].strip()


def listed_in(name):
    """{(file, changed line)}"""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return {tuple(line.split(": ", 1)) for line in lines if line and not line.startswith(("#", "    "))}


def outcome(file, text, test, folder):
    """"invalid", "noticed" or "survived"."""
    source, library = Path(folder) / file, Path(folder) / "mutant.so"
    source.write_text(text, encoding="utf-8")
    compiled = subprocess.run(
        ["g++", "-std=c++20", "-x", "c++", "-shared", "-fPIC", "-O1", "-ffp-contract=off", "-w", "-DESPALIER_EMULATED", f"-I{ROOT}",
         "-include", str(HERE / "emulation.h"), str(source), "-o", str(library)], capture_output=True, check=False)
    if compiled.returncode != 0:
        return "invalid"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GTEST_")}
    environment = {**kept, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run([test, f"--gtest_filter={TESTS_OF[file]}", "--gtest_fail_fast"], env=environment,
                              capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "noticed"
    return "survived" if done.returncode == 0 else "noticed"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--file", help="of the kernels, alone")
    parser.add_argument("--count", type=int, help="of changes that compile and are not harmless")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    build = (ROOT / arguments.build).resolve()
    test = build / "tests/cuda/cuda_operations_test"
    sources = {file: (KERNELS / file).read_text(encoding="utf-8") for file in TESTS_OF if arguments.file in (None, file)}
    everything = [(file, mutation) for file, source in sources.items() for mutation in mutations_of(source)]
    known, sample = listed_in("harmless_mutations.txt"), listed_in("mutation_sample.txt")
    counts, begun = {"noticed": 0, "survived": 0, "invalid": 0, "harmless": 0}, time.monotonic()
    chosen = everything
    if arguments.count:
        random.Random(arguments.seed).shuffle(chosen)
    elif not arguments.all:
        chosen = [(file, mutation) for file, mutation in everything if (file, mutated(sources[file], mutation)[1]) in sample]
        if len(chosen) != len(sample):
            print(f"mutation_sample.txt has {len(sample)} changes, {len(chosen)} of them fit the kernels: the list has to follow them")
            return 1
    with tempfile.TemporaryDirectory() as folder:
        for file, mutation in chosen:
            if counts["noticed"] + counts["survived"] == arguments.count:
                break
            text, line = mutated(sources[file], mutation)
            if (file, line) in known:
                counts["harmless"] += 1
                continue
            found = outcome(file, text, test, folder)
            counts[found] += 1
            if found == "survived":
                print(f"survived: {file}:{mutation[0] + 1}: {line}", flush=True)
    print(f"{len(everything)} changes of the kernels; tried: " + ", ".join(f"{n} {what}" for what, n in counts.items()) +
          f"; {time.monotonic() - begun:.0f} s")
    if counts["noticed"] == 0:
        print("nothing was noticed: is the test built?")
    return 1 if counts["survived"] or not counts["noticed"] else 0


if __name__ == "__main__":
    sys.exit(main())
