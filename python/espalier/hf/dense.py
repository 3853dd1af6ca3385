"""A step by transformers alone: every rollout with its prompt. A call runs several rollouts, padded to one length."""

import contextlib

import numpy as np
import torch

from espalier.hf import implementation, ranks, routes
from espalier.rows.head import TokenStatistics
from espalier.hf.routers import logits_of
from espalier.hf.calls import backward
from espalier.rows.waves import Wave
from espalier.rows.transfer import Total, to_device


def run(model, rollouts, loss, temperature, batches, router=None):
    """Adds the gradients of the sum over `batches` (lists of rollouts) of `loss(wave)`. Returns the DenseRun."""
    out = DenseRun(model, rollouts, loss, temperature, router)
    program = [("F", lambda batch=batch: out.count(batch)) for batch in batches if router]
    program += [("", router.settle)] if router else []
    program += [step for batch in batches for step in (("F", lambda batch=batch: out.forward(batch)), ("B", out.backward))]
    with implementation.users_own(model), routes.installed(model, rollouts.routes is not None):
        ranks.run(out.model, program, out.device)
    return out


def batches_of(lengths, tokens):
    """Batches of rollouts of similar length, each with at most `tokens` tokens including padding (a longer rollout alone); each list ascending."""
    out = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if out and (len(out[-1]) + 1) * int(lengths[i]) <= tokens:
            out[-1].append(i)
        else:
            out.append([i])
    return [sorted(batch) for batch in out]


class DenseRun:
    """`total`: the loss so far; `rows`: token rows run, without padding; `waves`: calls of the model."""

    def __init__(self, model, rollouts, loss, temperature, router=None):
        self.model, self.router = ranks.without_replicas(model), router
        self.rollouts, self.loss, self.temperature = rollouts, loss, temperature
        self.device = ranks.device_of(self.model)
        self.losses, self.rows, self.waves, self.pending = Total(), 0, 0, None

    @property
    def total(self):
        return float(self.losses)

    def _call(self, batch):
        """Calls the model on a batch that is padded on the right; a causal model's earlier rows do not see the padding. Returns the model's output,
        (begin, end, [rollout]) of each rollout's rows, and the first position that has logits."""
        r = self.rollouts
        longest = max(int(r.lengths[i]) for i in batch)
        first = min(len(r.prompts[i]) for i in batch) - 1
        ids = np.zeros((len(batch), longest), np.int64)
        for row, i in enumerate(batch):
            ids[row, :int(r.lengths[i])] = r.tokens(i, 0, int(r.lengths[i]))
        more = {"output_router_logits": True} if self.router else {}
        if r.images is not None:  # a batch with images is one rollout
            more.update(r.images.dense_inputs(batch[0], longest))
        record = None
        if r.routes is not None:
            parts = [part for i in batch for part in ((i, 0, int(r.lengths[i])), (None, int(r.lengths[i]), longest))]
            record = more[routes.KEYWORD] = routes.of_call(r.routes, parts, self.device)
        with record.forward() if record is not None else contextlib.nullcontext():
            result = self.model(input_ids=to_device(self.device, ids)[0], use_cache=False, logits_to_keep=longest - first, **more)
        return result, [(row * longest, row * longest + int(r.lengths[i]), [i]) for row, i in enumerate(batch)], first

    @torch.no_grad()
    def count(self, batch):
        result, runs, _ = self._call(batch)
        self.router.count(logits_of(result), runs)

    def forward(self, batch):
        r = self.rollouts
        result, runs, first = self._call(batch)
        self.rows += int(r.lengths[batch].sum())
        self.waves += 1
        logits = result.logits[:, -(max(int(r.lengths[i]) for i in batch) - first):]  # some models return the logits of all positions
        members = [i for i in batch if len(r.responses[i])]
        place, target, owner, position = [], [], [], []
        for row, i in enumerate(batch):
            prompt, length = len(r.prompts[i]), len(r.responses[i])
            place += [row * logits.shape[1] + prompt - 1 - first + t for t in range(length)]
            target += r.responses[i].tolist()
            owner += [i] * length
            position += list(range(length))
        sets = r.sets_of(owner, position, self.device)
        place, target, owner, position = to_device(self.device, place, target, owner, position)
        values = TokenStatistics.apply(logits.flatten(0, 1), place, target, float(self.temperature), True, sets)
        out = logits.sum() * 0
        if members:
            loss = self.loss(Wave(members, owner, position, *values))
            self.losses.add(loss)
            out = out + loss
        if self.router:
            out = out + self.router.term(logits_of(result), runs)
        self.pending = out if out.requires_grad else None

    def backward(self):
        backward(self.pending)
        self.pending = None
