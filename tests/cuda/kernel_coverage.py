"""Lines of the kernels that no test of cuda_operations_test comes to: gcov over the kernels compiled against the emulation.

    tests/cuda/kernel_coverage.py [--build build]

Prints them with a sum for each file. Exit 1 where there are any.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNEL_FOLDER = ROOT / "espalier/ops/cuda"
FLAGS = ["-std=c++20", "-fPIC", "-O1", "-fno-inline", "-ffp-contract=off", "-w", "-DESPALIER_EMULATED", f"-I{ROOT}", "-include", str(HERE / "emulation.h")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    test = (ROOT / parser.parse_args().build / "tests/cuda/cuda_operations_test").resolve()
    kernels = sorted(KERNEL_FOLDER.glob("*.cu"))
    reached, lines = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for kernel in kernels:
            subprocess.run(["g++", *FLAGS, "--coverage", "-x", "c++", "-c", str(kernel), "-o", f"{kernel.stem}.o"], cwd=folder, check=True)
        objects = [f"{kernel.stem}.o" for kernel in kernels]
        subprocess.run(["g++", "-shared", "--coverage", *objects, "-o", "kernels.so"], cwd=folder, check=True)
        environment = {**os.environ, "LD_PRELOAD": f"{folder}/kernels.so", "OMP_NUM_THREADS": "1"}
        subprocess.run([test, "--gtest_brief=1", "--gtest_filter=-TheCpuItself.*"], env=environment, cwd=folder, check=True)
        for kernel in kernels:
            told = subprocess.run(["gcov", "--json-format", "--stdout", f"{kernel.stem}.gcda"], cwd=folder, capture_output=True, text=True, check=True)
            for file in json.loads(told.stdout.splitlines()[0])["files"]:
                name = Path(file["file"]).name
                if name == kernel.name or (KERNEL_FOLDER / name).exists() and name.endswith(".h"):
                    for line in file["lines"]:
                        key = (name, line["line_number"])
                        lines[key] = True
                        reached[key] = reached.get(key, 0) + line["count"]
    missing = 0
    for name in sorted({file for file, _ in lines}):
        of_file = [number for file, number in sorted(lines) if file == name]
        never = [number for number in of_file if reached[name, number] == 0]
        missing += len(never)
        text = (KERNEL_FOLDER / name).read_text(encoding="utf-8").splitlines()
        print(f"{name}: {len(of_file) - len(never)} of {len(of_file)} lines reached")
        for number in never:
            print(f"  {number}: {text[number - 1].strip()}")
    return 1 if missing else 0




if __name__ == "__main__":
    sys.exit(main())
