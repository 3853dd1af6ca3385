"""TRL's GRPO with shared prompts: one import changed.

    python examples/trl_grpo.py [--plain] [--steps 2]

A small random model and a made-up task, so that it runs anywhere in seconds. With --plain the same script is TRL's own trainer.
"""

import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import espalier.trl  # the line that is new: espalier.trl.GRPOTrainer for trl.GRPOTrainer


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 96)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def small_model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, head_dim=16, initializer_range=.15, eos_token_id=1))


def reward(completion_ids, **_):
    return [sum(token % 3 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    prompts = [" ".join(f"w{3 + (7 * i + k) % 93}" for k in range(150)) for i in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(output_dir=folder, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[], save_strategy="no",
                                per_device_train_batch_size=8, num_generations=8, gradient_accumulation_steps=2, max_completion_length=16,
                                max_steps=arguments.steps, logging_steps=1, learning_rate=1e-4, seed=7)
        trainer_class = trl.GRPOTrainer if arguments.plain else espalier.trl.GRPOTrainer
        trainer = trainer_class(model=small_model(), reward_funcs=reward, args=config, processing_class=tokenizer(),
                                train_dataset=Dataset.from_dict({"prompt": prompts}))
        trainer.train()
    if not arguments.plain:
        print(f"{trainer.shared_rows['run']} rows run instead of {trainer.shared_rows['without_sharing']}")


if __name__ == "__main__":
    main()
