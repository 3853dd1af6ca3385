"""What slime, verl and TRL hold in memory when they dump, made from neutral records."""

import random

import numpy as np
import torch

SEED = 5
PAD = 99


def make_samples(seed=SEED, count=7, step=None):
    """Neutral records with every series, ragged, two groups, an empty response, masked tokens; floats that float32 holds."""
    rng = random.Random(seed)

    def numbers(n):
        return [float(np.float32(rng.uniform(-4, 0))) for _ in range(n)]

    prompts = [[rng.randrange(90) for _ in range(n)] for n in (3, 6)]
    out = []
    for i in range(count):
        length = 0 if i == 3 else rng.randrange(1, 6)
        sample = {"prompt_ids": prompts[i % 2], "response_ids": [rng.randrange(90) for _ in range(length)],
                  "loss_mask": [int(rng.random() < 0.7) for _ in range(length)], "group": f"g{i % 2}"}
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns", "advantage"):
            sample[name] = numbers(length)
        sample["reward"] = float(np.float32(rng.random()))
        if step is not None:
            sample["step"] = step
        out.append(sample)
    return out


def left_padded(rows, value=PAD):
    width = max(map(len, rows))
    return torch.tensor([[value] * (width - len(row)) + list(row) for row in rows])


def right_padded(rows, value=PAD, dtype=None):
    width = max(map(len, rows))
    return torch.tensor([list(row) + [value] * (width - len(row)) for row in rows], dtype=dtype)


def ones(rows):
    return [[1] * len(row) for row in rows]


def slime_sample(i, sample):
    return {
        "group_index": sample["group"], "index": i, "prompt": "text", "response": "text", "label": None,
        "tokens": sample["prompt_ids"] + sample["response_ids"], "response_length": len(sample["response_ids"]),
        "loss_mask": sample["loss_mask"], "rollout_log_probs": sample["rollout_logprobs"], "reward": sample["reward"],
        "status": "completed", "metadata": {"a": [1, {"b": None}]}, "multimodal_inputs": None, "remove_sample": False}


def slime_train(samples, indices, rank=0):
    def column(name, tensor=torch.tensor):
        return [tensor(samples[i][name]) for i in indices]

    return {"rollout_id": 4, "rank": rank, "rollout_data": {
        "tokens": [torch.tensor(samples[i]["prompt_ids"] + samples[i]["response_ids"]) for i in indices],
        "response_lengths": [len(samples[i]["response_ids"]) for i in indices], "loss_masks": column("loss_mask"),
        "rewards": [0.0 for _ in indices], "raw_reward": [samples[i]["reward"] for i in indices],
        "sample_indices": list(indices), "log_probs": column("old_logprobs"), "ref_log_probs": column("ref_logprobs"),
        "values": column("values"), "advantages": column("advantage"), "returns": column("returns"),
        "rollout_log_probs": column("rollout_logprobs"), "max_seq_len": 12}}


def verl_tensors(samples):
    prompts, responses = [s["prompt_ids"] for s in samples], [s["response_ids"] for s in samples]
    names = {"old_log_probs": "old_logprobs", "ref_log_prob": "ref_logprobs", "rollout_log_probs": "rollout_logprobs",
             "values": "values", "returns": "returns", "advantages": "advantage"}
    width = max(map(len, responses))
    rewards = torch.zeros(len(samples), width, dtype=torch.float64)
    for row, sample in enumerate(samples):
        rewards[row, max(len(sample["response_ids"]) - 1, 0)] = sample["reward"] if sample["response_ids"] else 0.0
    return {
        "prompts": left_padded(prompts), "responses": right_padded(responses), "token_level_scores": rewards,
        "attention_mask": torch.cat([left_padded(ones(prompts), 0), right_padded(ones(responses), 0)], 1),
        "response_mask": right_padded([s["loss_mask"] for s in samples], 0),
        "position_ids": torch.zeros(len(samples), 1, dtype=torch.int64),
        **{name: right_padded([s[field] for s in samples], 7.0, torch.float32) for name, field in names.items()}}


def trl_batch(samples):
    prompts, responses = [s["prompt_ids"] for s in samples], [s["response_ids"] for s in samples]
    names = {"old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs", "sampling_per_token_logps": "rollout_logprobs"}
    return {"prompt_ids": left_padded(prompts), "prompt_mask": left_padded(ones(prompts), 0),
            "completion_ids": right_padded(responses), "completion_mask": right_padded(ones(responses), 0),
            "tool_mask": right_padded([s["loss_mask"] for s in samples], 1), "num_items_in_batch": torch.tensor(sum(sum(s["loss_mask"]) for s in samples)),
            "advantages": right_padded([s["advantage"] for s in samples], 0.0, torch.float32),
            **{name: right_padded([s[field] for s in samples], 0.0, torch.float32) for name, field in names.items()}}
