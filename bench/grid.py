"""The grid of `espalier bench` as JSON lines, a table and a picture.

    python bench/grid.py run [--splits ...] [--n ...] [--repetitions R] [--hidden M --layers L] [--build build]

measures a random Qwen3-like model and appends a line for every cell to bench/results/grid.jsonl.
bench/targets.py writes docs/performance.md and docs/speed.svg from the newest measurement of every cell and baseline in
bench/results/*.jsonl by `report` here; nothing in them is typed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import gpu_prediction

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
PYTHON = "tools/python"  # as a command of the documents names it: the one that `make` chose
SCHEDULES = ("dense", "packed", "phased", "auto")


def machine():
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(), "commit": commit.stdout.strip()}


def model_config(hidden, layers):
    """Qwen3-like: heads of 64, a key/value head for every four of them, an inner width of three times the width."""
    heads = hidden // 64
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers,
            "intermediate_size": 3 * hidden, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "head_dim": 64,
            "vocab_size": 8192, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32"}


def run(options):
    RESULTS.mkdir(parents=True, exist_ok=True)
    config = model_config(options.hidden, options.layers)
    with tempfile.TemporaryDirectory(prefix="espalier-grid-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for split in options.splits.split(","):
            for n in options.n.split(","):
                words = ["bench", "--model", folder, "--splits", split, "--n", n, "--repetitions", options.repetitions]
                done = subprocess.run([options.build / "espalier", *words, "--json", "--quiet"], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stdout + done.stderr)
                found = json.loads(done.stdout)
                cell = found["cells"][0]
                row = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "hidden": options.hidden, "layers": options.layers,
                       "repetitions": int(options.repetitions), "espalier": found["espalier"], "threads": found["threads"],
                       "dtype": found["dtype"], **cell}
                with open(RESULTS / "grid.jsonl", "a") as out:
                    out.write(json.dumps(row) + "\n")
                print(f"{split} n={n}: {cell['speedup']:.2f}x of {cell['ceiling']:.2f}", flush=True)


MOST_REACHED = 1.2  # of a FLOP ceiling


def newest(path, key):
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[key(row)] = row
    return [rows[k] for k in sorted(rows)]


def gibibytes(value):
    return f"{value / 2**30:.2f}"


def grid_table(rows):
    out = ["| prompt/response | N | dense s | packed s | phased s | auto s | speed-up | ceiling | reached | phased reached |"
           " auto predicted s | peak GiB: dense, auto, predicted | gradient error |", "| --- |" + " ---: |" * 12]
    for row in rows:
        seconds, dense = row["seconds"], row["seconds"]["dense"]
        peaks = ", ".join([gibibytes(row["schedules"]["peak_bytes"]["dense"]), gibibytes(row["peak_bytes"]),
                           gibibytes(row["predicted_peak_bytes"])])
        out.append(f"| {row['prefix']}/{row['suffix']} | {row['n']} | "
                   + " | ".join(f"{seconds[s]:.2f}" for s in SCHEDULES)
                   + f" | {row['speedup']:.2f} | {row['ceiling']:.2f} | {row['fraction']:.2f} | "
                   + f"{dense / seconds['phased'] / row['ceiling']:.2f} | {row['predicted_seconds']:.2f} | {peaks} | "
                   + f"{max(row['schedules']['gradient_error'].values()):.1e} |")
    return out


def beyond_ceiling(rows):
    """A cell far above its FLOP ceiling says that its schedules did not run at one rate: which of them, against the other cells."""
    rate = lambda row, schedule: row["schedules"]["flops"][schedule] / row["seconds"][schedule]
    out = []
    for row in rows:
        reached = {s: row["seconds"]["dense"] / row["seconds"][s] / row["ceiling"] for s in ("auto", "phased")}
        if max(reached.values()) <= MOST_REACHED:
            continue
        others = {s: statistics.median(rate(other, s) for other in rows if other is not row) for s in ("dense", "auto", "phased")}
        told = ", ".join(f"{s} {rate(row, s) / others[s]:.2f}" for s in others)
        text = (f"The row {row['prefix']}/{row['suffix']}, N = {row['n']}, is above {MOST_REACHED:g} of its FLOP ceiling. That is impossible if all "
                f"schedules run at one rate. FLOP/s over the median of the other rows: {told}. If dense is well below 1 and the others are not, the "
                "runs of dense were slowed, most likely by other work on the machine, and the row does not measure sharing.")
        out += textwrap.wrap(text, 140)
    return out


def baseline_table(rows):
    names = sorted({name for row in rows for name in row["seconds"]}, key=lambda n: (n.startswith("espalier"), n))
    out = ["| prompt/response | N | " + " | ".join(names) + " | own dense against transformers | auto against the best other |",
           "| --- |" + " ---: |" * (len(names) + 3)]
    for row in rows:
        median = {name: value["median"] for name, value in row["seconds"].items()}
        others = [value for name, value in median.items() if not name.startswith("espalier")]
        ratio = median.get("transformers_dense", 0) / median["espalier dense"] if "espalier dense" in median else 0
        best = min(others) / median["espalier auto"] if others and "espalier auto" in median else 0
        out.append(f"| {row['prompt']}/{row['response']} | {row['n']} | "
                   + " | ".join(f"{median[n]:.2f}" if n in median else "" for n in names)
                   + f" | {ratio:.2f} | {best:.2f} |")
    return out


def picture(rows):
    """Speed-up over the prompt's share of a rollout, a line for every N, ceilings dashed above it."""
    width, height, left, bottom, top = 640, 360, 56, 48, 24
    sizes = sorted({row["n"] for row in rows})
    most = max(max(row["ceiling"], row["speedup"]) for row in rows) * 1.08
    x = lambda share: left + share * (width - left - 96)
    y = lambda ratio: height - bottom - (ratio - 0) / most * (height - bottom - top)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             f'<text x="{left}" y="16" fill="#222">speed-up of auto over dense; dashed: FLOP ceiling</text>']
    for ratio in range(0, int(most) + 1):
        parts.append(f'<path d="M{left} {y(ratio):.1f}H{x(1):.1f}" stroke="#e4e4e4"/>'
                     f'<text x="{left - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end" fill="#666">{ratio}x</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text x="{x(share):.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#666">{share:.0%}</text>')
    parts.append(f'<text x="{x(0.5):.1f}" y="{height - 10}" text-anchor="middle" fill="#222">prompt share of a rollout</text>')
    for index, n in enumerate(sizes):
        cells = sorted((r for r in rows if r["n"] == n), key=lambda r: r["prefix"] / (r["prefix"] + r["suffix"]))
        colour = f"hsl({210 - 170 * index / max(1, len(sizes) - 1):.0f} 65% 42%)"
        for field, dash in (("ceiling", ' stroke-dasharray="4 4"'), ("speedup", "")):
            points = [(x(r["prefix"] / (r["prefix"] + r["suffix"])), y(r[field])) for r in cells]
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            if not dash:
                parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        parts.append(f'<text x="{points[-1][0] + 10:.1f}" y="{points[-1][1] + 4:.1f}" fill="{colour}">N = {n}</text>')
    return "\n".join([*parts, "</svg>", ""])


README_BEGIN, README_END = "<!-- written by bench/targets.py report -->\n", "<!-- until here -->\n"


def readme_figures(row):
    """The paragraph of README.md: one cell of bench/compare_dense.py."""
    median = {name: value["median"] for name, value in row["seconds"].items()}
    rounds, m, shape = min(value["runs"] for value in row["seconds"].values()), row["machine"], row["shape"]
    words = (f"{m['cpu']}, {row['threads']} threads, float32, a Qwen3-like model (hidden {shape['hidden_size']}, {shape['num_hidden_layers']} layers, "
             f"vocabulary {shape['vocab_size']:,}), {row['n']} responses of {row['response']:,} tokens to a prompt of {row['prompt']:,}: a whole "
             f"update takes transformers {median['transformers_dense']:.2f} s, Espalier dense {median['espalier dense']:.2f} s, Espalier shared "
             f"{median['espalier auto']:.2f} s. The FLOP ceiling over dense is {row['ceiling']:.2f} here. Medians of {rounds} "
             f"alternating round{'s' * (rounds != 1)}, commit {m['commit']}, {row['date']}:")
    return "\n".join([*textwrap.wrap(words, 120), "", f"    {PYTHON} {row['command']}", ""])


def write_readme(row):
    path = ROOT / "README.md"
    before, rest = path.read_text().split(README_BEGIN)
    path.write_text(before + README_BEGIN + readme_figures(row) + README_END + rest.split(README_END)[1])


BY_HAND, END = "<!-- by hand: bench/targets.py report keeps this -->", "<!-- end -->"


def by_hand(page):
    """The lines of a page that no measurement file gives, with their marks; none: there are none."""
    if BY_HAND not in page:
        return []
    return [BY_HAND, *page.split(BY_HAND + "\n")[1].split("\n" + END)[0].split("\n"), END, ""]


def report(targets=()):
    grid = newest(RESULTS / "grid.jsonl", lambda r: (r["hidden"], r["layers"], r["n"], r["prefix"]))
    against = newest(RESULTS / "compare_dense.jsonl", lambda r: (r["n"], r["prompt"]))
    kept = by_hand((ROOT / "docs/performance.md").read_text())
    lines = ["# Performance", "", "This page lists the measurements, with the command for each figure. Compare ratios rather than seconds: CPUs differ, and their",
             f"speed varies over time. `{PYTHON} bench/targets.py report` writes the page from `bench/results/`.", "", *targets]
    if grid:
        lines += ["## Schedules against each other", "",
                  f"`{PYTHON} bench/grid.py run`: random weights, heads of 64, vocabulary 8192. Seconds of one whole gradient (plan, forward, loss,",
                  'backward), medians of alternating runs. "Reached" is the speed-up divided by the FLOP ceiling.', ""]
        models = sorted({(row["hidden"], row["layers"]) for row in grid})
        for hidden, layers in models:
            rows = [row for row in grid if (row["hidden"], row["layers"]) == (hidden, layers)]
            m = rows[-1]["machine"]
            lines += [f"Hidden {hidden}, {layers} layers, on {m['cpu']}, {rows[-1]['threads']} threads, {rows[-1]['dtype']}, commit "
                      f"{m['commit']}, {rows[-1]['date']}, runs of each: {rows[-1]['repetitions']}.", "", *grid_table(rows), ""]
            if causes := beyond_ceiling(rows):
                lines += [*causes, ""]
        widest = max(models, key=lambda model: sum((row["hidden"], row["layers"]) == model for row in grid))
        lines += [f"![speed-up over prompt share, hidden {widest[0]}](speed.svg)", ""]
        (ROOT / "docs/speed.svg").write_text(picture([row for row in grid if (row["hidden"], row["layers"]) == widest]))
    if against:
        m = against[-1]["machine"]
        lines += ["## Against plain PyTorch", "",
                  f"`{PYTHON} {against[-1]['command']}` on {m['cpu']}, {against[-1]['threads']} threads, torch {m['torch']}, transformers "
                  f"{m['transformers']}, commit {m['commit']}, {against[-1]['date']}. Seconds of one whole update with AdamW, medians, "
                  "runs alternating.",
                  "", *baseline_table(against), ""]
    lines += kept
    lines += gpu_prediction.section()
    told = [row for row in against if {"transformers_dense", "espalier dense", "espalier auto"} <= set(row["seconds"])]
    if told:
        write_readme(max(told, key=lambda row: (row["date"], row["ceiling"])))
    (ROOT / "docs/performance.md").write_text("\n".join(lines))
    print(ROOT / "docs/performance.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run"])
    parser.add_argument("--splits", default="341/1707,1024/1024,1365/683,1707/341")
    parser.add_argument("--n", default="2,8")
    parser.add_argument("--repetitions", default="5")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    options = parser.parse_args()
    run(options)


if __name__ == "__main__":
    main()
