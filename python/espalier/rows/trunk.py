"""Open trunks, and the rows of a call that stand below them."""

import functools
from dataclasses import dataclass, field

import numpy as np
import torch

from espalier.kernels import accumulator


class Trunk:
    """Keys and values of shared rows by layer, [1, J, P, D], and the sums of their gradients, [P, J, D] (float32; float64 in float64).

    It also holds the state behind its last row, one for each mixer, and the keys of indexers, which get no gradient (indexed.py).
    """

    def __init__(self, rows):
        self.rows = rows
        self.k, self.v, self.live, self.dk, self.dv = {}, {}, {}, {}, {}
        self.states, self.live_states, self.dstates = {}, {}, {}
        self.index_keys = {}

    def take(self, layer, k, v):
        """Stores detached keys and values of a layer, from the first forward. Under autograd, `live` holds the tensors with their graph, from
        the latest forward, for the trunk's backward."""
        if layer not in self.k:
            self.k[layer], self.v[layer] = k.detach(), v.detach()
        if torch.is_grad_enabled():
            self.live[layer] = (k, v)

    def sums(self, layer):
        """The sums dk and dv of a layer, zero before anything is added to them."""
        if layer not in self.dk:
            for x, sums in ((self.k[layer], self.dk), (self.v[layer], self.dv)):
                _, j, p, d = x.shape
                sums[layer] = torch.zeros(p, j, d, dtype=accumulator(x.dtype), device=x.device)
        return self.dk[layer], self.dv[layer]

    def take_state(self, key, state):
        """The same as `take`, for the state of a mixer."""
        if key not in self.states:
            self.states[key] = state.detach()
        if torch.is_grad_enabled():
            self.live_states[key] = state

    def add_state_gradient(self, key, gradient):
        wide = accumulator(gradient.dtype)
        if key not in self.dstates:
            self.dstates[key] = torch.zeros(gradient.shape, dtype=wide, device=gradient.device)
        self.dstates[key] += gradient

    def gathered(self):
        """[tensor, gradient, tensor, gradient, ...] for a Seed: live tensors that require a gradient, and the sums gathered for them."""
        states = [part for key, live in self.live_states.items() if key in self.dstates and live.requires_grad
                  for part in (live, self.dstates[key].to(live.dtype))]
        return states + [part for layer, live in self.live.items() if layer in self.dk for x, sums in zip(live, (self.dk[layer], self.dv[layer]))
                if x.requires_grad for part in (x, sums.transpose(0, 1).to(x.dtype)[None])]


@dataclass
class RowSet:
    """Rows [begin, end) of a call that stand below the same trunks and see all of their rows. `runs`: (begin, length, subtree end) of the causal
    runs that make up the set. Rows of a run are visible to later rows of the run, and to all rows behind it before its subtree end."""
    begin: int
    trunks: tuple
    runs: list = field(default_factory=list)
    on_device: dict = field(default_factory=dict, repr=False, compare=False)  # what kernels read of all sets of a call, by device

    @property
    def end(self):
        return self.runs[-1][0] + self.runs[-1][1]

    @functools.cached_property
    def segments(self):
        """(begin, length, parent, depth) of every run. `parent`: the run that its first row continues, -1 for the last trunk; `depth`: that row's
        position in its rollout."""
        out, open_runs = [], []
        for begin, length, _ in self.runs:
            while open_runs and self.runs[open_runs[-1]][2] <= begin:
                open_runs.pop()
            parent = open_runs[-1] if open_runs else -1
            depth = out[parent][3] + out[parent][1] if open_runs else sum(trunk.rows for trunk in self.trunks)
            out.append((begin, length, parent, depth))
            open_runs.append(len(out) - 1)
        return out

    @functools.cached_property
    def depths(self):
        """The depth of every row."""
        return np.concatenate([np.arange(depth, depth + length) for _, length, _, depth in self.segments])


def trunks_of(sets):
    """The trunks above the rows of a call, each once. The keys of a call are ordered so: the trunks' keys, then the rows' own."""
    return list({id(trunk): trunk for rows in sets for trunk in rows.trunks}.values())


def visible(sets, device):
    """bool [1, 1, T, S]: true where row t of a call sees key s."""
    trunks = trunks_of(sets)
    begins = dict(zip(map(id, trunks), np.cumsum([0, *(trunk.rows for trunk in trunks)])))
    above, t = sum(trunk.rows for trunk in trunks), sets[-1].end
    seen = np.zeros((t, above + t), dtype=bool)
    for rows in sets:
        for trunk in rows.trunks:
            seen[rows.begin:rows.end, begins[id(trunk)]:begins[id(trunk)] + trunk.rows] = True
        for begin, length, end in rows.runs:
            seen[begin:end, above + begin:above + begin + length] = True
    seen[:, above:] &= np.tri(t, dtype=bool)
    return torch.from_numpy(seen)[None, None].to(device)
