"""Folders of espalier/ are stages of the data flow: a file may include only its own stage and those before it. The files of a kind of mixers
(mixers/<kind>/) belong to stages by their role: shape, work, layer. So do declarations of buffers (*_buffers), whatever their folder: they know
no tensors, and the forecast reads them. The engine is the first part of the order; what stands beside it comes after.

Also: the folders of TORCH_FREE name neither ATen nor torch, nobody includes torch/torch.h or ATen/ATen.h, and what stands above the operations
(espalier/ops/operations.h) touches no tensor's memory and no kernel: it calls operations and the device's copies. ops/cpu and ops/cuda
do not know each other. espalier/CMakeLists.txt lists every source
file. Exit 1 with one line per fault.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Parts of a training step, a sample and the closed loop.
ENGINE = (
    "base options machine metrics device parallel rollout services grouping shape mixers.shape config program work forecast plan ops model mixers.layer saved objective "
    "gradient execute optimizer checkpoint measure state step data score train generate loop"
).split()
# Parts that the program and the Python package add. The engine includes none of them.
BESIDE_ENGINE = "settings merge selftest prove doctor replay report tasks serve hosting binding".split()
ORDER = ENGINE + BESIDE_ENGINE
ARCHITECTURES = ("x86_64", "aarch64")
# These are pure functions of tokens, shapes and options: no tensor may enter.
TORCH_FREE = {"base", "options", "settings", "rollout", "services", "grouping", "shape", "mixers.shape", "config", "program", "work", "forecast", "plan", "serve"}
# What calls operations: a pointer, a number type, a thread or an ATen kernel here would be the CPU's alone.
# binding hands memory of a caller on the host to the kernels; serve reads messages, and knows no tensors.
ABOVE_OPERATIONS = set(ORDER[ORDER.index("ops") + 1:]) - {"settings", "checkpoint", "report", "serve", "binding"}
BELOW = re.compile(r"\b(data_ptr|pointer<|dispatch\(|memcpy|memmove|memset|omp\.h|omp_get\w+|espalier/ops/cpu/[\w/.]+)|#pragma omp")
# Of those, what runs in a step: its tensors are a device's throughout.
IN_A_STEP = {"model", "mixers.layer", "objective", "gradient", "execute", "optimizer", "generate"}
KERNEL = re.compile(r"(\.(?:zero_|copy_|fill_|add_|mul_|sub_|clone|item)\b|\bat::(?:mm|addmm|cat|concat|add|mul|empty|zeros|ones)\w*\()")
# The precompiled headers have single ones of ATen's (cmake/EspalierTargets.cmake).
TOO_LARGE = {"torch/torch.h": "40 seconds", "torch/extension.h": "40 seconds", "ATen/ATen.h": "some seconds"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def tracked(*patterns):
    """Files of the tree as git sees them, new ones included; without git, all but what a build leaves."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [name for name in done.stdout.split("\n") if name and (ROOT / name).is_file()]
    names = []
    for path in (p for pattern in patterns for p in ([ROOT / pattern] + list((ROOT / pattern).rglob("*")))):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and not re.match(r"(build|dist|\.venv|\.git|.*__pycache__)", name):
            names.append(name)
    return sorted(set(names))


def faults_above_operations(name, folder, text):
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0]
        found = BELOW.search(code) or folder in IN_A_STEP and KERNEL.search(code)
        if found:
            yield f"{name}:{number}: espalier/{folder} calls operations (espalier/ops/), found {found.group(0)}"


def stage_of(name):
    """The stage of a file of espalier/, which may be none of the order; None outside of it."""
    parts = Path(name).parts
    if parts[0] != "espalier" or len(parts) < 3:
        return None
    stem = Path(name).stem
    if parts[1] == "mixers" and name != "espalier/mixers/kinds.def":
        return {"shape": "mixers.shape", "work": "work"}.get(stem.split("_")[-1], "mixers.layer")
    if name == "espalier/mixers/kinds.def":
        return "shape"
    return "work" if stem.endswith("_buffers") and parts[1] != "device" else parts[1]


def faults_of(name):
    parts = Path(name).parts
    folder = stage_of(name)
    if folder is not None and folder not in ORDER:
        yield f"{name}: folder espalier/{folder} has no place in the order of tools/check_includes.py"
        return
    text = (ROOT / name).read_text(encoding="utf-8")
    if folder in ABOVE_OPERATIONS:
        yield from faults_above_operations(name, folder, text)
    for match in INCLUDE.finditer(text):
        where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        included = match.group(2)
        if included in TOO_LARGE and parts[0] != "python":
            yield f"{where}: {included} takes {TOO_LARGE[included]} to compile; include single ATen headers, as ATen/core/Tensor.h and ATen/ops/zeros.h"
        if folder in TORCH_FREE and included.split("/")[0] in ("ATen", "c10", "torch"):
            yield f"{where}: espalier/{folder} is free of torch, found <{included}>"
        target = Path(included).parts
        if match.group(1) == '"' and target[0] == "cli" and parts[0] != "cli" and parts[:3] != ("tests", "hostile", "cli"):
            yield f"{where}: only cli/ and its tests may include {included}"
        if folder is None or target[0] != "espalier" or len(target) < 3:
            continue
        if {parts[:3], target[:3]} == {("espalier", "ops", "cpu"), ("espalier", "ops", "cuda")}:
            yield f"{where}: devices do not know each other; what both need stands in espalier/ops"
        stage = stage_of(included)
        if stage not in ORDER or ORDER.index(stage) > ORDER.index(folder):
            beside = "is no part of the engine" if folder in ENGINE and stage in BESIDE_ENGINE else "stands later in the order"
            yield f"{where}: espalier/{folder} may not include {included} (it {beside})"
        if not (ROOT / included).is_file():
            yield f"{where}: {included} does not exist"


def list_faults(text, names):
    """The one list of the library's files is complete; libespalier_cuda.so has its own. A file of an architecture has a twin for each."""
    lines = [line.split("#")[0] for line in text.splitlines()]
    text = "\n".join(dict.fromkeys(line.replace("${ESPALIER_ARCHITECTURE}", of) for line in lines for of in ARCHITECTURES))
    listed = re.findall(r"(?<![*\w/])[\w/]+\.cpp", text)
    wanted = {n.removeprefix("espalier/") for n in names if re.match(r"espalier/(?!ops/cuda/|mixers/).*\.cpp$", n)}
    yield from (f"espalier/{name}: not in espalier/CMakeLists.txt" for name in sorted(wanted - set(listed)))
    yield from (f"espalier/CMakeLists.txt: names {name}, which does not exist" for name in sorted(set(listed) - wanted))


def main():
    names = [n for n in tracked("espalier", "cli", "tests", "python", "bench") if n.endswith((".h", ".cpp", ".cu", ".cuh"))]
    faults = [fault for name in names for fault in faults_of(name)]
    faults += list_faults((ROOT / "espalier/CMakeLists.txt").read_text(encoding="utf-8"), names)
    print("\n".join(faults + [f"{len(names)} files, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
