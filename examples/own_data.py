"""Your own prompts and reward function: sample answers, score them, update the model.

    python examples/own_data.py [MODEL_DIRECTORY] [--prompts prompts.jsonl] [--out TRAINED] [--steps 2]

Without a model directory a small random model with a tokenizer is made; without prompts, sums of two digits. Each step samples
eight answers to every prompt with the newest model and trains on them. TRAINED is a Hugging Face directory.
"""

import argparse
import tempfile
from pathlib import Path

import espalier

SUMS = [{"prompt": f"What is {a} + {b}? Answer with one number.", "ground_truth": str(a + b)} for a, b in ((2, 3), (4, 4), (7, 2), (5, 1))]


def reward(data_source, solution_str, ground_truth, extra_info):
    """verl's signature. A right answer gives 1, an answer with any digit 0.1."""
    if ground_truth in solution_str.split():
        return 1.0
    return 0.1 if any(character.isdigit() for character in solution_str) else 0.0


def small_model(folder):
    """A random Qwen3 with one token a character: it learns nothing useful in two steps and runs anywhere."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    characters = ["<eos>", "<unk>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(characters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, initializer_range=.1, eos_token_id=0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = arguments.model or small_model(scratch / "model")
        for step in range(arguments.steps):
            last = step == arguments.steps - 1
            out = arguments.out if last and arguments.out else scratch / f"step{step}"
            rollouts = scratch / f"rollouts{step}.jsonl"
            espalier.generate(model=model, prompts=arguments.prompts or SUMS, reward=reward, n=8, max_response_length=16, seed=step,
                              out=rollouts, quiet=True)
            result = espalier.train(model=model, rollouts=rollouts, out=out, lr=1e-4, quiet=True)
            update = result["steps"][0]
            print(f"step {step}: mean reward {update['reward']:.3f}, {update['rows']['physical']} rows run instead of {update['rows']['logical']}")
            model = out


if __name__ == "__main__":
    main()
