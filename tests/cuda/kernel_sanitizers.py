"""The kernels under the address and undefined-behaviour sanitizers, compiled against an emulation that is under them, too:
cuda_operations_test with both before its own.

    tests/cuda/kernel_sanitizers.py [--build build] [--filter Attention*]

Exit status: the test's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_coverage import FLAGS, HERE, KERNEL_FOLDER, ROOT

SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--filter", default="-TheCpuItself.*")
    arguments = parser.parse_args()
    test = (ROOT / arguments.build / "tests/cuda/cuda_operations_test").resolve()
    sources = [*sorted(KERNEL_FOLDER.glob("*.cu")), HERE / "emulation.cpp"]
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            subprocess.run(["g++", *FLAGS, *SANITIZE, "-x", "c++", "-c", str(source), "-o", f"{source.stem}.o"], cwd=folder, check=True)
        subprocess.run(["g++", "-shared", *SANITIZE, *(f"{source.stem}.o" for source in sources), "-o", "kernels.so"], cwd=folder, check=True)
        libraries = [subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
                     for name in ("libasan.so", "libubsan.so")]
        environment = {**os.environ, "LD_PRELOAD": " ".join([*libraries, f"{folder}/kernels.so"]), "OMP_NUM_THREADS": "1",
                       "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0"}
        return subprocess.run([test, "--gtest_brief=1", f"--gtest_filter={arguments.filter}"], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
