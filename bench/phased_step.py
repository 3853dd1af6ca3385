"""Seconds and memory of espalier.hf.phased_step beside transformers dense, alternately, medians.

    tools/python bench/phased_step.py [--cells 1707/341/8,4096/128/16,341/1707/4] [--rounds 5] [--hidden 512] [--layers 4]
                                                   [--out bench/results/phased_step.jsonl]

Each run is a process of its own, so that peaks are its own. Speed-ups are of processor seconds of the step alone, which other work on
the machine disturbs less than the clock. --out appends a line for each cell. Dense runs micro-batches of two with the prompt's logits left out.
"ceiling": FLOPs dense over FLOPs with every shared row once, by the core's plan; a speed-up cannot be above it by much.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))


def one_run(kind, cell, hidden, layers, vocabulary):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import espalier.hf
    from espalier.hf.measure import Peak
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    prompt, response, n = map(int, cell.split("/"))
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
                                         num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), head_dim=64))
    ids = torch.randint(3, vocabulary, (prompt,)).tolist()
    rollouts = [dict(prompt_ids=ids, response_ids=torch.randint(3, vocabulary, (response,)).tolist()) for _ in range(n)]
    advantages = torch.randn(n)
    with Peak() as peak:
        start, cpu = time.perf_counter(), time.process_time()
        if kind == "dense":
            for at in range(0, n, 2):
                both = torch.tensor([r["prompt_ids"] + r["response_ids"] for r in rollouts[at:at + 2]])
                logits = model(input_ids=both[:, :-1], use_cache=False, logits_to_keep=response).logits
                logp = torch.log_softmax(logits.float(), -1).gather(-1, both[:, prompt:, None])[..., 0]
                (-(logp * advantages[at:at + 2, None]).sum() / (n * response)).backward()
        else:
            espalier.hf.phased_step(model, rollouts, lambda wave: -(wave.logprobs * advantages[wave.rollout]).sum() / (n * response))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(json.dumps(dict(seconds=seconds, cpu_seconds=cpu, peak_bytes=peak.bytes)))


def ceiling(cell, hidden, layers, vocabulary):
    from espalier import native
    prompt, response, n = map(int, cell.split("/"))
    shape = dict(layers=layers, hidden=hidden, inner=3 * hidden, heads=hidden // 64, kv_heads=max(1, hidden // 128), head_dim=64,
                 vocabulary=vocabulary)
    return native.Plan([range(3, 3 + prompt)] * n, [[3 + i] * response for i in range(n)], shape, wave_tokens=4096).json["ceiling"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="1707/341/8,4096/128/16,341/1707/4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = (arguments.hidden, arguments.layers, arguments.vocabulary)
    if arguments.run:
        one_run(arguments.run, arguments.cells, *size)
        return
    print(f"{'P/R/N':>14} {'dense s':>9} {'phased s':>9} {'speed-up':>9} {'ceiling':>8} {'of it':>6} {'dense MiB':>10} {'phased MiB':>10}")
    for cell in arguments.cells.split(","):
        seen = {"dense": [], "phased": []}
        for _ in range(arguments.rounds):
            for kind, runs in seen.items():
                command = [sys.executable, __file__, "--run", kind, "--cells", cell, "--hidden", str(size[0]), "--layers", str(size[1]),
                           "--vocabulary", str(size[2])]
                runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
        median = lambda kind, what: statistics.median(run[what] for run in seen[kind])
        speed_up, limit = median("dense", "cpu_seconds") / median("phased", "cpu_seconds"), ceiling(cell, *size)
        if arguments.out:
            medians = {f"{kind}_{what}": median(kind, what) for kind in seen for what in ("seconds", "cpu_seconds", "peak_bytes")}
            line = dict(cell=cell, hidden=size[0], layers=size[1], vocabulary=size[2], rounds=arguments.rounds, threads=os.environ.get("OMP_NUM_THREADS", "1"),
                        date=time.strftime("%Y-%m-%d"), speed_up=speed_up, ceiling=limit, **medians)
            with open(arguments.out, "a") as file:
                file.write(json.dumps(line) + "\n")
        print(f"{cell:>14} {median('dense', 'cpu_seconds'):9.2f} {median('phased', 'cpu_seconds'):9.2f} {speed_up:9.2f} {limit:8.2f} "
              f"{speed_up / limit:6.2f} {median('dense', 'peak_bytes') / 2**20:10.0f} {median('phased', 'peak_bytes') / 2**20:10.0f}", flush=True)


if __name__ == "__main__":
    main()
