"""Shared prompts in plain PyTorch: all rows of a group in one pass, attention in two calls, under autograd.

    python bench/baselines/two_call_sdpa.py --model DIR --rollouts FILE [--threads N]

Products, norms and the MLP see the prompt once and all responses beside it. Attention is one causal call for the prompt's rows
and one batched call for the responses, whose keys are the prompt's, repeated for every response, and their own: nothing is
hidden by a mask that is as wide as the group. Responses of a group have equal lengths.
"""

import torch
import transformers

import workload
from packed_sdpa import make_accumulate

LAYOUT = {}  # of the group in work: prompt rows and responses


def two_calls(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    prompt, n = LAYOUT["prompt"], LAYOUT["n"]
    sdpa = lambda *x, **options: torch.nn.functional.scaled_dot_product_attention(*x, scale=scaling, enable_gqa=True, **options)
    above = sdpa(*(x[:, :, :prompt] for x in (query, key, value)), is_causal=True)
    own = lambda x: x[0, :, prompt:].unflatten(1, (n, -1)).transpose(0, 1)  # [n, heads, rows of a response, D]
    whole = lambda x: torch.cat((x[:, :, :prompt].expand(n, -1, -1, -1), own(x)), 2)
    rows = own(query).shape[2]
    mask = torch.ones(rows, prompt + rows, dtype=torch.bool).tril(prompt)
    below = sdpa(own(query), whole(key), whole(value), attn_mask=mask)
    out = torch.cat((above, below.transpose(0, 1).flatten(1, 2)[None]), 2)
    return out.transpose(1, 2).contiguous(), None


def main():
    options = workload.arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    transformers.AttentionInterface.register("espalier_two_calls", two_calls)
    records = workload.read_rollouts(options.rollouts)
    accumulate = make_accumulate(records, before=lambda prompt, n: LAYOUT.update(prompt=prompt, n=n), masked=False)
    workload.run(workload.load_model(options.model, "espalier_two_calls"), accumulate, options, "two_call_sdpa")


if __name__ == "__main__":
    main()
