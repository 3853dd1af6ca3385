"""TRL's trainers on preferences, labels and texts with shared prompts: one import changed.

    python examples/trl_pairs.py [--kind dpo|kto|reward|sft] [--plain] [--steps 2]

A small random model and made-up data, so that it runs anywhere in seconds. With --plain the same script is TRL's own trainer.
"""

import argparse
import copy
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import trl
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification
from trl_grpo import small_model, tokenizer

import espalier.trl  # the line that is new: espalier.trl.DPOTrainer for trl.DPOTrainer, and so on

SYSTEM = " ".join(f"w{3 + 5 * k % 93}" for k in range(120))


def rows(kind):
    """Four answers below each of two prompts, in the columns that TRL's trainers want."""
    prompts = [f"{SYSTEM} w{40 + i // 4} w50" for i in range(8)]
    good, bad = [f" w{60 + i} w9 w{70 + i}" for i in range(8)], [f" w{80 + i} w8" for i in range(8)]
    if kind in ("dpo", "reward"):
        return Dataset.from_dict({"prompt": prompts, "chosen": good, "rejected": bad})
    answers = [good[i] if i % 2 else bad[i] for i in range(8)]
    labels = {"label": [i % 2 == 1 for i in range(8)]} if kind == "kto" else {}
    return Dataset.from_dict({"prompt": prompts, "completion": answers, **labels})


def model(kind):
    made = small_model()
    if kind == "reward":
        config = copy.deepcopy(made.config)
        config.num_labels = 1
        made = Qwen3ForSequenceClassification(config)
    made.config.pad_token_id = 0
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("dpo", "kto", "reward", "sft"), default="dpo")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    kind, policy = arguments.kind, model(arguments.kind)
    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "sft": "SFT"}[kind]
    trainer_class = getattr(trl if arguments.plain else espalier.trl, name + "Trainer")
    reference = {"ref_model": copy.deepcopy(policy)} if kind in ("dpo", "kto") else {}
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(trl, name + "Config")(output_dir=folder, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[],
                                               save_strategy="no", per_device_train_batch_size=8, max_steps=arguments.steps, logging_steps=1,
                                               learning_rate=1e-4, seed=7)
        trainer = trainer_class(model=policy, args=config, processing_class=tokenizer(), train_dataset=rows(kind), **reference)
        trainer.train()
    if not arguments.plain:
        print(f"{trainer.shared_rows['run']} rows run instead of {trainer.shared_rows['without_sharing']}")


if __name__ == "__main__":
    main()
