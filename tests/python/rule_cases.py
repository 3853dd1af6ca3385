"""Records with series of their own, for tests of rules for the loss of tokens: gradients of `train` in every plan against plain autograd."""

import random

import torch

import oracle
from make_model import add_kept_sets, make_rollouts, write_records

# A gradient is the same in all of them.
PLANS = ({"schedule": "dense"}, {"schedule": "packed"}, {"schedule": "phased", "token_budget": 6}, {"schedule": "phased", "trunk_state": "recompute"},
         {"share": "prompt"})


def case_with(fill, seed, kept, directory, folder):
    """Returns (model directory, oracle's model, records, their file). Records have no reward; `fill(draw, i, record, logprobs)` gives the record of
    place i its series, `logprobs` are the model's. `kept`: with kept sets."""
    draw, model = random.Random(seed), oracle.load_model(directory, torch.float64)
    records = make_rollouts(seed)
    if kept:
        add_kept_sets(records, seed)
    for i, (record, logprobs) in enumerate(zip(records, oracle.score(model, records)[0])):
        del record["reward"]
        fill(draw, i, record, logprobs)
    return directory, model, records, write_records(records, folder / "records.jsonl")
