#!/usr/bin/env python3
"""The first minutes on a machine with a GPU: what works, how exact it is, how fast it is.

    python3 first_hour.py [--out RESULTS] [--only STAGE,STAGE] [--run 240|600] [--device cuda] [--minutes 10]

Needs a Python with the torch minor version of the build and a GPU driver; no network and no compiler. It runs from the folder that `make gpu-bundle` makes, and
from a source tree (`make gpu-check`). Every stage is a process of its own with a time limit; a stage that fails, hangs or crashes costs only
itself. A stage that ends too early has told what it had done until then. After --minutes no further stage starts, and the one that runs ends.
--run: stages that fit into so many seconds, in an order of their own and each with seconds of its own (RUNS). RESULTS gets one JSON file for each stage at once, RESULTS/first_hour.md, the page, whenever a stage is done, and RESULTS/clocks.csv,
the GPU's clocks and power. Exit code: 0; 6 if a stage failed; 8 if the GPU cannot be used at all.
"""

import argparse
import importlib.metadata
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
CHECKS = ROOT / ("checks" if BUNDLE else "tests/python")
LIMIT = 60  # seconds of a stage
MINUTES = 10  # of all stages
GRACE = 4  # of these for a stage that is stopped: the program tells what it has done within three
PRINTED = 4000  # characters of a stage's output that are kept
WIDE = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, vocab_size=32768,
            max_position_embeddings=131072)  # layers of Llama-3-8B
TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
            max_position_embeddings=512)
SANITIZED = ("add_attention_backward", "add_norm_backward")  # operations, each a stage; attention's runs the forward as well
TOOLKIT = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib",
           "/usr/local/cuda/targets/sbsa-linux/lib")  # where a torch without packages of NVIDIA has its libraries
LIBRARIES = ("flash", "cudnn")  # they can sum gradients in any order
KERNELS = ("own", *LIBRARIES, "hopper", "hopper-split")
# What one call of a machine that is lent for minutes runs: the attention of Hopper beside others' in the same minute, then whole models. A stage
# has its seconds whatever those before it took; what they left over, it has as well.
RUNS = {"240": {"facts": 20, "selftest-hopper": 35, "attention-hopper-split": 15, "fa3": 30, "llama-hopper": 35, "stock": 30, "verify-hopper": 8,
                "llama-cudnn-any-order": 30, "attention-cudnn": 27},
        "600": {"facts": 20, "qwen3-8b": 280, "kimi": 20, "selftest-own": 30, "fla": 40, "llama-hopper-split": 35, "llama-cudnn": 35,
                "verify-hopper-split": 10, "families": 120}}
RESERVED = 10  # seconds of a run that are nobody's: a machine that ends a command at its limit has to be left before that
CARRIED = HERE / "carried"  # packages and wheels that the machine lacks (gpu_bundle.sh --carry)
PEAKS = {"H100": 989e12, "H200": 989e12}  # FLOP/s of products in bfloat16, by a word of the GPU's name
CLOCKS = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu"
NCU = [word for section in ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats", "SchedulerStats", "InstructionStats", "ComputeWorkloadAnalysis",
                            "MemoryWorkloadAnalysis") for word in ("--section", section)]
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
    files: tuple = ()  # patterns of what has to be carried
    gpus: int = 1
    environment: dict = field(default_factory=dict)
    skips_on: tuple = (NOT_THERE,)
    limit: float = LIMIT
    printed: int = PRINTED


def stages(device):
    """In the order in which they run: what the others stand on comes first."""
    program, on = str(PROGRAM), ("--device", device)
    emulated = device == "emulate"
    model, rollouts = ("--model", str(CASES / "model")), ("--rollouts", str(CASES / "rollouts.jsonl"))
    torch_device = "cpu" if emulated else "cuda"
    shape, splits, n = ("tiny.json", "24/8", 2) if emulated else ("llama3_8b_4_layers.json", "10240/2048", 32)
    yardsticks = [sys.executable, str(HERE / "gpu_yardsticks.py")]
    wide = ("--model", str(CASES / shape))
    this = [sys.executable, __file__]
    models = [sys.executable, str(CHECKS / "device_models.py")]
    small_megatron = "--layers 2 --hidden 64 --prompt 64 --response 8 --n 4 --repetitions 1".split() if emulated else ()
    listed = [Stage("facts", "the machine, its driver and its packages", [*this, "--facts"])]
    listed += [Stage(f"selftest-{kernels}", f"every operation against float64, then rates, attention {kernels}",
                     [program, "selftest", *on, "--attention", kernels, "--json"]) for kernels in KERNELS]
    listed += [Stage(f"attention-{kernels}", f"attention against float64, then rates of six shapes, attention {kernels}",
                     [program, "selftest", *on, "--attention", kernels, "--only", "attention", "--json"]) for kernels in ("cudnn", "hopper-split")]
    listed += [
        Stage("fa3", "rates of FlashAttention 3 (flash-attn3-jax)", [*yardsticks, "fa3", fa3_wheel() or "no wheel", *(["--lower"] if emulated else [])],
              packages=("jax", "einops"), files=("flash_attn3_jax-*.whl",)),
        Stage("fla", "rates of the gated delta rule by flash-linear-attention", [*yardsticks, "fla", "--device", torch_device], packages=("fla", "triton", "einops")),
        Stage("stock", f"layers of Llama-3-8B, {splits}, N = {n}, by transformers alone: dense", [*yardsticks, "stock", "--device", torch_device],
              packages=("transformers",))]
    listed += [Stage(f"verify-{dtype}", f"a whole step, shared against dense, {dtype}",
                     [program, "verify", *on, "--dtype", dtype, *model, *rollouts, "--json"]) for dtype in ("float64", "float32", "bfloat16")]
    any_order = ("--deterministic", "off", "--dtype", "bfloat16")
    listed += [Stage(f"verify-{kernels}-any-order", f"a whole step, shared against dense, attention {kernels}, gradients summed in any order",
                     [program, "verify", *on, "--attention", kernels, *any_order, *model, *rollouts, "--json"]) for kernels in LIBRARIES]
    listed += [Stage(f"verify-{kernels}", f"a whole step, shared against dense, attention {kernels}",
                     [program, "verify", *on, "--attention", kernels, "--dtype", "bfloat16", *model, *rollouts, "--json"])
               for kernels in ("hopper", "hopper-split")]
    listed += [Stage(f"sanitizer-{operation.split('_')[1]}", f"accesses of the kernels of {operation} under compute-sanitizer",
                     ["compute-sanitizer", "--error-exitcode", "6", program, "selftest", *on, "--attention", "own", "--only", operation], json=False,
                     needs="compute-sanitizer") for operation in SANITIZED]
    listed += [
        Stage("families", "every family: gradients against the CPU's in float64, verify in float32 and bfloat16",
              [*models, "program", program, *on], packages=("transformers",), limit=120),
        Stage("kimi", "Kimi Linear alone: decays of channels", [*models, "program", program, *on, "--only", "kimi_linear_moe"],
              packages=("transformers",)),
        Stage("verbs", "training, sampling and scoring", [*this, "--verbs", device]),
        Stage("hf", "espalier.hf: one step of a transformers model, verified", [*this, "--hf", torch_device], packages=("transformers",)),
        Stage("megatron", "espalier.megatron: layers of Llama-3-8B in Megatron-Core with Transformer Engine: verified, then dense against shared",
              [sys.executable, str(CHECKS / "device_megatron.py"), "--device", torch_device, *small_megatron],
              packages=("megatron", *(() if emulated else ("transformer_engine",))), limit=120),
        Stage("trl", "espalier.trl: examples/trl_grpo.py", [sys.executable, str(EXAMPLES / "trl_grpo.py"), "--steps", "1"], json=False,
              packages=("trl", "datasets"), environment={"CUDA_VISIBLE_DEVICES": ""} if emulated else {}),
        Stage("hf-llama", f"espalier.hf: layers of Llama-3-8B, {splits}, N = {n}: dense against shared", [*this, "--hf-wide", torch_device],
              packages=("transformers",), limit=90)]
    timed = ("--schedule", "phased", "--n", str(n), "--json")  # dense against shared, without the other schedules
    wide_bench = (program, "bench", *on, *wide, "--splits", splits, "--repetitions", "1" if emulated else "2", *timed)
    listed += [Stage(f"llama-{kernels}", f"layers of Llama-3-8B, {splits}, N = {n}: dense against shared, attention {kernels}",
                     [*wide_bench, "--attention", kernels, "--dtype", "bfloat16"], limit=90) for kernels in KERNELS]
    listed += [Stage(f"llama-{kernels}-any-order", f"the same with attention {kernels}, gradients summed in any order",
                     [*wide_bench, "--attention", kernels, *any_order], limit=90) for kernels in LIBRARIES]
    whole = "tiny.json" if emulated else "qwen3_8b.json"
    listed.append(Stage("qwen3-8b", f"the gradient of a whole Qwen3-8B, {'24/8' if emulated else '8192/2048'}, N = {n}: dense against shared",
                        [program, "bench", *on, "--model", str(CASES / whole), "--splits", "24/8" if emulated else "8192/2048",
                         "--repetitions", "1", *timed, "--dtype", "bfloat16"], limit=420))
    listed += [
        Stage("ncu", "kernels of the attention under ncu",
              ["ncu", "--kernel-name", "regex:tiles_kernel", "--launch-count", "3", *NCU, program, "bench", *on, "--attention", "own", "--dtype",
               "bfloat16", "--model", str(CASES / ("tiny.json" if emulated else "llama3_8b_1_layer.json")), "--splits", "24/8" if emulated else "8192/1024",
               "--n", "2", "--repetitions", "1"], json=False, needs="ncu", printed=20000),
        Stage("models", "models of transformers that espalier.hf calls exact, against dense calls in float64, verified in bfloat16",
              [*models, "transformers", "--device", torch_device, "--seconds", "200"], packages=("transformers",), limit=240),
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
    carried = str(CARRIED) if any((CARRIED / name).is_dir() for name in stage.packages) else None  # other stages do without
    out["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE), carried, out.get("PYTHONPATH")]))
    out["ESPALIER_PYTHON"], out["ESPALIER_BINARY"] = sys.executable, str(PROGRAM)
    return out


def reason_to_skip(stage, device):
    if stage.needs and shutil.which(stage.needs) is None:
        return f"no {stage.needs} on this machine"
    lacks = [pattern for pattern in stage.files if not list(CARRIED.glob(pattern))]
    if lacks:
        return f"{', '.join(lacks)} was not carried (gpu_bundle.sh --carry)"
    missing = [name for name in stage.packages if not (CARRIED / name).is_dir() and importlib.util.find_spec(name) is None]
    if missing:
        return f"this Python has no {', '.join(missing)}"
    if stage.gpus > 1 and gpus() < stage.gpus:
        return f"{stage.gpus} GPUs needed, {gpus()} found"
    if stage.needs and device == "emulate":
        return "needs a GPU"
    return ""


def fa3_wheel():
    return next((str(path) for path in sorted(CARRIED.glob("flash_attn3_jax-*.whl"))), None)


def start_of_clocks(out):
    """A process that writes the GPU's clocks and power twice a second, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    with (out / "clocks.csv").open("w") as file:
        return subprocess.Popen(["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv", "-lms", "500"], stdout=file, stderr=subprocess.DEVNULL)


def line_of_clocks(text):
    """Of nvidia-smi's table: clocks while the GPU works, and power."""
    rows = [row.split(", ") for row in text.splitlines()[1:] if row.count(", ") == CLOCKS.count(",")]
    number = lambda text: float(re.match(r"[\d.]*", text)[0] or 0)
    if not rows:
        return "clocks of the GPU: not logged"
    power = [number(row[3]) for row in rows]
    busy = sorted(number(row[1]) for row, watts in zip(rows, power, strict=True) if watts >= max(power) / 2)
    return f"clocks of the GPU while it works: median {busy[len(busy) // 2]:.0f} MHz, least {busy[0]:.0f}; power: most {max(power):.0f} W"


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
        printed, errors = process.communicate(timeout=max(limit - GRACE, limit / 2))
        status = "passed" if process.returncode == 0 else "skipped" if process.returncode in stage.skips_on else "failed"
    except subprocess.TimeoutExpired:
        printed, errors = stopped(process, min(GRACE, limit / 2))
        status = "timed out"
    except BaseException:  # this program is ended: a stage has a session of its own, and would go on
        os.killpg(process.pid, signal.SIGKILL)
        raise
    result = {"stage": stage.name, "about": stage.about, "status": status, "seconds": round(time.monotonic() - start, 2),
              "command": " ".join(command), "exit_code": process.returncode}
    told = last_object(printed) if stage.json else None
    result |= {"stdout": printed[-stage.printed:]} if told is None else {"result": told}
    if status == "passed" and result.get("result", {}).get("gradient_norm") == 0:
        result["status"], result["reason"] = "failed", "the gradient is zero: nothing was compared"
    if status != "passed":
        result["stderr"] = errors[-PRINTED:]
        result["reason"] = reason_of(status, errors, process.returncode, limit)
    return result


def stopped(process, seconds):
    """Ends a stage with all its processes. It may tell first what it has done: output and errors."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def last_object(printed):
    """The one JSON object of the text; of several, one a line, the last: each has what those before it had."""
    for text in (printed, *reversed(printed.splitlines())):
        if text.strip().startswith("{"):
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                continue
    return None


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

    from espalier.launch import linked_torch
    linked = linked_torch()
    told = {"python": sys.version.split()[0], "torch": torch.__version__, "torch_cuda": torch.version.cuda, "processors": os.cpu_count(),
            "kernel": platform.release(), "gpus": []}
    for name in ("transformers", "trl", "verl", "megatron-core", "transformer-engine"):
        try:
            told[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            told[name] = None
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
    if not re.match(rf"{re.escape(linked)}(\D|$)", torch.__version__):
        wrong.insert(0, f"torch {linked} is needed, this Python has {torch.__version__}")
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


def hf_wide(device):
    """Layers of Llama-3-8B as transformers runs them, in bfloat16: a dense step and shared ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import espalier.hf
    on_gpu = device == "cuda"
    prefix, suffix, n = (10240, 2048, 32) if on_gpu else (24, 8, 2)
    torch.manual_seed(0)
    config = LlamaConfig(**(WIDE if on_gpu else TINY), tie_word_embeddings=False)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    draw = lambda count: torch.randint(0, config.vocab_size, (count,)).tolist()
    group = lambda prefix, suffix, n: (lambda prompt: [{"prompt_ids": prompt, "response_ids": draw(suffix)} for _ in range(n)])(draw(prefix))
    weights = torch.randn(n, device=device)
    loss = lambda wave: -(wave.logprobs * weights[wave.rollout]).sum() / (n * suffix)
    rollouts, steps, dense = group(prefix, suffix, n), {}, None
    tell = lambda: print(json.dumps({"prefix": prefix, "suffix": suffix, "n": n, "steps": steps}), flush=True)
    for trunk_state in (None, "keep", "recompute", *(["offload"] if on_gpu else [])):
        name = f"shared, {trunk_state}" if trunk_state else "dense"
        how = dict(schedule="shared", trunk_state=trunk_state) if trunk_state else dict(schedule="dense")
        # Kernels are chosen in a first call; pinned memory is taken in the first step that offloads.
        sizes = [group(64 if on_gpu else 8, 16 if on_gpu else 4, 2), *([rollouts] if trunk_state == "offload" else []), rollouts]
        try:
            for each in sizes:
                model.zero_grad(set_to_none=True)
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                result = espalier.hf.phased_step(model, each, loss, **how)
        except Exception as error:  # the other steps say something, too
            steps[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
            tell()
            continue
        gradient = [p.grad.cpu() for p in model.parameters()]
        dense = gradient if dense is None else dense
        norm = lambda parts: sum(float(x.float().square().sum()) for x in parts) ** .5
        steps[name] = {"seconds": result.seconds, "rows": result.rows, "waves": result.waves, "peak_bytes": result.peak_bytes,
                       "from_dense": norm(a.float() - b.float() for a, b in zip(gradient, dense, strict=True)) / norm(dense)}
        tell()
    return 6 if any("error" in step for step in steps.values()) else 0


def verbs(device):
    """Verbs in the order in which a user meets them, and scores against the CPU's."""
    folder = Path.cwd() / "verbs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    on, model, rollouts = ("--device", device), ("--model", CASES / "model"), ("--rollouts", CASES / "rollouts.jsonl")
    texts = sorted({json.loads(line)["prompt"] for line in (CASES / "rollouts.jsonl").read_text().splitlines()})
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (folder / "reward.py").write_text("def compute_score(solution_str, **_):\n    return float(len(solution_str))\n")
    calls = {
        "grpo": ("grpo", *on, *model, "--prompts", folder / "prompts.jsonl", "--reward", folder / "reward.py", "--out", folder / "run",
                 "--max-response-length", 8, "--train-batch-size", 4, "--n", 4, "--steps", 2),
        "grpo --resume": ("grpo", *on, "--resume", folder / "run", "--steps", 3),
        "generate": ("generate", *on, *model, "--prompts", folder / "prompts.jsonl", "--out", folder / "answers.jsonl", "--n", 2, "--max-response-length", 8),
        "score": ("score", *on, "--dtype", "float64", *model, *rollouts, "--out", folder / "scored.jsonl"),
        "score on the CPU": ("score", "--dtype", "float64", *model, *rollouts, "--out", folder / "scored_cpu.jsonl"),
        "train": ("train", *on, "--dtype", "bfloat16", *model, *rollouts, "--out", folder / "trained", "--steps", 2),
        "train --lora-rank": ("train", *on, "--dtype", "bfloat16", "--lora-rank", 4, *model, *rollouts, "--out", folder / "adapter"),
        "train, offloaded": ("train", *on, "--schedule", "phased", "--trunk-state", "offload", *model, *rollouts, "--out", folder / "offloaded"),
        "train, recomputed": ("train", *on, "--schedule", "phased", "--trunk-state", "recompute", "--wave-state", "recompute", *model, *rollouts,
                              "--out", folder / "recomputed")}
    told, wrong = {}, []
    tell = lambda: print(json.dumps({"verbs": told, "wrong": {what.split(":")[0]: what for what in wrong}}), flush=True)
    for name, words in calls.items():
        start = time.monotonic()
        done = subprocess.run([PROGRAM, *map(str, words), "--quiet"], capture_output=True, text=True)
        told[name] = {"exit_code": done.returncode, "seconds": round(time.monotonic() - start, 2)}
        if done.returncode != 0:
            wrong.append(f"{name}: {done.stderr.strip()[-400:]}")
        tell()
    if not wrong:
        here, there = ([json.loads(line)["logprobs"] for line in (folder / name).read_text().splitlines()] for name in ("scored.jsonl", "scored_cpu.jsonl"))
        told["log-probs from the CPU's"] = far = max(abs(a - b) for x, y in zip(here, there, strict=True) for a, b in zip(x, y, strict=True))
        if not far < 1e-10:
            wrong.append(f"log-probs are {far} from the CPU's")
    tell()
    print("\n".join(wrong), file=sys.stderr)
    return 6 if wrong else 0


# ---- the page ----

def utilization(cell, gpu):
    """Model FLOPs by the peak of the GPU, where that is known."""
    peak = next((flops for name, flops in PEAKS.items() if name in gpu), 0)
    parts = [f"{name} {100 * cell['flops'][name] / cell['seconds'][name] / peak:.0f} %" for name in ("dense", "phased") if peak and cell["seconds"].get(name)]
    return f", of the peak: {', '.join(parts)}" if parts else ""


def of_rate(rate):
    if rate.get("lowered"):
        return "compiled"
    return " / ".join(f"{rate[part]['flops_per_second'] / 1e12:.1f}" for part in ("forward", "backward")) + " TFLOP/s"


def of_recurrence(told):
    found = [rate for rate in told.get("rates", []) if "delta_rule" in rate["operation"]]
    return "".join(f"; {rate['operation']} of {rate['rows']} rows {1e3 * rate['seconds']:.2f} ms" for rate in found)


def line_of(result):
    """What the page says of a stage beside its status: the reason where it did not pass, and what it had found."""
    reason = result.get("reason", "") if result["status"] != "passed" else ""
    runs = re.findall(r"^(?:dense|packed|phased|auto): [\d.]+ s$", result.get("stderr", ""), re.MULTILINE)  # notes of bench
    return "; ".join(filter(None, [reason, found_by(result), *runs]))


def found_by(result):
    told = result.get("result") or {}
    if "steps" in told:
        return "; ".join(f"{name}: {step['seconds']:.2f} s, peak {step['peak_bytes'] / 2**30:.1f} GiB" if "seconds" in step else f"{name}: {step['error']}"
                         for name, step in told["steps"].items())
    if "models" in told:
        return f"{len(told['models']) - len(told['wrong']) - len(told['refused'])} exact, {len(told['refused'])} refused, {len(told['wrong'])} wrong" + (
            f", {len(told['left'])} not reached" if told.get("left") else "")
    wrong = [check for check in told.get("checks", []) if isinstance(check, dict) and not check["pass"]]
    if wrong:
        return f"{len(wrong)} of {len(told['checks'])} checks failed: {wrong[0]['operation']}, {wrong[0]['sizes']}, {wrong[0]['dtype']}"
    if told.get("attention_rates"):
        checks = f"{len(told['checks'])} checks; " if "checks" in told else ""
        return checks + "; ".join(f"{rate['shape']} {of_rate(rate)}" for rate in told["attention_rates"]) + of_recurrence(told)
    if "rates" in told and "checks" not in told:
        return of_recurrence(told).removeprefix("; ")
    if "checks" in told:
        rates = {rate["operation"]: rate for rate in told.get("rates", [])}
        attention = rates.get("attention", {}).get("flops_per_second")
        return f"{len(told['checks'])} checks" + (f"; attention {attention / 1e12:.1f} TFLOP/s forward" if attention else "")
    if "row_ratio" in told:
        seconds = told["seconds_of"]
        return (f"{told['verdict']}; dense {seconds['dense']:.3f} s, shared {seconds['shared']:.3f} s, speed-up {told['speedup']:.2f} of "
                f"{told['row_ratio']:.2f}; without shared prompts {100 * told['overhead']:+.1f} %")
    if "verdict" in told:
        worst = told.get("worst", {})
        return f"{told['verdict']}; worst {worst.get('parameter')}: {worst.get('ratio', 0):.2f} of the floor"
    if "cells" in told:
        return "; ".join(f"{cell['prefix']}/{cell['suffix']} N={cell['n']}: dense {cell['seconds']['dense']:.3f} s, phased {cell['seconds']['phased']:.3f} s, "
                         f"speed-up {cell['speedup']:.2f} of {cell['ceiling']:.2f}{utilization(cell, told.get('device', ''))}" for cell in told["cells"])
    if "gpus" in told:
        return "; ".join([*told["gpus"], f"torch {told['torch']}", told["espalier"]])
    if "rows_without_sharing" in told:
        return f"{told['rows']} rows instead of {told['rows_without_sharing']}, {told['seconds']:.3f} s"
    return ""


def limit_of(stage, seconds, left):
    """Of a run's stage, all that is left but the seconds of those behind it; at least its own."""
    names = list(seconds)
    return max(seconds[stage.name], left - sum(seconds[name] for name in names[names.index(stage.name) + 1:])) if seconds else stage.limit


def page(results, seconds, clocks):
    lines = ["# First contact with a GPU", "", f"{sum(r['status'] == 'passed' for r in results)} of {len(results)} stages passed in {seconds:.0f} s; {clocks}.", "",
             "| stage | status | s | result |", "| --- | --- | ---: | --- |"]
    lines += [f"| {r['stage']}: {r['about']} | {r['status']} | {r['seconds']:.0f} | {line_of(r).replace('|', '/')} |" for r in results]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_hour"), help="folder for the results")
    parser.add_argument("--only", default="", help="stages to run, separated by commas")
    parser.add_argument("--run", choices=sorted(RUNS), help="stages for so many seconds of a machine, all together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulate"), help="emulate: a rehearsal on a CPU")
    parser.add_argument("--limit", type=float, default=0, help="seconds of a stage; 0: its own limit, most of them 60")
    parser.add_argument("--minutes", type=float, help=f"of all stages; default {MINUTES}, with --run its own")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hf", help=argparse.SUPPRESS)
    parser.add_argument("--hf-wide", help=argparse.SUPPRESS)
    parser.add_argument("--verbs", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.facts:
        return facts()
    if arguments.hf:
        return hf(arguments.hf)
    if arguments.hf_wide:
        return hf_wide(arguments.hf_wide)
    if arguments.verbs:
        return verbs(arguments.verbs)
    listed = stages(arguments.device)
    if arguments.run and arguments.only:
        parser.error("--run and --only choose stages: give one of them")
    wanted = set(filter(None, arguments.only.split(",")))
    unknown = wanted - {stage.name for stage in listed}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in listed)}")
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no torch: run first_hour.py with a Python that has the torch of the build", file=sys.stderr)
        return NOT_THERE
    by_name = {stage.name: stage for stage in listed}
    seconds = RUNS.get(arguments.run, {})
    chosen = [by_name[name] for name in seconds] if arguments.run else [stage for stage in listed if not wanted or stage.name in wanted]
    minutes = arguments.minutes or ((int(arguments.run) - RESERVED) / 60 if arguments.run else MINUTES)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start, results, fastest = time.monotonic(), [], 0.0
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    clocks = start_of_clocks(out)
    for number, stage in enumerate(chosen):
        left = 60 * minutes - (time.monotonic() - start)
        reason = reason_to_skip(stage, arguments.device)
        if not reason and left <= GRACE:  # as much is left behind a stage that was stopped
            reason = f"{minutes:g} minutes are over: --only {stage.name} runs it"
        result = ({"stage": stage.name, "about": stage.about, "status": "skipped", "seconds": 0.0, "reason": reason} if reason
                  else run(stage, out, min(arguments.limit or limit_of(stage, seconds, left), left)))
        results.append(result)
        (out / f"{number:02d}-{stage.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{stage.name:22} {result['status']:9} {result['seconds']:6.1f} s  {line_of(result)}", flush=True)
        profile = (result.get("result") or {}).get("profile")
        if profile and profile["attention_flops_per_second"] > fastest:  # of the kernels that --attention auto takes
            fastest = profile["attention_flops_per_second"]
            (out / "machine.json").write_text(json.dumps(profile, indent=1) + "\n")
        logged = line_of_clocks((out / "clocks.csv").read_text() if clocks else "")
        (out / "first_hour.md").write_text(page(results, time.monotonic() - start, logged))
    if clocks:
        clocks.terminate()
        clocks.wait()
    print(f"the page: {out / 'first_hour.md'}")
    if any(result["stage"] == "selftest-own" and result.get("exit_code") == NOT_THERE for result in results):
        return NOT_THERE
    return 6 if any(result["status"] in ("failed", "timed out") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
