"""espalier against plain PyTorch on the same model and rollouts: the runs alternate, so that both see the same machine.

    python bench/compare_dense.py [--cells 341/1707/8,1024/1024/8] [--rounds 5] [--baselines transformers_dense,...] [--model qwen3_next]

Each baseline of bench/baselines/ is one process that waits between its updates; `espalier train` is a process an update. In
every round each baseline and each schedule makes one timed update, after a warm-up, in turn. Prints medians and ratios;
appends one JSON line a cell to bench/results/.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "baselines"))

import workload  # noqa: E402

CELLS = "341/1707/8,1024/1024/8,1365/683/8,1707/341/8"


def usable_threads():
    return len(os.sched_getaffinity(0))


def run_json(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


class Baseline:
    """A process of bench/baselines/ that makes an update when it is asked to; asleep otherwise."""

    def __init__(self, name, model, rollouts, threads):
        self.command = [sys.executable, HERE / f"baselines/{name}.py", "--model", model, "--rollouts", rollouts, "--threads", threads, "--on-request"]
        self.process = subprocess.Popen([str(word) for word in self.command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(map(str, self.command))}\nended with {self.process.wait()}")
        return json.loads(line)

    def update(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def espalier_update(schedule, model, rollouts, threads, folder, program=ROOT / "build/espalier"):
    found = run_json([program, "train", "--model", model, "--rollouts", rollouts, "--out", folder / "out", "--overwrite", "--epochs", 2,
                      "--schedule", schedule, "--threads", threads, "--profile", "--json", "--quiet"])
    return {**found["steps"][1], "process_peak_bytes": found["peak_bytes"]}


def step_flops(prompt, response, n, shared, shape=workload.SHAPE):
    """FLOPs of one update: 6 a weight and row in matrices, 4 H D (1 + 2.5) a visible pair; the last token is no input. A layer of the
    delta rule has (6 + 6 + 14) dk dv + 64 (5 dv + 4 dk) a row and value head and 2 * 64 dk a key head (docs/mathematics.md, (24) and (25))."""
    m, f, d = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    h, j = shape["num_attention_heads"], shape["num_key_value_heads"]
    types = shape.get("layer_types", ["full_attention"] * shape["num_hidden_layers"])
    linear, full = types.count("linear_attention"), types.count("full_attention")
    trunk, own = prompt - 1, response  # a response's rows start with the last prompt token
    rows = (trunk if shared else n * trunk) + n * own
    pairs = (1 if shared else n) * trunk * (trunk + 1) / 2 + n * (own * trunk + own * (own + 1) / 2)
    gated = 1 if not linear else 2  # query and gate
    flops = full * (6 * (m * d * ((1 + gated) * h + 2 * j) + 3 * m * f) * rows + 14 * h * d * pairs)
    if linear:
        dk, dv, hv = shape["linear_key_head_dim"], shape["linear_value_head_dim"], shape["linear_num_value_heads"]
        keys, values = shape["linear_num_key_heads"] * dk, hv * dv
        weights = m * (2 * keys + 2 * values + 2 * hv) + values * m + 3 * m * f
        rule = hv * (26 * dk * dv + 64 * (5 * dv + 4 * dk)) + shape["linear_num_key_heads"] * 2 * 64 * dk
        flops += linear * rows * (6 * weights + rule)
    return flops + 6 * m * shape["vocab_size"] * n * own


def machine():
    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"cpu": model[0] if model else platform.processor(), "cores": os.cpu_count(), "system": platform.platform(), "commit": commit,
            "torch": workload.torch.__version__, "transformers": workload.transformers.__version__, "python": platform.python_version()}


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values), "each": values}


def measure_cell(cell, options, model, folder, shape=workload.SHAPE):
    prompt, response, n = cell
    rollouts = workload.write_rollouts(folder / "rollouts.jsonl", prompt, response, n, seed=options.seed)
    baselines = {name: Baseline(name, model, rollouts, options.threads) for name in options.baselines}
    runners = {name: baseline.update for name, baseline in baselines.items()}
    for schedule in options.schedules:
        runners[f"espalier {schedule}"] = lambda s=schedule: espalier_update(s, model, rollouts, options.threads, folder, options.program)
    totals, last = {}, {}
    try:
        for number in range(options.rounds):
            # Every second round backwards: a slow drift of the machine then favours nobody.
            for name in list(runners) if number % 2 == 0 else reversed(list(runners)):
                last[name] = runners[name]()
                totals.setdefault(name, []).append(last[name]["seconds"]["total"])
                print(f"  round {number + 1}/{options.rounds} {name}: {totals[name][-1]:.2f} s", file=sys.stderr, flush=True)
    finally:
        for baseline in baselines.values():
            baseline.close()
    ceiling = step_flops(prompt, response, n, False, shape) / step_flops(prompt, response, n, True, shape)
    return {"prompt": prompt, "response": response, "n": n, "seconds": {name: spread(values) for name, values in totals.items()},
            "loss": {name: update["loss"] for name, update in last.items()},
            "peak_bytes": {name: update.get("process_peak_bytes", update["peak_bytes"]) for name, update in last.items()},
            "last": last, "ceiling": ceiling}


def print_cell(row):
    medians = {name: value["median"] for name, value in row["seconds"].items()}
    reference = medians.get("transformers_dense") or next(iter(medians.values()))
    own = medians.get("espalier dense")
    print(f"\nprompt {row['prompt']}, response {row['response']}, n {row['n']}: FLOP ceiling {row['ceiling']:.2f}")
    print(f"  {'':24}{'seconds':>10}{'spread':>16}{'x baseline':>12}{'x own dense':>13}{'of ceiling':>12}")
    for name, value in row["seconds"].items():
        own_ratio = own / value["median"] if own else float("nan")
        extent = f"{value['min']:.2f}-{value['max']:.2f}"
        print(f"  {name:24}{value['median']:10.2f}{extent:>16}{reference / value['median']:12.2f}{own_ratio:13.2f}"
              f"{own_ratio / row['ceiling']:12.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="prompt/response/n, comma separated")
    parser.add_argument("--model", choices=workload.MODELS, default="qwen3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--baselines", type=lambda text: text.split(","), default=["transformers_dense"])
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=["dense", "phased", "auto"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=Path, default=ROOT / "build/espalier")
    parser.add_argument("--results", type=Path, default=HERE / "results/compare_dense.jsonl")
    options = parser.parse_args()
    if not options.program.is_file():
        sys.exit(f"{options.program} is not there: run make first")
    header = {"machine": machine(), "threads": options.threads, "shape": workload.shape_of(options.model), "date": time.strftime("%Y-%m-%d"),
              "command": " ".join(["bench/compare_dense.py", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory(prefix="espalier-bench-") as name:
        folder = Path(name)
        model = workload.write_model(folder / "model", seed=options.seed, name=options.model)
        for text in options.cells.split(","):
            row = measure_cell(tuple(int(number) for number in text.split("/")), options, model, folder, workload.shape_of(options.model))
            print_cell(row)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with open(options.results, "a") as out:
                out.write(json.dumps({**header, **{name: value for name, value in row.items() if name != "last"}}) + "\n")


if __name__ == "__main__":
    main()
