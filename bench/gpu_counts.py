"""What a GPU would be asked to do, counted on tensors without memory (tests/python/hf_counts.py), over the number of responses below one prompt.

    tools/python bench/gpu_counts.py [--write]

Attention: operations that launch work in one layer, forward and backward. A layer: the same with transformers' own, of a whole group in one call.
A step: how often the host waits, and bytes beside the weights at most,
gradients included, with each trunk_state. Nothing here is a time. `--write` updates docs/python.md; test_hf_counts.py compares.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "python")]
from espalier.rows.visibility import Rule
from hf_counts import attention_operations, layer_operations, rollouts, step

N = (1, 8, 32, 128)
LAYERS, PROMPT, RESPONSE = 4, 4096, 512
SHAPE = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, num_hidden_layers=LAYERS,
             max_position_embeddings=8192)
BEGIN, END = "<!-- gpu_counts -->\n", "<!-- end -->\n"
ATTENTION = {"bfloat16": {}, "float32": dict(dtype=torch.float32), "bfloat16, a window": dict(rule=Rule(window=16))}


def rows():
    """(what, a value for each N)"""
    for name, how in ATTENTION.items():
        yield f"attention of a layer, {name}: operations", [attention_operations(n, **how).launched for n in N]
    yield "a layer of Llama, bfloat16: operations", [layer_operations(n) for n in N]
    steps = {state: [step(rollouts(n, PROMPT, RESPONSE), trunk_state=state, **SHAPE) for n in N] for state in ("keep", "recompute", "offload")}
    kept = steps["keep"]
    yield "waves of a step", [one.waves for one in kept]
    yield "times that the host waits in a step", [max(len(of[i].waits) for of in steps.values()) for i in range(len(N))]
    for state, found in steps.items():
        yield f"MiB of a step, `trunk_state=\"{state}\"`", [one.peak >> 20 for one in found]


def table():
    lines = [f"| N | {' | '.join(map(str, N))} |", "| --- |" + " ---: |" * len(N)]
    return "\n".join(lines + [f"| {name} | {' | '.join(f'{value:,}' for value in values)} |" for name, values in rows()])


def documented():
    return (ROOT / "docs/python.md").read_text().split(BEGIN)[1].split(END)[0].strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    text = table()
    print(text)
    if parser.parse_args().write:
        page = ROOT / "docs/python.md"
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}{text}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
