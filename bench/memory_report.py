"""Writes the measured part of docs/memory.md from bench/results/{trunk_state,frontier,memory_sweep}.jsonl.

    python bench/memory_report.py
"""

from grid import PYTHON, RESULTS, ROOT, newest
from memory_sweep import MEBI, above, met

PAGE = ROOT / "docs/memory.md"
BEGIN, END = "<!-- measured: bench/memory_report.py -->\n", "<!-- end of what was measured -->\n"


def about(row):
    return f"{row['machine']['cpu']}, commit {row['machine']['commit']}, {row['date']}"


def trunk_states():
    rows = newest(RESULTS / "trunk_state.jsonl", lambda r: (r["prompt"], r["case"]))
    if not rows:
        return []
    lines = ["### Peaks by trunk state", ""]
    for layers, heads in sorted({(row.get("layers", 8), row.get("heads", 4)) for row in rows}, reverse=True):
        of_shape = [row for row in rows if (row.get("layers", 8), row.get("heads", 4)) == (layers, heads)]
        head_dim = of_shape[0].get("head_dim", 32)
        prompts = sorted({row["prompt"] for row in of_shape})
        lines += [f"`{PYTHON} bench/trunk_state.py --prompts {','.join(map(str, prompts))} --layers {layers} --heads {heads} --head-dim {head_dim}` on "
                  f"{about(of_shape[-1])}: responses of {of_shape[0]['response']} tokens, N = {of_shape[0]['n']}, one rollout per wave. A, B and C are "
                  "peaks of the arena in MiB: activations, path, and gradients of keys and values.", "",
                  "| prompt | | A | B | C | B against dense | predicted seconds | CPU seconds |", "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for prompt in prompts:
            cells = {row["case"]: row for row in of_shape if row["prompt"] == prompt}
            for case, row in cells.items():
                bytes_of = row["arena_bytes"]
                peaks = " | ".join(f"{bytes_of[phase] / MEBI:.1f}" if bytes_of[phase] else "" for phase in "ABC")
                less = f"{100 * (bytes_of['B'] / cells['dense']['arena_bytes']['B'] - 1):+.0f} %" if case != "dense" else ""
                lines += [f"| {prompt:,} | {case} | {peaks} | {less} | {row['predicted']['seconds']:.1f} | "
                          f"{row['cpu_seconds']:.1f} |" if "cpu_seconds" in row else
                          f"| {prompt:,} | {case} | {peaks} | {less} | {row['predicted']['seconds']:.1f} | |"]
        lines += [""]
    return lines


def frontier():
    rows = newest(RESULTS / "frontier.jsonl", lambda r: (r["cell"]["n"], r["cell"]["way"]))
    if not rows:
        return []
    lines = ["### The frontier, run", "",
             f"`{PYTHON} bench/frontier.py --budget {rows[0]['budget'] // MEBI} --response {rows[0]['response']}` on {about(rows[-1])}: the longest "
             f"prompt that fits a budget of {rows[0]['budget'] // MEBI} MiB according to the plan (the frontier), and a run of a prompt with 0.98 of this "
             "length under the same budget, which has to finish to be listed.", "",
             "| N | | frontier, tokens | prompt + response, relative to dense | prompt of the run | peak of the process over the budget |",
             "| ---: | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        cell = row["cell"]
        lines += [f"| {cell['n']} | {cell['way']} | {cell['prompt']:,} | {cell['factor']:.2f} | {row['prompt']:,} | "
                  f"{100 * row['process'] / row['budget']:.1f} % |"]
    return lines + [""]


def sweep():
    rows = [row for row in newest(RESULTS / "memory_sweep.jsonl", lambda r: r["case"]) if "tiny_measured" in row]
    if not rows:
        return []
    off = sorted(rows, key=lambda row: -abs(above(row)[0] / max(above(row)[1], 1) - 1) if above(row)[1] > 8 * MEBI else 0)
    lines = ["### Predicted and measured", "",
             f"`{PYTHON} bench/memory_sweep.py` on {about(rows[-1])}: {len(rows)} combinations of shape, dtype, schedule, budget and trunk state, each "
             f"in its own process. In {sum(met(row) for row in rows)} of them the peak is within the budget and the prediction within 5 % or 4 MiB. A figure is the peak of a step minus "
             "the peak of the same run on two tokens, in MiB. The table shows the ten combinations with the largest error among those above 8 MiB:", "",
             "| | predicted | measured | ratio | within 5 % or 4 MiB |", "| --- | ---: | ---: | ---: | --- |"]
    for row in off[:10]:
        measured, predicted = above(row)
        lines += [f"| {row['case']} | {predicted / MEBI:.1f} | {measured / MEBI:.1f} | {measured / max(predicted, 1):.3f} | {'yes' if met(row) else 'no'} |"]
    return lines + [""]


def main():
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join([*trunk_states(), *frontier(), *sweep()]) + END + after)
    print(PAGE)


if __name__ == "__main__":
    main()
