"""What a trunk's state costs: peak of every phase and seconds, dense against phased with kept, recomputed and stored trunks.

    python bench/trunk_state.py [--program build/espalier] [--prompts 2048,4096] [--response 2048] [--n 16] [--layers 8] [--heads 4]
                                [--head-dim 32] [--threads 0] [--keep]

One group, one step, one rollout a wave on both sides. Peaks are those of the arena (activations, path and gradients of keys and
values), above weights, gradients and optimizer. Seconds are those of processors, of the whole process: what others do on the machine is not
in them. With --keep a line for each case is appended to bench/results/trunk_state.jsonl.
"""

import argparse
import json
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from grid import ROOT, machine
from memory_sweep import MEBI, SHAPE, write_model, write_rollouts

MODEL = dict(SHAPE, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=384,
             vocab_size=2000)
CASES = [("dense", "dense", "auto"), ("phased, keep", "phased", "keep"), ("phased, recompute", "phased", "recompute"),
         ("phased, offload", "phased", "offload")]


def cpu_seconds():
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(options, folder, prompt, schedule, state):
    budget = options.response + (prompt if schedule == "dense" else 1)  # a prompt above it is a chain of trunks
    words = [options.program, "train", "--model", folder / "model", "--rollouts", folder / "rollouts.jsonl", "--out", folder / "out",
             "--overwrite", "--steps", 1, "--schedule", schedule, "--token-budget", budget, "--trunk-state", state,
             "--wave-state", "keep", "--threads", options.threads, "--json", "--quiet"]
    if options.spill_dir:
        words += ["--spill-dir", options.spill_dir]
    cpu_before = cpu_seconds()
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {done.returncode}: {done.stderr[-600:]}")
    used = cpu_seconds() - cpu_before
    step = json.loads(done.stdout)["steps"][0]
    return {"arena_bytes": step["arena_bytes"], "seconds": step["seconds"], "cpu_seconds": used, "grad_norm": step["grad_norm"],
            "peak_bytes": step["peak_bytes"], "predicted": step["predicted"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--prompts", default="2048,4096,6144,8192,10240")
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4, help="of queries; keys and values have one")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--spill-dir", default="")
    parser.add_argument("--keep", action="store_true", help="append to bench/results/trunk_state.jsonl")
    options = parser.parse_args()
    about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "response": options.response, "n": options.n,
             "layers": options.layers, "heads": options.heads, "head_dim": options.head_dim}
    width = 32 * options.heads
    shape = dict(MODEL, num_hidden_layers=options.layers, num_attention_heads=options.heads, head_dim=options.head_dim, hidden_size=width,
                 intermediate_size=3 * width)
    print("| prompt | | A, MiB | B, MiB | C, MiB | B against dense | CPU seconds | against keep |\n| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for prompt in map(int, options.prompts.split(",")):
        with tempfile.TemporaryDirectory(prefix="espalier-trunk-state-") as name:
            folder, rows = Path(name), {}
            write_model(folder / "model", shape)
            write_rollouts(folder / "rollouts.jsonl", MODEL["vocab_size"], prompt, options.response, options.n)
            for case, schedule, state in CASES:
                row = rows[case] = measure(options, folder, prompt, schedule, state)
                arena, dense = row["arena_bytes"], rows["dense"]["arena_bytes"]["B"]
                kept = rows.get("phased, keep")
                print(f"| {prompt} | {case} | " + " | ".join(f"{arena[phase] / MEBI:.1f}" if arena[phase] else "" for phase in "ABC") +
                      f" | {100 * (arena['B'] / dense - 1):+.0f} % | {row['cpu_seconds']:.2f} | "
                      f"{row['cpu_seconds'] / kept['cpu_seconds']:.2f} |" if kept else
                      f"| {prompt} | {case} | | {arena['B'] / MEBI:.1f} | | | {row['cpu_seconds']:.2f} | |", flush=True)
                if options.keep:
                    with open(ROOT / "bench/results/trunk_state.jsonl", "a") as out:
                        out.write(json.dumps({**about, "prompt": prompt, "case": case, **row}) + "\n")
            norms = {row["grad_norm"] for case, row in rows.items() if case != "dense"}
            if len(norms) != 1:
                raise SystemExit(f"gradients differ between trunk states: {norms}")


if __name__ == "__main__":
    main()
