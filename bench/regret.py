"""How far `auto` is from the best fixed schedule, in measured time, and how far predictions are from measurements.

    python bench/regret.py [--program build/espalier] [--model DIR] [--splits ...] [--n ...] [--repetitions R]

Runs `espalier bench` over a grid, in which dense, packed, phased and auto take turns on the same rollouts. Regret of a
cell: median seconds of auto over the least of the three, less 1. Where auto runs the very plan of the best schedule,
its regret is the machine's own noise. Prints a table and appends a line to bench/results/regret.jsonl.
"""

import argparse
import json
import subprocess
import time

from grid import ROOT, machine

FIXED = ("dense", "packed", "phased")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--model", default="", help="a model directory or config.json; default: the built-in shape")
    parser.add_argument("--splits", default="1024/256,341/683,64/192,900/20")
    parser.add_argument("--n", default="1,2,8")
    parser.add_argument("--repetitions", default="5")
    options = parser.parse_args()
    command = [options.program, "bench", "--splits", options.splits, "--n", options.n, "--repetitions",
               options.repetitions, *(["--model", options.model] if options.model else [])]
    found = json.loads(subprocess.run([*command, "--json", "--quiet"], capture_output=True, text=True).stdout)
    if "error" in found:
        raise SystemExit(found["error"])
    cells = []
    print("| prompt/response | N | auto runs | regret | predicted / measured: dense | packed | phased |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for cell in found["cells"]:
        seconds, predicted = cell["seconds"], cell["schedules"]["predicted_seconds"]
        ratio = {name: predicted[name] / seconds[name] for name in FIXED}
        cells.append({"prefix": cell["prefix"], "suffix": cell["suffix"], "n": cell["n"], "chosen": cell["chosen"],
                      "regret": seconds["auto"] / min(seconds[name] for name in FIXED) - 1, "seconds": seconds,
                      "predicted_over_measured": ratio})
        print(f"| {cell['prefix']}/{cell['suffix']} | {cell['n']} | {cell['chosen']} | {100 * cells[-1]['regret']:.1f} % | "
              + " | ".join(f"{ratio[name]:.2f}" for name in FIXED) + " |")
    print(f"\nworst regret {100 * max(cell['regret'] for cell in cells):.1f} %")
    row = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "command": " ".join(command[1:]), "cells": cells}
    results = ROOT / "bench/results"
    results.mkdir(parents=True, exist_ok=True)
    with open(results / "regret.jsonl", "a") as out:
        out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
