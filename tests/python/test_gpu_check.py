"""`make gpu-check` and the GPU bundle on a machine without a GPU.

Without a GPU the check says so. Where something calls itself a GPU, the check ends with exit code 8 and writes no result. The bundle is
rehearsed with the emulated device, outside of the source tree and without a network.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import first_hour  # noqa: E402

RESULTS = ("bench/results", "docs/hardware")


def gpu_check(folder, *arguments):
    """With the programs of `folder` before all others."""
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([ROOT / "tools/gpu_check.sh", *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def command(folder, name, *lines):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(("#!/bin/sh", *lines, "")))
    (folder / name).chmod(0o755)


def results():
    return {path: path.read_bytes() for folder in RESULTS for path in (ROOT / folder).rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def without_gpu():
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU: make gpu-check itself is the test")


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path):
    command(tmp_path / "first", "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2", "exit 9")
    done = gpu_check(tmp_path / "first")
    assert done.returncode == 0 and done.stdout == "gpu-check: no GPU on this machine: nothing was checked\n" and not done.stderr


def test_a_gpu_that_cannot_be_used_ends_it_with_nothing_written(program, tmp_path):
    if program.resolve() != (ROOT / "build/espalier").resolve():
        pytest.skip(f"the script runs build/espalier, the tests {program}")
    command(tmp_path / "first", "nvidia-smi", 'case "$1" in -L) echo "GPU 0: NVIDIA H100";; *) echo "NVIDIA H100";; esac')
    command(tmp_path / "first", "make", 'echo "make $*"')  # what it would build is built, or is what is missing
    before = results()
    done = gpu_check(tmp_path / "first", "--only", "selftest-own")
    assert done.returncode == 8, done.stderr
    assert "make all cuda" in done.stdout and "device error at --device cuda" in done.stdout
    assert results() == before


@pytest.fixture(scope="module")
def bundle(program, tmp_path_factory):
    build = program.resolve().parent
    if build != ROOT / "build" or not (build / "libespalier_emulated.so").is_file():
        pytest.skip("the emulated device is not built beside build/espalier (make test builds it)")
    folder = tmp_path_factory.mktemp("bundle") / "gpu-bundle"
    done = subprocess.run([ROOT / "tools/gpu_bundle.sh", folder, "--rehearsal"], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def rehearsed(bundle, out, *arguments):
    """first_hour.py with neither the tree nor a network; where namespaces are not allowed, with a network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ESPALIER_", "PYTHONPATH", "LD_"))}
    apart = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # ranks of one machine meet on its loopback
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        apart = []
    command = [*apart, sys.executable, bundle / "first_hour.py", "--device", "emulate", "--out", out, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"}, cwd=bundle, timeout=500)


def test_the_bundle_runs_without_the_tree_and_without_a_network(bundle, tmp_path):
    done = rehearsed(bundle, tmp_path / "out", "--only", "facts,hf,hf-llama,llama-own,megatron,verbs,nccl,selftest-flash,stock,fa3", "--limit", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    results = {found["stage"]: found for found in (json.loads(path.read_text()) for path in (tmp_path / "out").glob("[0-9]*.json"))}
    assert {name: found["status"] for name, found in results.items()} == {
        "facts": "passed", "hf": "passed", "hf-llama": "passed", "llama-own": "passed", "verbs": "passed",
        "megatron": "passed" if importlib.util.find_spec("megatron") else "skipped",
        "nccl": "skipped", "selftest-flash": "skipped", "stock": "passed", "fa3": "skipped"}
    assert results["llama-own"]["result"]["cells"] and results["hf"]["result"]["rows"] < results["hf"]["result"]["rows_without_sharing"]
    assert "2 GPUs needed" in results["nccl"]["reason"] and "no flash on processors" in results["selftest-flash"]["reason"]
    page = (tmp_path / "out/first_hour.md").read_text()
    assert all(name in page for name in results)


def broken_bundle(bundle, folder, cases):
    """A copy whose program does what `cases` says of its words (lines of a shell's case) and else runs."""
    broken = folder / "broken"
    shutil.copytree(bundle, broken, symlinks=True)
    real = broken / "espalier/bin/espalier"
    real.rename(real.with_name("real"))
    real.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\nexec "$(dirname "$0")/real" "$@"\n')
    real.chmod(0o755)
    return broken


def test_a_stage_that_crashes_or_hangs_costs_only_itself(bundle, tmp_path):
    broken = broken_bundle(bundle, tmp_path, '*"selftest "*"--attention own"*) kill -9 $$;; *"selftest "*"--attention flash"*) sleep 100;;')
    done = rehearsed(broken, tmp_path / "out", "--only", "facts,selftest-own,selftest-flash,llama-own", "--limit", "20")
    assert done.returncode == 6
    status = {found["stage"]: found["status"] for found in (json.loads(path.read_text()) for path in (tmp_path / "out").glob("[0-9]*.json"))}
    assert status == {"facts": "passed", "selftest-own": "failed", "selftest-flash": "timed out", "llama-own": "passed"}


# Modules that a machine with a GPU has, with the signatures that the stages call. Arrays are shapes.
STAND_INS = {
    "einops/__init__.py": "", "triton/__init__.py": "", "fla/__init__.py": "", "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule.py": """
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False):
    assert q.shape == k.shape == v.shape and g.shape == beta.shape == q.shape[:3] and use_qk_l2norm_in_kernel
    return q * k * v * (g * beta)[..., None].to(q.dtype), None
""",
    "jax/__init__.py": """
import time
class ShapeDtypeStruct:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), dtype
default_backend = lambda: "gpu"
jit = lambda call: call
block_until_ready = lambda result: time.sleep(.02)
def vjp(call, *operands):
    out = call(*operands)
    def gradients(grad):
        assert grad.shape == out.shape
        return operands
    return out, gradients
from jax import random
""",
    "jax/numpy.py": "bfloat16 = 'bfloat16'\n",
    "jax/random.py": """
from jax import ShapeDtypeStruct
PRNGKey = lambda seed: seed
normal = lambda key, shape, dtype: ShapeDtypeStruct(shape, dtype)
""",
    "jax/export.py": """
class DisabledSafetyCheck:
    custom_call = staticmethod(lambda name: name)
def export(call, *, platforms, disabled_checks):
    assert platforms == ["cuda"] and disabled_checks == ["flash_mha_fwd", "flash_mha_bwd"]
    return call
"""}
FA3 = {"flash_attn3_jax/__init__.py": """
from pathlib import Path
import sys
marks = (Path(__file__).parents[1] / "flash_attn3_jax_lib/flash_api.so").read_bytes()
assert marks == b"code\\0%d.%d\\0" % sys.version_info[:2]
def flash_mha(q, k, v, softmax_scale=None, is_causal=False, window_size=(-1, -1)):
    assert k.shape == v.shape and q.shape[3] == k.shape[3] == 128 and type(softmax_scale) is float and (not is_causal or q.shape[1] == k.shape[1])
    return q
""", "flash_attn3_jax_lib/flash_api.cpython-311-x86_64-linux-gnu.so": b"code\0" + b"3.11\0"}


def carry_stand_ins(bundle):
    """Into the folder of packages that travel with the bundle; returns the wheel of FlashAttention 3."""
    carried = bundle / "carried"
    for name, text in STAND_INS.items():
        (carried / name).parent.mkdir(parents=True, exist_ok=True)
        (carried / name).write_text(text)
    wheel = carried / "flash_attn3_jax-0-cp311-cp311-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, content in FA3.items():
            packed.writestr(name, content)
    return wheel


def told_by(out):
    return {found["stage"]: found for found in (json.loads(path.read_text()) for path in sorted(out.glob("[0-9]*.json")))}


def test_runs_of_so_many_seconds_reach_each_stage(bundle, tmp_path):
    """Both runs with stand-ins of other software and of what takes minutes under emulation: Hopper's kernels and all operations tell what they would,
    another model stands for Kimi Linear, and the program runs on the CPU."""
    rate = {"shape": "a prompt", "forward": {"flops_per_second": 5.6e14}, "backward": {"flops_per_second": 4.8e14}}
    cell = {"prefix": 24, "suffix": 8, "n": 2, "seconds": {"dense": 2, "phased": .5}, "speedup": 4, "ceiling": 5, "flops": {"dense": 1, "phased": 1}}
    told = {"selftest ": {"verdict": "pass", "checks": [], "attention_rates": [rate]}, 'bench "*"--attention hopper': {"cells": [cell]},
            'verify "*"--attention hopper': {"verdict": "pass", "worst": {"parameter": "w", "ratio": .5}, "gradient_norm": 1}}
    words = " ".join(f"*\"{verb}\"*) echo '{json.dumps(said)}'; exit 0;;" for verb, said in told.items())
    words += ' *"--attention cudnn"*) ;; *"--device emulate"*) all="$*"; exec "$(dirname "$0")/real" ${all%%emulate*}cpu${all#*emulate};;'
    rehearsal = broken_bundle(bundle, tmp_path, words)
    carry_stand_ins(rehearsal)
    families = rehearsal / "checks/make_model.py"
    families.write_text(families.read_text() + '\nFAMILIES = {"kimi_linear_moe": FAMILIES["llama3_tied"]}\n')
    for run, skipped in (("240", {"llama-cudnn-any-order"}), ("600", {"llama-cudnn"})):
        done = rehearsed(rehearsal, tmp_path / run, "--run", run, "--minutes", "20")
        found = told_by(tmp_path / run)
        assert list(found) == list(first_hour.RUNS[run]) and done.returncode == 0, done.stdout + done.stderr
        assert {name for name, each in found.items() if each["status"] == "skipped"} == skipped, done.stdout
    assert len(found["fla"]["result"]["rates"]) == 2 and found["qwen3-8b"]["result"]["cells"][0]["seconds"]["packed"] is None
    assert list(found["kimi"]["result"]["models"]) == list(found["families"]["result"]["models"]) == ["kimi_linear_moe"]
    rates = told_by(tmp_path / "240")["fa3"]["result"]["attention_rates"]
    assert rates and all(rate["lowered"] for rate in rates)


def test_rates_of_flash_attention_3_are_those_of_its_calls(tmp_path):
    wheel = carry_stand_ins(tmp_path)
    done = subprocess.run([sys.executable, ROOT / "tools/gpu_yardsticks.py", "fa3", wheel], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(tmp_path / "carried")})
    assert done.returncode == 0, done.stderr
    rates = first_hour.last_object(done.stdout)["attention_rates"]
    assert len(rates) == 4 and all(rate[part]["flops_per_second"] != 0 for rate in rates for part in ("forward", "backward"))


def test_a_stage_that_is_stopped_tells_what_it_had_done(tmp_path):
    """One that prints what it has after each part, and one that tells it when it is asked to end; one that does not end is killed."""
    stage = lambda text: first_hour.Stage("part", "parts of work", [sys.executable, "-c", text])
    parts = 'import time\nfor n in range(3): print(f\'{{"steps": {n}}}\', flush=True)\ntime.sleep(60)'
    asked = ("import json, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print(json.dumps({'checks': []})), sys.exit(1)))\n"
             "print('dense: 31.5 s', file=sys.stderr, flush=True)\ntime.sleep(60)")
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    found = [first_hour.run(stage(text), tmp_path, 3) for text in (parts, asked, deaf)]
    assert [each["status"] for each in found] == ["timed out"] * 3 and all(each["seconds"] < 20 for each in found)
    assert found[0]["result"] == {"steps": 2} and found[1]["result"] == {"checks": []} and "result" not in found[2]
    assert first_hour.line_of(found[1]) == "not done after 3 s; 0 checks; dense: 31.5 s"


def test_a_self_test_that_is_interrupted_tells_its_checks(program):
    for seconds in (1, 3, 9, 27):  # the program ends at once where its work reports nothing for three seconds
        process = subprocess.Popen([program, "selftest", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        process.terminate()
        printed, _ = process.communicate(timeout=100)
        if printed:
            break
    told = json.loads(printed)
    assert process.returncode == 143 and isinstance(told["checks"], list) and told["error"]["got"].startswith("stopped by a signal")


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_check_that_is_ended_ends_its_stage(tmp_path):
    (tmp_path / "first_hour.py").write_text((ROOT / "tools/first_hour.py").read_text().replace(
        '[*this, "--facts"]', '[sys.executable, "-c", "import os, time; print(os.getpid(), file=open(\'stage\', \'w\')); time.sleep(100)"]'))
    process = subprocess.Popen([sys.executable, tmp_path / "first_hour.py", "--only", "facts", "--out", tmp_path / "out"], stdout=subprocess.PIPE)
    told, end = tmp_path / "out/stage", time.monotonic() + 100
    while not (told.exists() and told.read_text().strip()) and time.monotonic() < end:
        time.sleep(.05)
    process.terminate()
    process.wait(timeout=60)
    while runs(int(told.read_text())) and time.monotonic() < end:
        time.sleep(.05)
    assert process.returncode == 143 and time.monotonic() < end


def test_a_run_gives_each_stage_its_seconds():
    for run, seconds in first_hour.RUNS.items():
        assert sum(seconds.values()) <= int(run) - first_hour.RESERVED and min(seconds.values()) >= 2 * first_hour.GRACE
    by_name = {stage.name: stage for stage in first_hour.stages("cuda")}
    seconds = {"facts": 10, "fa3": 30, "stock": 40}
    # What those before it left over is its own as well; a stage that took all of that leaves the others theirs.
    assert first_hour.limit_of(by_name["facts"], seconds, 80) == 10
    assert first_hour.limit_of(by_name["fa3"], seconds, 78) == 38
    assert first_hour.limit_of(by_name["fa3"], seconds, 20) == 30
    assert first_hour.limit_of(by_name["qwen3-8b"], {}, 80) == 420


def test_all_stages_together_end_after_so_many_minutes(bundle, tmp_path):
    slow = broken_bundle(bundle, tmp_path, '*"--attention own"*) sleep 100;;')
    done = rehearsed(slow, tmp_path / "out", "--only", "facts,selftest-own,llama-own", "--minutes", "0.2")
    results = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("[0-9]*.json"))]
    assert done.returncode == 6 and [found["stage"] for found in results] == ["facts", "selftest-own", "llama-own"]
    assert results[-1]["status"] == "skipped" and "--only llama-own runs it" in results[-1]["reason"]
    assert "--only llama-own runs it" in (tmp_path / "out/first_hour.md").read_text()
    assert sum(found["seconds"] for found in results) < 60


def test_a_python_without_torch_is_told_so(tmp_path):
    done = subprocess.run([sys.executable, "-S", ROOT / "tools/first_hour.py", "--out", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 8 and "run first_hour.py with a Python that has the torch of the build" in done.stderr and not (tmp_path / "out").exists()


def test_libraries_that_a_machine_lacks_are_named():
    text = """./espalier: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /b/espalier/bin/libespalier_core.so)
\tlinux-vdso.so.1 (0x00007ffc8)
\tlibcublas.so.13 => not found
\tlibc10.so => /torch/lib/libc10.so (0x00007f1)
"""
    assert first_hour.not_found(text) == ["GLIBC_2.38 (for libespalier_core.so)", "libcublas.so.13"]


def test_a_library_that_is_not_there_fails_the_facts_with_its_name(bundle, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken, symlinks=True)
    (tmp_path / "lost.c").write_text("int lost(void) { return 1; }\n")
    (tmp_path / "uses.c").write_text("int lost(void); int uses(void) { return lost(); }\n")
    if subprocess.run(["gcc", "-shared", "-fPIC", "-o", "liblost.so", "lost.c"], cwd=tmp_path).returncode != 0:
        pytest.skip("no gcc")
    into = broken / "espalier/bin/libespalier_cuda.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", into, "uses.c", "-L.", "-llost"], cwd=tmp_path, check=True)
    done = rehearsed(broken, tmp_path / "out", "--only", "facts")
    assert done.returncode == 6 and "libespalier_cuda.so misses liblost.so" in done.stdout


def test_runs_for_a_limited_machine_name_stages_that_fit():
    names = {stage.name for stage in first_hour.stages("cuda")}
    assert all(set(run) <= names and len(set(run)) == len(run) for run in first_hour.RUNS.values())
    done = subprocess.run([sys.executable, ROOT / "tools/first_hour.py", "--run", "240", "--only", "facts"], capture_output=True, text=True)
    assert done.returncode == 2 and "give one of them" in done.stderr


def test_the_page_says_at_which_clocks_the_gpu_worked():
    rows = ["2026/11/28 10:00:00.000, 1980 MHz, 3201 MHz, 690.12 W, 61", "2026/11/28 10:00:00.500, 1755 MHz, 3201 MHz, 699.90 W, 63",
            "2026/11/28 10:00:01.000, 345 MHz, 3201 MHz, 78.00 W, 40", "2026/11/28 10:00:01.500, 19"]
    assert first_hour.line_of_clocks("\n".join(["timestamp, ...", *rows])) == (
        "clocks of the GPU while it works: median 1980 MHz, least 1755; power: most 700 W")
    assert first_hour.line_of_clocks("") == "clocks of the GPU: not logged"


def test_rates_and_the_part_of_the_peak_are_on_the_page():
    rate = {"shape": "a prompt", "forward": {"flops_per_second": 5.6e14}, "backward": {"flops_per_second": 4.8e14}}
    assert first_hour.line_of({"status": "passed", "result": {"checks": [1, 2], "attention_rates": [rate]}}) == "2 checks; a prompt 560.0 / 480.0 TFLOP/s"
    recurrent = {"operation": "delta_rule", "rows": 16384, "seconds": 2e-3}
    assert first_hour.line_of({"status": "passed", "result": {"rates": [recurrent]}}) == "delta_rule of 16384 rows 2.00 ms"
    cell = {"flops": {"dense": 989e12, "phased": 300e12}, "seconds": {"dense": 2.0, "phased": .5}}
    assert first_hour.utilization(cell, "NVIDIA H200") == ", of the peak: dense 50 %, phased 61 %"
    assert first_hour.utilization(cell, "emulated") == ""


def test_carried_wheels_are_in_the_bundle(bundle, tmp_path):
    """A package is unpacked; FlashAttention 3 stays a wheel, which its stage changes before it loads it. What is not carried is said."""
    for name in ("fla_core-1-py3-none-any.whl", "flash_attn3_jax-1-cp311-cp311-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr("fla/__init__.py", "")
    carry = [word for path in sorted(tmp_path.glob("*.whl")) for word in ("--carry", path)]
    done = subprocess.run([ROOT / "tools/gpu_bundle.sh", tmp_path / "bundle", "--rehearsal", *carry], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bundle/carried/fla/__init__.py").is_file() and (tmp_path / "bundle/carried/flash_attn3_jax-1-cp311-cp311-any.whl").is_file()
    missing = subprocess.run([ROOT / "tools/gpu_bundle.sh", tmp_path / "none", "--carry", tmp_path / "lost.whl"], capture_output=True, text=True, cwd=ROOT)
    assert missing.returncode == 2 and "lost.whl" in missing.stderr and not (tmp_path / "none").exists()
    stage = next(stage for stage in first_hour.stages("cuda") if stage.name == "fa3")
    assert "was not carried" in first_hour.reason_to_skip(stage, "cuda")


def test_the_stage_of_megatron_needs_transformer_engine_and_says_what_it_found():
    stage = next(stage for stage in first_hour.stages("cuda") if stage.name == "megatron")
    assert ("transformer_engine" in first_hour.reason_to_skip(stage, "cuda")) == (importlib.util.find_spec("transformer_engine") is None)
    found = dict(verdict="pass", seconds_of=dict(dense=4.0, shared=1.0), speedup=4.0, row_ratio=4.5, overhead=.004)
    assert first_hour.line_of(dict(status="passed", result=found)) == (
        "pass; dense 4.000 s, shared 1.000 s, speed-up 4.00 of 4.50; without shared prompts +0.4 %")
    done = subprocess.run([sys.executable, ROOT / "tests/python/device_megatron.py", "--device", "cuda"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 8 and ("transformer_engine" in done.stderr or "is_available() is False" in done.stderr)


def test_sanitized_operations_are_some_of_the_self_test(program):
    """Under compute-sanitizer the self-test runs a hundred times slower: not the attention of 32,768 rows."""
    for operation in first_hour.SANITIZED:
        done = subprocess.run([program, "selftest", "--only", operation, "--json"], capture_output=True, text=True, timeout=300)
        checks = json.loads(done.stdout)["checks"]
        assert checks and all(check["operation"] == operation and "sampled" not in check["sizes"] for check in checks)


@pytest.mark.parametrize("name", ["sanitizer-attention", "sanitizer-norm", "ncu"])
def test_tools_of_nvidia_run_the_program_with_words_that_it_takes(name, program, bundle, tmp_path, monkeypatch):
    """With a stand-in for the tool, which runs what stands behind its own options."""
    monkeypatch.setattr(first_hour, "CASES", bundle / "cases")
    stage = next(stage for stage in first_hour.stages("emulate") if stage.name == name)
    at = next(i for i, word in enumerate(stage.command) if str(word).endswith("espalier"))
    command(tmp_path, stage.needs, f"shift {at - 1}; echo started; exec \"$@\"")
    words = [str(word) for word in stage.command]
    words[at:] = [str(program), *(word for word in words[at + 1:] if word not in ("--device", "emulate", "--attention", "own"))]
    done = subprocess.run([tmp_path / stage.needs, *words[1:]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("started") and ("speed-up" if name == "ncu" else "PASS") in done.stdout


def test_an_unknown_stage_is_refused_with_the_list(bundle, tmp_path):
    done = rehearsed(bundle, tmp_path / "out", "--only", "selftests")
    assert done.returncode == 2 and "selftest-own" in done.stderr
