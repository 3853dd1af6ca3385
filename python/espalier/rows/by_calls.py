"""One layer's attention of a call in a GPU's fused kernels: one kernel call for all causal runs of the rows, whatever their number and lengths, and one
for the keys and values of each open trunk, merged by log-sum-exp.

Runs that fork off a run of their own set also see its rows. If these rows are few, the first call copies them before the keys of every run below.
Otherwise each level of forks takes one more call over the rows below them; no fork of a level is below another. So the number of calls depends on
the depth of the tree, not on the number of forks.

The interface is that of by_kernel.py, with the module of the kernels as first argument: by_flash.py or by_efficient.py, which define
`attend(q, k, v, runs, scale)` and `attend_backward(...)`. Inside, rows are [T, H, D] and [T, J, D], and lse is [H, T]. A backward takes the merged out
and lse of the whole softmax, so that the gradients of its calls add up exactly (blocks.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from espalier.rows.transfer import queued, to_device
from espalier.kernels import accumulator


def count(runs, trunks):
    """The number of kernel calls for a set of rows. `trunks`: the number of trunks above it."""
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
    if plan.places is not None:  # a row may have several copies, whose gradients are summed
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
    """Sequences of rows, end to end, and the keys that each sequence sees. `ends`, `ends_of_keys`: the begin of each sequence, then the end of the
    last one, int32 on the device. `longest`, `longest_keys`: the largest lengths. `lengths`: of the rows, on the host. `causal`: the last row of a
    sequence sees its last key, earlier rows one key less each; otherwise every row sees all keys. `held`: further arrays that kernels read."""
    ends: torch.Tensor
    ends_of_keys: torch.Tensor
    longest: int
    longest_keys: int
    lengths: list
    causal: bool = True
    held: dict = field(default_factory=dict)

    @property
    def see_others(self):
        """True if a run sees keys that are not its own."""
        return self.ends_of_keys is not self.ends


def runs_of(device, lengths, of_keys=None, causal=True):
    """Runs of rows with these lengths and keys with the lengths `of_keys`; without `of_keys`, each sequence sees its own keys only."""
    both = [lengths, *([of_keys] if of_keys is not None else [])]
    ends = list(queued(torch.tensor([[0, *side] for side in both]).cumsum(1, dtype=torch.int32), device))
    return Runs(ends[0], ends[-1], max(both[0]), max(both[-1]), lengths, causal)


class _Level(NamedTuple):
    """Forks of which none is below another. `rows`: the rows below them. `keys`: their own rows. One fork: slices; several: indices on the device."""
    rows: slice | torch.Tensor
    keys: slice | torch.Tensor
    runs: Runs | None


class _Plan(NamedTuple):
    """`places`: indices of the rows whose keys the runs of the first call see. None: each run sees its own keys only."""
    runs: Runs
    places: torch.Tensor | None
    levels: list

    def seen(self, x):
        return x if self.places is None else x.index_select(0, self.places)


class _Fork(NamedTuple):
    """Rows [begin, middle) are seen by rows [middle, end), which are `runs` runs."""
    begin: int
    middle: int
    end: int
    runs: int

    @property
    def copies(self):
        return (self.middle - self.begin) * self.runs


def _plan(sets, device):
    """The _Plan of a call, computed once for all layers."""
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
    """The runs with rows below them, in order."""
    begins = [begin for begin, _, _ in runs]
    return [_Fork(begin, begin + length, end, int(np.searchsorted(begins, end)) - i - 1)
            for i, (begin, length, end) in enumerate(runs) if end > begin + length]


def _chosen(forks, most):
    """(forks whose rows are copied for every run below them, the other forks). The cheapest are copied, with at most `most` row copies in all."""
    copied, copies = set(), 0
    for fork in sorted(forks, key=lambda fork: fork.copies):
        copies += fork.copies
        if copies > most:
            break
        copied.add(fork)
    return [fork for fork in forks if fork in copied], [fork for fork in forks if fork not in copied]


def _levels(forks):
    """The forks by level: the number of forks above them."""
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
    """`rows` see the keys and values `k`, `v`: of `trunk`, or of the call's own rows `keys`. With `runs` each sequence sees its own part of them."""
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
    """Adds `part` to `sums` at `rows`, which contain no row twice."""
    if isinstance(rows, slice):
        sums[rows].add_(part)
    else:
        sums.index_add_(0, rows, part.to(sums.dtype))


def _merge(out, lse, more, more_lse):
    """Merges two softmaxes over different keys into one over both, in place: out += w (more - out), w = exp(lse_2) / (exp(lse_1) + exp(lse_2))."""
    weight = torch.sigmoid(more_lse - lse).T[..., None]
    out.lerp_(more.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, more_lse))
