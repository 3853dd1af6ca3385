"""Seconds of an update with adapters over those of a full update, beside the ratio of their FLOPs.

    tools/python bench/lora_step.py [--hidden 2048] [--layers 4] [--rounds 3] [--rank 16] [--keep]

A Llama with random weights in float32 (heads of 128, vocabulary 8,192), a group of 8 responses of 128 tokens to a prompt of 512 a step. Full and
LoRA alternate; a round is the median of a run's later steps. With --keep a line is appended to bench/results/lora_step.jsonl.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baselines import workload
from grid import ROOT, machine

VOCABULARY, STEPS, TARGET = 8192, 4, 0.72


def write_model(folder, hidden, layers):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=hidden // 128,
                                 num_key_value_heads=max(1, hidden // 512), vocab_size=VOCABULARY, tie_word_embeddings=False)).save_pretrained(folder)


def update(options, folder, rank):
    """(seconds, FLOPs) of an update."""
    words = ["train", "--model", folder / "model", "--rollouts", folder / "rollouts.jsonl", "--out", folder / "out", "--overwrite", "--json", "--quiet",
             "--dtype", "float32", *(["--lora-rank", rank] if rank else [])]
    done = subprocess.run(list(map(str, [options.program, *words])), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"train ended with {done.returncode}: {done.stderr[-500:]}")
    steps = json.loads(done.stdout)["steps"]
    return statistics.median(step["seconds"]["total"] for step in steps[1:]), steps[0]["predicted"].get("flops")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", type=Path, default=ROOT / "build/espalier")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options.hidden, options.layers)
        records = []
        for step in range(1, STEPS + 1):
            workload.write_rollouts(folder / "group.jsonl", 512, 128, 8, vocabulary=VOCABULARY)
            records += [dict(json.loads(line), step=step) for line in (folder / "group.jsonl").read_text().splitlines()]
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        rounds = [(update(options, folder, 0), update(options, folder, options.rank)) for _ in range(options.rounds)]
    full, lora = (statistics.median(round[side][0] for round in rounds) for side in (0, 1))
    ratios = [round[1][0] / round[0][0] for round in rounds]
    flops = rounds[0][1][1] / rounds[0][0][1] if rounds[0][0][1] else None
    row = dict(hidden=options.hidden, layers=options.layers, rank=options.rank, rounds=options.rounds, full_seconds=full, lora_seconds=lora,
               ratio=statistics.median(ratios), spread=[min(ratios), max(ratios)], flops_ratio=flops, target=TARGET, **machine())
    print(json.dumps(row, indent=1))
    if options.keep:
        with open(ROOT / "bench/results/lora_step.jsonl", "a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
