"""Is the frontier true? Plans the longest prompts that fit a budget and runs five of them at 0.98 of their length.

    python bench/frontier.py [--program build/espalier] [--budget 360] [--response 256] [--only PATTERN] [--keep]

`espalier plan --frontier` of a small model on this machine, then `espalier train` with the same options and budget on a group whose prompt is
0.98 of what the cell says. A cell is met where the run finishes and the process never holds more than 1.02 of the budget, saving included. Prints a table; with
--keep a line for each cell is appended to bench/results/frontier.jsonl.
"""

import argparse
import fnmatch
import json
import subprocess
import tempfile
import time
from pathlib import Path

from grid import ROOT, machine
from memory_sweep import MEBI, SHAPE, write_model, write_rollouts

MODEL = dict(SHAPE, hidden_size=256, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, head_dim=32, intermediate_size=768,
             vocab_size=2000, max_position_embeddings=1 << 18)
CELLS = [(2, "dense"), (2, "phased, recompute"), (2, "phased, offload"), (16, "packed"), (16, "phased, offload")]


def run(words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {done.returncode}: {done.stderr[-800:]}")
    return json.loads(done.stdout)


def options_of(cell, prompt, response):
    schedule, _, state = cell["way"].partition(", ")
    words = ["--schedule", schedule]
    if schedule == "dense":
        words += ["--token-budget", prompt + response]
    if schedule == "packed":
        words += ["--token-budget", prompt + cell["n"] * response]
    return words + (["--trunk-state", state] if state else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--budget", type=int, default=360, help="MiB")
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", default="*", help="pattern of ways")
    parser.add_argument("--keep", action="store_true", help="append to bench/results/frontier.jsonl")
    options = parser.parse_args()
    about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "budget": options.budget * MEBI, "response": options.response}
    budget = ["--memory-budget", f"{options.budget}MiB", "--threads", options.threads, "--json", "--quiet"]
    print("| N | | frontier, tokens | prompt and response over dense's | run with | finished | peak of the budget | seconds |\n"
          "| ---: | --- | ---: | ---: | ---: | --- | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory(prefix="espalier-frontier-") as name:
        folder = Path(name)
        write_model(folder / "model", MODEL)
        found = run([options.program, "plan", "--model", folder / "model", "--frontier", "--n", "2,16", "--max-response-length", options.response,
                     *budget])["frontier"]
        cells = {(cell["n"], cell["way"]): cell for cell in found["cells"]}
        for key in CELLS:
            if not fnmatch.fnmatch(key[1], options.only):
                continue
            cell, prompt = cells[key], int(0.98 * cells[key]["prompt"])
            if prompt == 0:
                print(f"| {key[0]} | {key[1]} | none | | | | | |", flush=True)
                continue
            write_rollouts(folder / "rollouts.jsonl", MODEL["vocab_size"], prompt, options.response, cell["n"])
            ran = run([options.program, "train", "--model", folder / "model", "--rollouts", folder / "rollouts.jsonl", "--out", folder / "out",
                       "--overwrite", "--steps", 1, *options_of(cell, prompt, options.response), *budget])
            step = ran["steps"][0]
            peak = max(step["peak_bytes"].values())
            met = ran["peak_bytes"] <= 1.02 * options.budget * MEBI
            print(f"| {cell['n']} | {cell['way']} | {cell['prompt']:,} | {cell['factor']:.2f} | {prompt:,} | {'yes' if met else 'over the budget'} | "
                  f"{100 * ran['peak_bytes'] / (options.budget * MEBI):.1f} % | {step['seconds']['total']:.1f} |", flush=True)
            if options.keep:
                with open(ROOT / "bench/results/frontier.jsonl", "a") as out:
                    out.write(json.dumps({**about, "cell": cell, "prompt": prompt, "peak_bytes": peak, "process": ran["peak_bytes"], "met": met,
                                          "seconds": step["seconds"], "predicted": step["predicted"]}) + "\n")


if __name__ == "__main__":
    main()
