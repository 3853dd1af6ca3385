"""Shared prompts in plain PyTorch, in three phases under autograd: prompt forward, responses one by one, prompt backward.

    python bench/baselines/phased_autograd.py --model DIR --rollouts FILE [--threads N]

The keys and values of the prompt (all tokens but its last) cross between the phases as detached leaves: each response's
backward adds to their .grad, and one backward with those gradients goes through the prompt. Everything is transformers, SDPA
and autograd; what it pays is a concatenation of prompt and own keys in every layer of every response.
"""

import torch
import transformers

import workload


def path_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Causal attention of rows at the end of their keys: query [B, H, T, D], key [B, J, P + T, D]."""
    rows, columns = query.shape[2], key.shape[2]
    mask = None if rows == columns else torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
                                                           enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


class PathCache(transformers.DynamicCache):
    """Gives every layer the prompt's keys and values in front of its own, and remembers what it was given."""

    def __init__(self, path=None):
        super().__init__()
        self.path, self.seen = path, {}

    def update(self, key, value, layer, *_, **__):
        self.seen[layer] = (key, value)
        if self.path is None:
            return key, value
        return torch.cat((self.path[layer][0], key), 2), torch.cat((self.path[layer][1], value), 2)

    def get_seq_length(self, *_):
        return 0


def rows_of(model, ids, first_position, cache):
    positions = torch.arange(first_position, first_position + len(ids))[None]
    return model.model(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=cache, use_cache=True,
                       attention_mask=None).last_hidden_state[0]


def make_accumulate(records):
    groups = {}
    for record in records:
        groups.setdefault(tuple(record["prompt_ids"]), []).append(record)
    tokens = sum(len(record["response_ids"]) for record in records)

    def accumulate(model, clock):
        total = 0.0
        for prompt, group in groups.items():
            prompt, above = list(prompt), PathCache()
            leaves = None
            if len(prompt) > 1:
                with clock("forward"):
                    rows_of(model, prompt[:-1], 0, above)
                layers = sorted(above.seen)
                leaves = [tuple(t.detach().requires_grad_() for t in above.seen[layer]) for layer in layers]
            for record in group:
                response = record["response_ids"]
                with clock("forward"):
                    hidden = rows_of(model, prompt[-1:] + response[:-1], len(prompt) - 1, PathCache(leaves))
                    advantage = torch.full((len(response),), float(record["advantage"]))
                    loss = workload.policy_loss(model.lm_head(hidden), torch.tensor(response), advantage) / tokens
                with clock("backward"):
                    loss.backward()
                total += float(loss.detach())
            if leaves is not None:
                with clock("backward"):
                    outputs = [tensor for layer in layers for tensor in above.seen[layer]]
                    torch.autograd.backward(outputs, [leaf.grad for pair in leaves for leaf in pair])
        return total

    return accumulate


def main():
    options = workload.arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    transformers.AttentionInterface.register("espalier_path", path_attention)
    records = workload.read_rollouts(options.rollouts)
    workload.run(workload.load_model(options.model, "espalier_path"), make_accumulate(records), options, "phased_autograd")


if __name__ == "__main__":
    main()
