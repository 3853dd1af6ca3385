"""Peak memory of the waves of a shared plan against dense with one rollout a micro-batch.

    python bench/memory_split.py [--program build/espalier] [--prompt 1280] [--response 256] [--n 16]

Runs `espalier train` three times on one random group: on a single pair of tokens (what is held without activations:
weights, gradients, moments, the program), dense with one rollout in each wave, and phased with recomputed trunks and
one response in each wave. Compares, above what is held, the ledger of phase B (bytes of activations) and the process's
own resident peak (VmHWM). Prints a table and appends a line to bench/results/memory_split.jsonl.
"""

import argparse
import json
import random
import subprocess
import tempfile
import time
from pathlib import Path

from grid import ROOT, machine

SHAPE = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
             intermediate_size=1536, vocab_size=8192)
MEBI = 2**20


def write_model(directory):
    import torch
    import transformers
    config = transformers.Qwen3Config(**SHAPE, max_position_embeddings=40960, tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(directory)


def write_group(path, prompt, response, n):
    draw = random.Random(0)
    ids = lambda count: [draw.randrange(SHAPE["vocab_size"]) for _ in range(count)]
    shared = ids(prompt)
    with open(path, "w") as out:
        for _ in range(n):
            record = dict(prompt_ids=shared, response_ids=ids(response), reward=draw.random())
            out.write(json.dumps(record) + "\n")


def train(program, model, rollouts, *options):
    command = [program, "train", "--model", model, "--rollouts", rollouts, "--gradients", str(Path(rollouts).parent / "g"),
               "--json", "--quiet", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{found.get('error', done.stderr)}")
    step = found["steps"][0]
    return {"process": found["peak_bytes"], "ledger": step["arena_bytes"], "step": step["peak_bytes"],
            "predicted": step["predicted"]["peak_bytes"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    for name, value in (("prompt", 1280), ("response", 256), ("n", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, group, pair = f"{folder}/model", f"{folder}/group.jsonl", f"{folder}/pair.jsonl"
        write_model(model)
        write_group(group, options.prompt, options.response, options.n)
        write_group(pair, 1, 1, 1)
        held = train(options.program, model, pair)["process"]
        dense = train(options.program, model, group, "--schedule", "dense", "--token-budget",
                      str(options.prompt + options.response))
        phased = train(options.program, model, group, "--schedule", "phased", "--trunk-state", "recompute",
                       "--token-budget", str(options.response + 1))
    saved = {"ledger": 1 - phased["ledger"]["B"] / dense["ledger"]["B"],
             "process": 1 - (phased["process"] - held) / (dense["process"] - held)}
    print(f"{options.prompt}/{options.response}, N = {options.n}; {held / MEBI:.0f} MiB held without activations\n")
    print("| MiB above what is held | dense, one rollout a wave | phased, recompute | less |")
    print("| --- | ---: | ---: | ---: |")
    for name, a, b in (("phase B, ledger", dense["ledger"]["B"], phased["ledger"]["B"]),
                       ("process, VmHWM", dense["process"] - held, phased["process"] - held)):
        print(f"| {name} | {a / MEBI:.0f} | {b / MEBI:.0f} | {100 * (1 - b / a):.0f} % |")
    row = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "prompt": options.prompt,
           "response": options.response, "n": options.n, "held": held, "dense": dense, "phased": phased, "less": saved}
    results = ROOT / "bench/results"
    results.mkdir(parents=True, exist_ok=True)
    with open(results / "memory_split.jsonl", "a") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
