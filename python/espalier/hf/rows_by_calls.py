"""One layer's attention of a call in a GPU's fused kernels: one call for all causal runs of the rows, whatever their number and lengths, and one for
the keys and values of each open trunk, merged by log-sum-exp.

Runs that fork off a run of their own set see its rows, too. If these are few, they stand before the keys of every run below, in the first call; else
the forks of a level, none of which is below another, take one more call, over the rows below them. So the number of calls follows the depth of the
tree, not the number of forks.

Interface: rows_by_kernel.py, with the kernels as first argument: `attend(q, k, v, runs, scale)` and `attend_backward(...)` of rows_by_flash.py or
rows_by_efficient.py. Inside, rows are [T, H, D] and [T, J, D], lse is [H, T]; a backward takes the merged out and lse of the whole softmax, so that
the gradients of its calls add up exactly (blocks.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from espalier.hf.transfer import queued, to_device
from espalier.ops.kernels import accumulator


def count(runs, trunks):
    """How many calls of a kernel a set of rows takes."""
    return 1 + trunks + len(_levels(_chosen(_forks(runs), sum(length for _, length, _ in runs))[1]))


def forward(kernels, q, k, v, scale, sets, layer):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    plan = _plan(sets, q.device)
    out, lse = kernels.attend(q, *(plan.seen(x) for x in (k, v)), plan.runs, scale)
    calls = _calls(plan, sets, layer, k, v)
    if calls:
        out = out.to(accumulator(q.dtype))
    for call in calls:
        more = kernels.attend(call.of(q), call.k, call.v, call.runs, scale)
        if isinstance(call.rows, slice):
            _merge(out[call.rows], lse[:, call.rows], *more)
        else:
            part, of_part = call.of(out), lse.index_select(1, call.rows)
            _merge(part, of_part, *more)
            out.index_copy_(0, call.rows, part)
            lse.index_copy_(1, call.rows, of_part)
    return out.to(q.dtype)[None], lse


def backward(kernels, go, q, k, v, out, lse, scale, sets, layer):
    go, out = go[0], out[0]
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    plan = _plan(sets, q.device)
    dq, *own = kernels.attend_backward(go, q, *(plan.seen(x) for x in (k, v)), out, lse, plan.runs, scale)
    if plan.places is not None:  # several runs may see a row
        own = [torch.zeros(k.shape[0], *x.shape[1:], dtype=accumulator(x.dtype), device=x.device).index_add_(0, plan.places, x.to(accumulator(x.dtype)))
               for x in own]
    calls = _calls(plan, sets, layer, k, v)
    if len(calls) > 1:  # two numbers are added and rounded once in any type
        dq = dq.to(accumulator(q.dtype))
    for call in calls:
        of_lse = lse[:, call.rows].contiguous() if isinstance(call.rows, slice) else lse.index_select(1, call.rows)
        more_q, *more = kernels.attend_backward(*(call.of(x) for x in (go, q)), call.k, call.v, call.of(out), of_lse, call.runs, scale)
        _add(dq, call.rows, more_q)
        for sums, part in zip(call.trunk.sums(layer) if call.trunk else own, more):
            _add(sums, call.keys, part)
    return [x.to(q.dtype).transpose(0, 1)[None] for x in (dq, *own)]


@dataclass(eq=False)
class Runs:
    """Sequences of the rows, one behind the other: where each begins and the last ends (int32, on the device), the same of the keys that each sees,
    and the longest of both. `lengths`: those of the rows, on the host. `causal`: the last row stands at the last key; else each sees all.
    `held`: what else kernels read of them."""
    ends: torch.Tensor
    ends_of_keys: torch.Tensor
    longest: int
    longest_keys: int
    lengths: list
    causal: bool = True
    held: dict = field(default_factory=dict)

    @property
    def see_others(self):
        """Whether a run sees keys before its own."""
        return self.ends_of_keys is not self.ends


def runs_of(device, lengths, of_keys=None, causal=True):
    """Sequences of these lengths; without `of_keys` each sees itself alone."""
    both = [lengths, *([of_keys] if of_keys is not None else [])]
    ends = list(queued(torch.tensor([[0, *side] for side in both]).cumsum(1, dtype=torch.int32), device))
    return Runs(ends[0], ends[-1], max(both[0]), max(both[-1]), lengths, causal)


class _Level(NamedTuple):
    """Forks none of which is below another. `rows`: those below them, `keys`: their own, slices or, of several forks, places on the device."""
    rows: slice | torch.Tensor
    keys: slice | torch.Tensor
    runs: Runs | None


class _Plan(NamedTuple):
    """`places`: of the keys that the runs of the first call see, among the rows; None: each its own."""
    runs: Runs
    places: torch.Tensor | None
    levels: list

    def seen(self, x):
        return x if self.places is None else x.index_select(0, self.places)


class _Fork(NamedTuple):
    """Rows [begin, middle), which those of [middle, end) see: so many runs."""
    begin: int
    middle: int
    end: int
    runs: int

    @property
    def copies(self):
        return (self.middle - self.begin) * self.runs


def _plan(sets, device):
    """Made once for all layers of a call."""
    held = sets[0].on_device
    if device not in held:
        held[device] = _make_plan([run for rows in sets for run in rows.runs], device)
    return held[device]


def _make_plan(runs, device):
    lengths = [length for _, length, _ in runs]
    copied, rest = _chosen(_forks(runs), sum(lengths))
    levels = [_level(level, device) for level in _levels(rest)]
    if not copied:
        return _Plan(runs_of(device, lengths), None, levels)
    keys, above, of_run = [], [], {fork.begin: fork for fork in copied}
    for begin, length, _ in runs:
        above = [fork for fork in above if fork.end > begin]
        keys.append(np.concatenate([*(np.arange(fork.begin, fork.middle) for fork in above), np.arange(begin, begin + length)]))
        if begin in of_run:
            above.append(of_run[begin])
    places, = to_device(device, np.concatenate(keys))
    return _Plan(runs_of(device, lengths, [len(own) for own in keys]), places, levels)


def _forks(runs):
    """The runs with rows below them, in their order."""
    begins = [begin for begin, _, _ in runs]
    return [_Fork(begin, begin + length, end, int(np.searchsorted(begins, end)) - i - 1)
            for i, (begin, length, end) in enumerate(runs) if end > begin + length]


def _chosen(forks, most):
    """(those whose rows are copied for every run below them, the others): the cheapest, with no more copies than there are rows."""
    copied, copies = set(), 0
    for fork in sorted(forks, key=lambda fork: fork.copies):
        copies += fork.copies
        if copies > most:
            break
        copied.add(fork)
    return [fork for fork in forks if fork in copied], [fork for fork in forks if fork not in copied]


def _levels(forks):
    """Forks by how many of them are above."""
    levels, above = [], []
    for fork in forks:
        above = [each for each in above if each.end > fork.begin]
        if len(above) == len(levels):
            levels.append([])
        levels[len(above)].append(fork)
        above.append(fork)
    return levels


def _level(forks, device):
    if len(forks) == 1:
        return _Level(slice(forks[0].middle, forks[0].end), slice(forks[0].begin, forks[0].middle), None)
    places = to_device(device, *(np.concatenate([np.arange(*ends) for ends in each]) for each in (
        [(fork.middle, fork.end) for fork in forks], [(fork.begin, fork.middle) for fork in forks])))
    return _Level(*places, runs_of(device, [fork.end - fork.middle for fork in forks], [fork.middle - fork.begin for fork in forks], causal=False))


class _Call(NamedTuple):
    """`rows` see the keys and values: a trunk's, or those of the call's own rows `keys`, of which with `runs` each sequence its own."""
    rows: slice | torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: slice | torch.Tensor
    runs: Runs | None = None
    trunk: object = None

    def of(self, x):
        return _taken(x, self.rows)


def _calls(plan, sets, layer, k, v):
    found = []
    for rows in sets:
        for trunk in rows.trunks:
            above = (held[layer][0].transpose(0, 1) for held in (trunk.k, trunk.v))
            found.append(_Call(slice(rows.begin, rows.end), *above, slice(None), trunk=trunk))
    return found + [_Call(level.rows, *(_taken(x, level.keys) for x in (k, v)), level.keys, level.runs) for level in plan.levels]


def _taken(x, rows):
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(sums, rows, part):
    """No row is twice among `rows`."""
    if isinstance(rows, slice):
        sums[rows].add_(part)
    else:
        sums.index_add_(0, rows, part.to(sums.dtype))


def _merge(out, lse, more, more_lse):
    """Two softmaxes over different keys are one over both: out += w (more - out), w = exp(lse_2) / (exp(lse_1) + exp(lse_2)), in place."""
    weight = torch.sigmoid(more_lse - lse).T[..., None]
    out.lerp_(more.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, more_lse))
