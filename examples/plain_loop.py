"""A policy update in plain PyTorch with every prompt run once: any transformers causal model, any loss.

    python examples/plain_loop.py [MODEL_DIRECTORY] [--records rollouts.jsonl] [--steps 3]

Without a model directory a small random Qwen3 is made; without records, groups of random tokens. The first step also runs dense,
and the table says how far every gradient is from it and how far rounding alone would be.
"""

import argparse
import json
import random
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import espalier.hf


def small_model():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                                        num_key_value_heads=2, head_dim=32, initializer_range=.1))


def random_records(groups=2, responses=8, prompt=200, response=40):
    draw = lambda n: [random.randrange(3, 512) for _ in range(n)]
    return [{"prompt_ids": p, "response_ids": draw(random.randint(response // 2, response)), "reward": random.random()}
            for p in (draw(prompt) for _ in range(groups)) for _ in range(responses)]


def advantages_of(records):
    """GRPO: the reward less its group's mean, over the group's deviation."""
    groups = {}
    for record in records:
        groups.setdefault(tuple(record["prompt_ids"]), []).append(float(record["reward"]))
    out = []
    for record in records:
        rewards = torch.tensor(groups[tuple(record["prompt_ids"])])
        deviation = rewards.std() if len(rewards) > 1 else 1
        out.append(float((record["reward"] - rewards.mean()) / (deviation + 1e-6)))
    return torch.tensor(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--records")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    random.seed(0)
    model = AutoModelForCausalLM.from_pretrained(arguments.model) if arguments.model else small_model()
    records = [json.loads(line) for line in open(arguments.records) if line.strip()] if arguments.records else random_records()
    advantages = advantages_of(records)
    tokens = sum(len(record["response_ids"]) for record in records)
    old = espalier.hf.logprobs(model, records)
    old = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)

    def loss(wave):  # a sum over tokens divided by a constant of the whole step: it adds up over waves
        advantage = advantages[wave.rollout]
        ratio = (wave.logprobs - old[wave.rollout, wave.position]).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(.8, 1.2) * advantage).sum() / tokens

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(arguments.steps):
        start = time.perf_counter()
        result = espalier.hf.phased_step(model, records, loss, verify=step == 0)
        optimizer.step()
        optimizer.zero_grad()
        if result.verification:
            print(result.verification)
        print(f"step {step}: loss {result.loss:.6f}, {result.rows} rows run instead of {result.rows_without_sharing}, {result.waves} waves, "
              f"{time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
