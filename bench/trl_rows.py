"""Token rows that TRL's GRPO and RLOO run in espalier.trl beside TRL's own, and how far the gradients are apart, in float64: models whose last layers
read the keys and values of earlier ones, and tools that return screenshots.

    tools/python bench/trl_rows.py [--write]

The runs are those of tests/python/test_trl_reused_keys.py and test_trl_images.py, which hold the distances to 1e-10: tiny models, a prompt of
60 to 87 tokens or of 8 and 11, eight answers, two steps. TRL's own trainer runs every row of every rollout. --write updates docs/python.md.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/python"), str(ROOT / "python")]
import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

import espalier.trl as shared  # noqa: E402
import test_trl_images as images  # noqa: E402
import test_trl_reused_keys as reused  # noqa: E402
from hf_models import all_float64, worst  # noqa: E402

BEGIN, END = "<!-- trl_rows -->\n", "<!-- end -->\n"


@contextlib.contextmanager
def nothing_is_rounded_to_float32():
    """As in those tests; in TRL's head, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for module in (reused.chunked_logprob, reused.chunked_divergence):
            patch.setattr(module, "torch", reused._Wide())
        yield patch


def of_reused_keys(kind, family, folder):
    settings = dict(max_steps=2, learning_rate=1e-3, max_completion_length=6)
    with nothing_is_rounded_to_float32() as patch:
        patch.setattr(reused.example, "small_model", lambda: reused.made(family))
        plain, ours = (reused.run(reused.example, getattr(trainers, kind + "Trainer"), getattr(trl, kind + "Config"), folder / trainers.__name__, **settings)
                       for trainers in (trl, shared))
    return ours.shared_rows, reused.furthest(plain, ours)[0]


def of_screenshots(family, folder):
    rollouts = images.tool_batch(family)
    with nothing_is_rounded_to_float32(), all_float64():
        plain, ours = (images.run_with_a_tool(trainer, family, folder, rollouts) for trainer in (trl.GRPOTrainer, shared.GRPOTrainer))
    return ours.shared_rows, worst(ours.grads[0], plain.grads[0])[0]


def cases(folder):
    """(what, rows, the largest relative distance of a parameter's gradient)"""
    for kind, family, name in (("GRPO", "Gemma4", "Gemma 4 E2B and E4B"), ("RLOO", "Gemma4", "Gemma 4 E2B and E4B"), ("RLOO", "Gemma3n", "Gemma 3n")):
        yield f"{kind}, a model like {name}", *of_reused_keys(kind, family, folder)
    yield "GRPO, screenshots of tools, Qwen2.5-VL", *of_screenshots("Qwen2_5_VL", folder)


def table():
    lines = [f"| TRL {trl.__version__}, transformers {transformers.__version__}, float64 | rows run | TRL's own rows | ratio | gradients differ by |",
             "| --- | ---: | ---: | ---: | ---: |"]
    with tempfile.TemporaryDirectory() as folder:
        for what, rows, distance in cases(Path(folder)):
            run, without = rows["run"], rows["without_sharing"]
            lines.append(f"| {what} | {run:,} | {without:,} | {without / run:.2f} | {distance:.0e} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = table()
    if arguments.write:
        page = ROOT / "docs/python.md"
        head, tail = page.read_text().split(BEGIN)
        page.write_text(head + BEGIN + text + END + tail.split(END, 1)[1])


if __name__ == "__main__":
    main()
