"""Shared prompts in plain PyTorch, packed: one row [prompt, response 1, ..., response n] a group under a 4-D mask.

    python bench/baselines/packed_sdpa.py --model DIR --rollouts FILE [--threads N]

What prefix-grouping trainers do without kernels of their own: the prompt is computed once, every response sees the prompt and
itself, positions restart after the prompt. The mask is (P + nR) x (P + nR), and SDPA cannot skip what it hides.
"""

import torch

import workload


def packed_rows(group):
    """ids, positions, mask [T, T], rows that predict, their targets and advantages of one group."""
    prompt = group[0]["prompt_ids"]
    ids, positions, owner = list(prompt), list(range(len(prompt))), [-1] * len(prompt)
    rows, targets, advantage = [], [], []
    for number, record in enumerate(group):
        response = record["response_ids"]
        start = len(ids)
        rows += [len(prompt) - 1, *range(start, start + len(response) - 1)]
        targets += response
        advantage += [record["advantage"]] * len(response)
        ids += response[:-1]
        positions += range(len(prompt), len(prompt) + len(response) - 1)
        owner += [number] * (len(response) - 1)
    owner = torch.tensor(owner)
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask = causal & ((owner[None, :] == -1) | (owner[None, :] == owner[:, None]))
    return torch.tensor([ids]), torch.tensor([positions]), mask[None, None], torch.tensor(rows), torch.tensor(targets), torch.tensor(advantage)


def make_accumulate(records, before=lambda prompt, n: None, masked=True):
    """`before` is told the prompt's length and the number of responses of the group that comes next."""
    groups = {}
    for record in records:
        groups.setdefault(tuple(record["prompt_ids"]), []).append(record)
    packed = [(len(prompt), len(group), packed_rows(group)) for prompt, group in groups.items()]
    tokens = sum(len(record["response_ids"]) for record in records)

    def accumulate(model, clock):
        total = 0.0
        for prompt, n, (ids, positions, mask, rows, targets, advantage) in packed:
            before(prompt, n)
            with clock("forward"):
                inputs = dict(input_ids=ids, position_ids=positions, attention_mask=mask if masked else None, use_cache=False)
                hidden = model.model(**inputs).last_hidden_state
                loss = workload.policy_loss(model.lm_head(hidden[0, rows]), targets, advantage) / tokens
            with clock("backward"):
                loss.backward()
            total += float(loss.detach())
        return total

    return accumulate


def main():
    options = workload.arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    records = workload.read_rollouts(options.rollouts)
    workload.run(workload.load_model(options.model), make_accumulate(records), options, "packed_sdpa")


if __name__ == "__main__":
    main()
