#!/usr/bin/env python3
"""The first minutes on a machine with a GPU: what works, how exact it is, how fast it is.

    python3 first_hour.py [--out RESULTS] [--only STAGE,STAGE] [--device cuda] [--minutes 8]

Needs a Python with torch 2.11 and a GPU driver; no network and no compiler. It runs from the folder that `make gpu-bundle` makes, and
from a source tree (`make gpu-check`). Every stage is a process of its own with a time limit of a minute at most; a stage that fails, hangs
or crashes costs only itself. After --minutes no further stage starts, and the one that runs ends. RESULTS gets one JSON file for each
stage at once, and RESULTS/first_hour.md, the page, whenever a stage is done. Exit code: 0; 6 if a stage failed; 8 if the GPU cannot be
used at all.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUNDLE = (HERE / "espalier/bin/espalier").is_file()
ROOT = HERE if BUNDLE else HERE.parent
PACKAGE = ROOT if BUNDLE else ROOT / "python"
PROGRAM = ROOT / ("espalier/bin/espalier" if BUNDLE else "build/espalier")
CASES = ROOT / ("cases" if BUNDLE else "build/gpu_cases")
EXAMPLES = ROOT / "examples"
LIMIT = 60  # seconds of a stage
MINUTES = 8  # of all stages
SANITIZED = ("add_attention_backward", "add_norm_backward")  # operations, each a stage; attention's runs the forward as well
TOOLKIT = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib")  # where a torch without packages of NVIDIA has its libraries
NOT_THERE = 8  # exit code of the program: no such device or backend


@dataclass
class Stage:
    """`command` prints a JSON object last where `json` says so. `needs`: a program that has to be on the path."""
    name: str
    about: str
    command: list
    json: bool = True
    needs: str = ""
    packages: tuple = ()
    gpus: int = 1
    environment: dict = field(default_factory=dict)
    skips_on: tuple = (NOT_THERE,)


def stages(device):
    """In the order in which they run: what the others stand on comes first."""
    program, on = str(PROGRAM), ("--device", device)
    emulated = device == "emulate"
    model, rollouts = ("--model", str(CASES / "model")), ("--rollouts", str(CASES / "rollouts.jsonl"))
    torch_device = "cpu" if emulated else "cuda"
    wide = ("--model", str(CASES / ("tiny.json" if emulated else "llama3_8b_4_layers.json")),
            "--splits", "24/8" if emulated else "10240/2048", "--n", "2" if emulated else "32")
    listed = [Stage("facts", "the machine, its driver and its packages", [sys.executable, __file__, "--facts"])]
    listed += [Stage(f"selftest-{kernels}", f"every operation against float64, then rates, attention {kernels}",
                     [program, "selftest", *on, "--attention", kernels, "--json"]) for kernels in ("own", "flash", "cudnn")]
    listed += [Stage(f"verify-{dtype}", f"a whole step, shared against dense, {dtype}",
                     [program, "verify", *on, "--dtype", dtype, *model, *rollouts, "--json"]) for dtype in ("float64", "float32", "bfloat16")]
    listed += [Stage(f"sanitizer-{operation.split('_')[1]}", f"accesses of the kernels of {operation} under compute-sanitizer",
                     ["compute-sanitizer", "--error-exitcode", "6", program, "selftest", *on, "--attention", "own", "--only", operation], json=False,
                     needs="compute-sanitizer") for operation in SANITIZED]
    listed += [
        Stage("hf", "espalier.hf: one step of a transformers model, verified", [sys.executable, __file__, "--hf", torch_device],
              packages=("transformers",)),
        Stage("trl", "espalier.trl: examples/trl_grpo.py", [sys.executable, str(EXAMPLES / "trl_grpo.py"), "--steps", "1"], json=False,
              packages=("trl", "datasets"), environment={"CUDA_VISIBLE_DEVICES": ""} if emulated else {}),
        Stage("llama", "layers of Llama-3-8B, 10k/2k, N = 32: dense against shared", [
            program, "bench", *on, "--dtype", "bfloat16", *wide, "--repetitions", "1", "--json"]),
        Stage("ncu", "three kernels of the attention under ncu",
              ["ncu", "--kernel-name", "regex:tiles", "--launch-count", "3", "--set", "basic", program, "selftest", *on,
               "--attention", "own", "--only", "add_attention_backward"], json=False, needs="ncu"),
        Stage("nccl", "two GPUs: dp 2 with NCCL against one process",
              [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", program, "train", *on, "--dp", "2", *model,
               *rollouts, "--out", "DIRECTORY/nccl", "--json"], gpus=2),
    ]
    return listed


def environment_of(stage):
    """torch's libraries and the bundle's own are found by name; nothing is written outside of RESULTS."""
    out = {**os.environ, **stage.environment, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folders = [str(PROGRAM.parent)] if BUNDLE else []
    spec = importlib.util.find_spec("torch")
    if BUNDLE and spec is not None:
        site = Path(spec.submodule_search_locations[0]).parent
        folders += [str(site / "torch/lib"), *map(str, sorted(site.glob("nvidia/*/lib")))]
    elsewhere = [folder for folder in TOOLKIT if Path(folder).is_dir()] if BUNDLE else []
    out["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [*folders, out.get("LD_LIBRARY_PATH"), *elsewhere]))
    out["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE), out.get("PYTHONPATH")]))
    out["ESPALIER_PYTHON"], out["ESPALIER_BINARY"] = sys.executable, str(PROGRAM)
    return out


def reason_to_skip(stage, device):
    if stage.needs and shutil.which(stage.needs) is None:
        return f"no {stage.needs} on this machine"
    missing = [name for name in stage.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"this Python has no {', '.join(missing)}"
    if stage.gpus > 1 and gpus() < stage.gpus:
        return f"{stage.gpus} GPUs needed, {gpus()} found"
    if stage.needs and device == "emulate":
        return "needs a GPU"
    return ""


def gpus():
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:  # a driver that hangs
        return 0
    return sum(line.startswith("GPU") for line in done.stdout.splitlines())


def run(stage, out, limit):
    """The result of a stage, as it is written: status passed, failed, skipped or timed out."""
    command = [str(word).replace("DIRECTORY", str(out)) for word in stage.command]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=environment_of(stage),
                               cwd=out, start_new_session=True)
    try:
        printed, errors = process.communicate(timeout=limit)
        status = "passed" if process.returncode == 0 else "skipped" if process.returncode in stage.skips_on else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, errors = process.communicate()
        status = "timed out"
    result = {"stage": stage.name, "about": stage.about, "status": status, "seconds": round(time.monotonic() - start, 2),
              "command": " ".join(command), "exit_code": process.returncode}
    if stage.json and printed.strip().startswith("{"):
        try:
            result["result"] = json.loads(printed)
        except json.JSONDecodeError:
            result["stdout"] = printed[-4000:]
    else:
        result["stdout"] = printed[-4000:]
    if status != "passed":
        result["stderr"] = errors[-4000:]
        result["reason"] = reason_of(status, errors, process.returncode, limit)
    return result


def reason_of(status, errors, code, limit):
    if status == "timed out":
        return f"not done after {limit:.0f} s"
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "  " * 2 not in line[:2]]
    told = [line for line in lines if re.match(r"espalier .*error|expected |\w*Error", line)]
    return " ".join(told[-2:] or lines[-1:])[:300] or f"exit code {code}"


# ---- stages in this Python ----

def not_found(text):
    """What the loader misses, of ldd's text: libraries, and versions of symbols that the machine's libraries are too old for."""
    lines = [line.strip() for line in text.splitlines() if "not found" in line]
    return sorted({re.sub(r"^.*: version `([^']+)' not found \(required by .*?([^/ ]+)\)$", r"\1 (for \2)", line).replace(" => not found", "")
                   for line in lines})


def missing_libraries():
    """{file of the bundle: what it misses}"""
    if shutil.which("ldd") is None:
        return {}
    files = [PROGRAM, *sorted(PROGRAM.parent.glob("libespalier_*.so"))]
    told = {path.name: subprocess.run(["ldd", str(path)], capture_output=True, text=True) for path in files}
    return {name: found for name, done in told.items() if (found := not_found(done.stdout + done.stderr))}


def facts():
    import torch

    from espalier.launch import TORCH
    told = {"python": sys.version.split()[0], "torch": torch.__version__, "torch_cuda": torch.version.cuda, "processors": os.cpu_count(),
            "kernel": platform.release(), "gpus": []}
    for name in ("transformers", "trl", "verl"):
        spec = importlib.util.find_spec(name)
        told[name] = importlib.import_module("importlib.metadata").version(name) if spec else None
    if shutil.which("nvidia-smi"):
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"],
                              capture_output=True, text=True)
        told["gpus"] = [line.strip() for line in done.stdout.splitlines()]
    told["tools"] = [name for name in ("nvcc", "compute-sanitizer", "ncu", "nsys") if shutil.which(name)]
    done = subprocess.run([str(PROGRAM), "--version"], capture_output=True, text=True)
    told["espalier"] = (done.stdout or done.stderr).strip()
    told["missing_libraries"] = missing_libraries()
    print(json.dumps(told))
    wrong = [f"{name} misses {', '.join(found)}" for name, found in told["missing_libraries"].items()]
    if not re.match(rf"{re.escape(TORCH)}(\D|$)", torch.__version__):
        wrong.insert(0, f"torch {TORCH} is needed, this Python has {torch.__version__}")
    if done.returncode != 0 and not wrong:
        wrong = [told["espalier"]]
    if wrong:
        print(f"expected what the program is linked to; {'; '.join(wrong)}", file=sys.stderr)
    return 6 if wrong else 0


def hf(device):
    """A step of a small Qwen3 with a prompt of 512 tokens and eight responses, compared with the dense step."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import espalier.hf
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                                         num_key_value_heads=2, head_dim=64)).to(device)
    draw = lambda count: torch.randint(0, 512, (count,)).tolist()
    prompt = draw(512)
    rollouts = [{"prompt_ids": prompt, "response_ids": draw(64)} for _ in range(8)]
    result = espalier.hf.phased_step(model, rollouts, lambda wave: -wave.logprobs.sum() / 512, schedule="shared", verify=True)
    print(json.dumps({"rows": result.rows, "rows_without_sharing": result.rows_without_sharing, "seconds": result.seconds,
                      "peak_bytes": result.peak_bytes}))
    return 0


# ---- the page ----

def line_of(result):
    """What the page says of a stage beside its status."""
    told = result.get("result") or {}
    if result["status"] != "passed":
        return result.get("reason", "")
    if "checks" in told:
        rates = {rate["operation"]: rate for rate in told.get("rates", [])}
        attention = rates.get("attention", {}).get("flops_per_second")
        return f"{len(told['checks'])} checks" + (f"; attention {attention / 1e12:.1f} TFLOP/s forward" if attention else "")
    if "verdict" in told:
        worst = told.get("worst", {})
        return f"{told['verdict']}; worst {worst.get('parameter')}: {worst.get('ratio', 0):.2f} of the floor"
    if "cells" in told:
        return "; ".join(f"{cell['prefix']}/{cell['suffix']} N={cell['n']}: dense {cell['seconds']['dense']:.3f} s, phased {cell['seconds']['phased']:.3f} s, "
                         f"speed-up {cell['speedup']:.2f} of {cell['ceiling']:.2f}" for cell in told["cells"])
    if "gpus" in told:
        return "; ".join([*told["gpus"], f"torch {told['torch']}", told["espalier"]])
    if "rows_without_sharing" in told:
        return f"{told['rows']} rows instead of {told['rows_without_sharing']}, {told['seconds']:.3f} s"
    return ""


def page(results, seconds):
    lines = ["# First contact with a GPU", "", f"{sum(r['status'] == 'passed' for r in results)} of {len(results)} stages passed in {seconds:.0f} s.", "",
             "| stage | status | s | result |", "| --- | --- | ---: | --- |"]
    lines += [f"| {r['stage']}: {r['about']} | {r['status']} | {r['seconds']:.0f} | {line_of(r).replace('|', '/')} |" for r in results]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_hour"), help="folder for the results")
    parser.add_argument("--only", default="", help="stages to run, separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulate"), help="emulate: a rehearsal on a CPU")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a stage")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all stages")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hf", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.facts:
        return facts()
    if arguments.hf:
        return hf(arguments.hf)
    listed = stages(arguments.device)
    wanted = set(filter(None, arguments.only.split(",")))
    unknown = wanted - {stage.name for stage in listed}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in listed)}")
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no torch: run first_hour.py with the Python that has torch 2.11", file=sys.stderr)
        return NOT_THERE
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start, results, fastest = time.monotonic(), [], 0.0
    for number, stage in enumerate(stage for stage in listed if not wanted or stage.name in wanted):
        left = 60 * arguments.minutes - (time.monotonic() - start)
        reason = reason_to_skip(stage, arguments.device)
        if not reason and left < 1:
            reason = f"{arguments.minutes:g} minutes are over: --only {stage.name} runs it"
        result = ({"stage": stage.name, "about": stage.about, "status": "skipped", "seconds": 0.0, "reason": reason} if reason
                  else run(stage, out, min(arguments.limit, left)))
        results.append(result)
        (out / f"{number:02d}-{stage.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{stage.name:22} {result['status']:9} {result['seconds']:6.1f} s  {line_of(result)}", flush=True)
        profile = (result.get("result") or {}).get("profile")
        if profile and profile["attention_flops_per_second"] > fastest:  # of the kernels that --attention auto takes
            fastest = profile["attention_flops_per_second"]
            (out / "machine.json").write_text(json.dumps(profile, indent=1) + "\n")
        (out / "first_hour.md").write_text(page(results, time.monotonic() - start))
    print(f"the page: {out / 'first_hour.md'}")
    if any(result["stage"] == "selftest-own" and result.get("exit_code") == NOT_THERE for result in results):
        return NOT_THERE
    return 6 if any(result["status"] in ("failed", "timed out") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
