"""Seconds and peaks of two programs that take turns: whether a change of the engine made steps slower or larger.

    python bench/same_speed.py OLD NEW [--rounds 5] [--only Qwen3-Next] [--threads 0] [--quick] [--keep]

Cells: models of attention, of experts and of recurrent layers, with random weights; float32 and bfloat16; dense, packed and phased
steps of one group. A ratio is that of a round, new over old; the table has its median and its range. With --keep a line for each
cell is appended to bench/results/same_speed.jsonl.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from grid import ROOT, machine

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
         "hidden_act": "silu", "tie_word_embeddings": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
MODELS = {
    "Qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "Qwen3-MoE": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
    "Qwen3-Next": {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **EXPERTS, "shared_expert_intermediate_size": 512,
                   "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
                   "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4},
}
SCHEDULES = ("dense", "packed", "phased")


def measure(program, model, dtype, options):
    """({schedule: seconds}, bytes)"""
    prompt, response = (64, 16) if options.quick else (512, 128)
    words = [program, "bench", "--model", model, "--dtype", dtype, "--n", 4, "--splits", f"{prompt}/{response}", "--repetitions", 1,
             "--threads", options.threads, "--seed", 1, "--json", "--quiet"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {done.returncode}: {done.stderr[-600:]}")
    report = json.loads(done.stdout)
    return report["cells"][0]["seconds"], report["peak_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny steps, to see whether everything works")
    parser.add_argument("--keep", action="store_true", help="append to bench/results/same_speed.jsonl")
    options = parser.parse_args()
    programs = {"old": options.old.resolve(), "new": options.new.resolve()}
    print("| model | dtype | schedule | old, s | new, s | new over old | range | peak, new over old |\n"
          "| --- | --- | --- | ---: | ---: | ---: | --- | ---: |")
    for name, config in MODELS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="espalier-same-speed-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps({**SIZES, **config}))
            for dtype in ("float32", "bfloat16"):
                seconds = {which: {schedule: [] for schedule in SCHEDULES} for which in programs}
                peaks = {}
                for turn in range(options.rounds):
                    for which in list(programs)[::1 if turn % 2 == 0 else -1]:
                        of_schedule, peaks[which] = measure(programs[which], folder, dtype, options)
                        for schedule in SCHEDULES:
                            seconds[which][schedule].append(of_schedule[schedule])
                for schedule in SCHEDULES:
                    old, new = seconds["old"][schedule], seconds["new"][schedule]
                    if None in old or None in new:
                        continue
                    ratios = [n / o for o, n in zip(old, new, strict=True)]
                    row = {"model": name, "dtype": dtype, "schedule": schedule, "old": statistics.median(old), "new": statistics.median(new),
                           "ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)], "peak": peaks["new"] / peaks["old"]}
                    print(f"| {name} | {dtype} | {schedule} | {row['old']:.3f} | {row['new']:.3f} | {row['ratio']:.3f} "
                          f"| {min(ratios):.3f} .. {max(ratios):.3f} | {row['peak']:.4f} |", flush=True)
                    if options.keep:
                        with (ROOT / "bench/results/same_speed.jsonl").open("a", encoding="utf-8") as out:
                            out.write(json.dumps({"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rounds": options.rounds, **row}) + "\n")


if __name__ == "__main__":
    main()
