"""The load-balancing loss of a mixture of experts over logical tokens: a row that n rollouts share counts n times.

transformers computes it over the rows of one call, which here are not whole rollouts. As in its `load_balancing_loss_func`, the loss is over all
layers together. With p_re the router's softmax of row r (a token in a layer), E experts, and k chosen experts per row:

    A = E sum_e f_e P_e        f_e = (1/R) sum_r [e among the k largest of p_r]        P_e = (1/R) sum_r p_re

Scope "minibatch": R counts all rows of the step. Scope "rollout": A is computed over each rollout's own rows and averaged over rollouts, as in
a dense trainer with one rollout per micro-batch. f has no gradient, so a pass without gradients counts it first. Then A is linear in p, and
each item of the plan adds its rows' part.
"""

import sys

import numpy as np
import torch

from espalier.errors import Error, Unsupported
from espalier.hf.model_parts import base_model, decoder_config
from espalier.rows.transfer import to_device
from espalier.kernels import accumulator

SCOPES = ("rollout", "minibatch")


def probabilities(layer, chosen):
    """From one layer's logits: (p, 1 where an expert is among the row's `chosen` largest, else 0, in the accumulator type), [R, E] each."""
    p = layer.softmax(-1)
    return p, torch.zeros_like(p, dtype=accumulator(p.dtype)).scatter_(1, p.detach().topk(chosen, -1).indices, 1)


def experts_per_token(model):
    chosen, base = getattr(decoder_config(model), "num_experts_per_tok", None), base_model(model)
    if not chosen:
        raise Unsupported("router_aux_loss_coef", "a mixture of experts (config.num_experts_per_tok)", type(model).__name__)
    if not any(hasattr(sys.modules.get(kind.__module__), "load_balancing_loss_func") for kind in type(base).__mro__):
        raise Unsupported("router_aux_loss_coef", "a family for which transformers defines a load-balancing loss", type(base).__name__,
                          "Leave it out; DeepSeek's kind of router is balanced by a bias")
    return chosen


def logits_of(result):
    """The router's logits of every layer, [R, E] each, from the model's output."""
    logits = getattr(result, "router_logits", None)
    if not isinstance(logits, (tuple, list)) or not logits:
        raise Unsupported("router_aux_loss_coef", "router_logits among what the model returns", "none")
    return [x.flatten(0, -2) for x in logits]


class RowSums:
    """Sums over the rows of one call of the model, in all layers. `rows`: L R. `counts` [E]: how often each expert was chosen. `sums` [E]: the
    sum of p, differentiable."""

    def __init__(self, logits, chosen):
        self.rows, self.counts, self.sums = 0, 0, 0
        for layer in logits:
            p, taken = probabilities(layer, chosen)
            self.rows += len(p)
            self.counts = self.counts + taken.sum(0)
            self.sums = self.sums + p.to(taken.dtype).sum(0)


def load_balancing(parts):
    """A over the rows of `parts`, a list of (how often its rows count, RowSums, its `sums` or a leaf that replaces them)."""
    total = lambda values: sum(times * value for (times, *_), value in zip(parts, values))
    rows = total(part.rows for _, part, _ in parts)
    f, p = total(part.counts for _, part, _ in parts) / rows, total(sums for *_, sums in parts) / rows
    return len(f) * (f * p).sum()


class RouterLoss:
    """Call `count` for all rows, then `settle`, then `term` for all rows. `value`, set by `settle`, is coef * A."""

    def __init__(self, model, rollouts, coef, scope):
        if scope not in SCOPES:
            raise Error("option", "router_aux_loss_scope", " or ".join(SCOPES), repr(scope), "", 2)
        self.coef, self.scope, self.lengths = float(coef), scope, rollouts.lengths
        self.chosen = experts_per_token(model)
        self.layers = 0
        self.rows = np.zeros(len(rollouts), np.int64)
        self.counts = self.sums = self.weights = None  # [N, E]

    @torch.no_grad()
    def count(self, logits, runs):
        """Counts the rows of a call. `runs`: (begin, end, rollouts), the rollouts that run through rows [begin, end)."""
        wide = accumulator(logits[0].dtype)
        if self.counts is None:
            self.counts, self.sums = torch.zeros(2, len(self.lengths), logits[0].shape[-1], dtype=wide, device=logits[0].device)
            self.layers = len(logits)
        places = to_device(logits[0].device, *(rollouts for _, _, rollouts in runs))
        for layer in logits:
            p, taken = probabilities(layer, self.chosen)
            for (begin, end, _), at in zip(runs, places):
                self.counts[at] += taken[begin:end].sum(0)
                self.sums[at] += p[begin:end].to(wide).sum(0)
        for begin, end, rollouts in runs:
            self.rows[rollouts] += end - begin

    def settle(self):
        if (self.rows != self.lengths).any():
            raise Error("internal", "router_aux_loss_coef", "every token of every rollout once", "another number of rows", "Please report this")
        experts = self.counts.shape[1]
        if self.scope == "minibatch":
            r = self.layers * int(self.lengths.sum())
            self.weights = (self.counts.sum(0) * (experts / r**2)).expand_as(self.counts)
        else:
            r = torch.as_tensor(self.layers * self.lengths, device=self.counts.device).to(self.counts.dtype)[:, None]
            self.weights = self.counts * experts / r**2 / len(self.lengths)
        self.value = self.coef * float((self.weights * self.sums).sum())

    def term(self, logits, runs):
        """coef times the part of A that these rows contribute, differentiable."""
        wide, out = self.weights.dtype, 0.0
        weights = torch.zeros(logits[0].shape, dtype=wide, device=logits[0].device)
        for (begin, end, _), at in zip(runs, to_device(weights.device, *(rollouts for _, _, rollouts in runs))):
            weights[begin:end] = self.weights[at].sum(0)
        for layer in logits:
            out = out + (layer.softmax(-1).to(wide) * weights).sum()
        return self.coef * out


def runs_of(item):
    """[(begin, end, rollouts)] for the rows of a plan's item: the rollouts that run through rows [begin, end)."""
    return [(row, row + end - begin, item.rollouts[first:last]) for _, begin, end, row, _, _, first, last in item.segments.tolist()]
