"""Losses that couple rollouts: the loss sees each set of coupled rollouts whole.

Sets that a plan keeps in one wave stay there. A set that the plan cuts runs twice. The first pass has no gradients through the model: the loss of the
whole set gives its derivative g_t by each log-prob lp_t (and entropy). In the step, each wave then adds sum_t g_t (lp_t - value of lp_t), whose
gradient is that of the loss by the chain rule.
"""

import operator

import torch

from espalier.errors import Error, Unsupported
from espalier.rows.waves import Wave


def checked(sets, rollouts):
    """Returns `sets` as lists of ints. Raises `Error` unless their members are indices below `rollouts`, each in at most one set. (`cut` leaves out
    rollouts without response tokens.)"""
    out, seen = [], set()
    for s, members in enumerate(sets):
        try:
            out.append([operator.index(i) for i in members])
        except TypeError:
            raise Error("option", f"sets[{s}]", "a list of indices of rollouts", repr(members)[:60], "", 2) from None
        for i in out[-1]:
            if not 0 <= i < rollouts or i in seen:
                raise Error("option", f"sets[{s}]", f"rollouts from 0 to {rollouts - 1}, each in one set", str(i), "", 2)
            seen.add(i)
    return out


def refuse_branches(records):
    """Raises `Unsupported` for a record that names a branch or says that its trajectory is one sequence: the caller's loss decides what trains."""
    for i, record in enumerate(records):
        if record.get("branch") is not None:
            raise Unsupported(f"rollouts[{i}]['branch']", "rollouts without branch: your loss would train tokens that branches have in common once per branch",
                              repr(record["branch"])[:60], "Give these tokens the loss 0 on all branches but one, and leave branch out; espalier.train has "
                              "shared_tokens for them")
        if record.get("loss_unit") == "trajectory":
            raise Unsupported(f"rollouts[{i}]['loss_unit']", "rollouts without loss_unit: your loss says what a sequence is", "'trajectory'",
                              "Give the rollouts of a trajectory as one of sets, so that loss(wave) sees them together, and leave loss_unit out")


def cut(sets, waves):
    """The sets whose rollouts finish in more than one of `waves`, lists of rollouts."""
    where = {rollout: number for number, wave in enumerate(waves) for rollout in wave}
    return [members for members in sets if len({where[i] for i in members if i in where}) > 1]


def whole(sets, rollouts):
    """Batches of rollouts that cut no set: the sets, then every other rollout alone."""
    return [sorted(members) for members in sets] + [[i] for i in sorted(set(range(rollouts)) - {i for members in sets for i in members})]


class TwoPass:
    """The loss of a wave if the plan cuts `sets`. `values`: {rollout: (log-probs, entropies)} of all rollouts of these sets."""

    def __init__(self, loss, sets, values):
        self.loss, self.weights, self.total = loss, {}, 0.0
        for members in sets:
            self._weigh(sorted(i for i in members if len(values[i][0])), values)

    def _weigh(self, members, values):
        leaves = [torch.cat([values[i][kind] for i in members]).requires_grad_() for kind in (0, 1)]
        lengths = [len(values[i][0]) for i in members]
        rollout = torch.cat([torch.full((n,), i) for i, n in zip(members, lengths)]).to(leaves[0].device)
        position = torch.cat([torch.arange(n) for n in lengths]).to(leaves[0].device)
        with torch.enable_grad():
            loss = self.loss(Wave(members, rollout, position, *leaves))
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        self.total = self.total + loss.detach()
        parts = [[None] * len(members) if grad is None else grad.split(lengths) for grad in grads]
        self.weights.update({i: weights for i, *weights in zip(members, *parts)})

    def __call__(self, wave):
        out, self.total = wave.logprobs.sum() * 0 + self.total, 0.0
        others = [i for i in wave.rollouts if i not in self.weights]
        for i in set(wave.rollouts) - set(others):
            at = wave.rollout == i
            for kind, weight in zip(("logprobs", "entropies"), self.weights[i]):
                if weight is not None:
                    values = getattr(wave, kind)[at]
                    out = out + (weight * (values - values.detach())).sum()
        if others:
            at = torch.isin(wave.rollout, torch.tensor(others, device=wave.rollout.device))
            out = out + self.loss(Wave(others, wave.rollout[at], wave.position[at], wave.logprobs[at], lambda: wave.entropies[at]))
        return out
