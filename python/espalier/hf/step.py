"""The phases of one step: trunks forward, everything below them, trunks backward.

Items of a plan are in depth-first order. A trunk runs forward once. Its keys, values and log-probs stay readable while the items below it
run, and the gradients of those items are summed for it. Then one backward through the trunk's graph (kept, or rebuilt) uses the sums.
"""

import contextlib
import functools

import numpy as np
import torch

from espalier.errors import Error
from espalier.hf import ranks, routes, towers, trunk_state as states
from espalier.hf.attention import Phase
from espalier.hf.calls import Seed, backward, call_model
from espalier.hf.checks import check_captured, check_live
from espalier.rows.head import TokenStatistics
from espalier.hf.routers import logits_of, runs_of
from espalier.rows.transfer import Total, to_device
from espalier.rows.trunk import Trunk
from espalier.rows.waves import TrunkTokens, tokens_of, wave_of


class OpenTrunk(TrunkTokens):
    """A trunk between its forward and its backward."""

    def __init__(self, index, item, kv, edges):
        super().__init__(edges)
        self.index, self.item, self.kv = index, item, kv
        self.logits, self.logprobs, self.entropies = None, None, None  # with the graph of the latest forward
        self.router_term = None  # the same

    def keep(self, logits, logprobs, entropies):
        self.logits, self.logprobs, self.entropies = logits, logprobs, entropies
        if logprobs is not None:
            super().keep(logprobs, entropies)


class Executor:
    """Runs a plan on a model. Calls `loss(wave)` once for each wave with finished responses and adds the gradients of what it returns. Without
    `loss` it runs forward only and calls `seen(wave)`.

    `trunk_state`: what a trunk keeps for its backward (trunk_state.py). `router`: a RouterLoss; with `loss` its terms are added, without `loss` its
    counts are taken. `through_everything`: a trunk's backward also passes every layer and the head, with zeros, so that the hooks of a sharding
    wrapper fire in every module.
    """

    def __init__(self, model, rollouts, plan, *, loss=None, seen=None, temperature=1.0, through_everything=False, router=None,
                 trunk_state="keep"):
        self.model, self.rollouts, self.plan, self.router = model, rollouts, plan, router
        self.loss, self.seen, self.temperature = loss, seen, temperature
        self.through_everything = through_everything
        self.offloads, self.by_layers = trunk_state == "offload", trunk_state == "recompute" and states.by_layers(model)
        self.device = ranks.device_of(model)
        self.regime = int(rollouts.lengths.max())
        self.tower = towers.Tower(rollouts.images, loss is not None) if rollouts.images is not None else None
        self.open, self.losses, self.rows, self.waves, self.pending = [], Total(), 0, 0, None

    @property
    def total(self):
        """The sum of the waves' losses. The host waits for the device here and in no wave."""
        return float(self.losses)

    def program(self, with_towers=False):
        """The step as a list of (letter, action): "F" for a forward, "B" for a backward, "" for work without a call of the model. Ranks that share
        layers run equal sequences of letters (ranks.py). `with_towers`: the caller runs the vision tower after the program (towers.ShardedTower)."""
        out, gradients = [], self.loss is not None
        last = {} if with_towers else self._last_with_images()
        for item in self.plan.items:
            self._image_blocks(item)  # refuses an image that a trunk cuts before anything runs
        for forward, index in self.plan.program():
            item = self.plan.items[index]
            if forward:
                out.append(("F", functools.partial(self.forward_trunk if item.trunk else self.forward_wave, index)))
                continue
            if item.trunk and gradients and self._runs_again(item):
                out.append(("F", self.forward_again))
            if gradients:
                out.append(("B", self.backward_trunk if item.trunk else self.backward_wave))
            elif item.trunk:
                out.append(("", self.forget_trunk))
            if last.get(index):
                out.append(("", functools.partial(self.finish_images, last[index])))
        return out

    # ---- one call of the model ------------------------------------------------------------------------------------------

    def _call(self, item, edges, trunks, captures=None, more_arrays=()):
        """Calls the model for an item. Returns the logits [O, V] of the rows with edges (of one row if there are none), each edge's index into them,
        target and kept sets, the router's term, and `more_arrays` on the device."""
        ids = np.concatenate([self.rollouts.tokens(r, begin, end) for r, begin, end, *_ in item.segments.tolist()])
        positions, more = self._positions(item), {"output_router_logits": True} if self.router else {}
        parts = self._image_rows(item)
        if parts:
            more["mm_encoder_outputs"] = self.tower.of_rows(parts)
        outputs, place = np.unique(edges[:, 0], return_inverse=True)
        if not len(outputs):
            outputs = np.array([item.rows - 1])
        longest = max(end for _, _, end, *_ in item.segments.tolist())
        record = self._record(item)
        if record is not None:
            more[routes.KEYWORD] = record
        phase = Phase.of_runs(item.runs, trunks, longest, captures, self.regime, self._image_blocks(item))
        ids, positions, outputs, place, targets, *more_arrays = to_device(
            self.device, ids, positions, outputs, place, self._targets(edges), *more_arrays)
        with phase.forward(self.model), record.forward() if record is not None else contextlib.nullcontext():
            logits, result = call_model(self.model, ids[None], positions[..., None, :], phase, outputs, **more)
        sets = self.rollouts.sets_of(edges[:, 2], edges[:, 3], self.device)
        return logits, (place, targets, sets), self._router_term(result, item), more_arrays

    def _targets(self, edges):
        return self.rollouts.targets(edges[:, 1])

    def _record(self, item):
        """The recorded experts of an item's rows, or None."""
        if self.rollouts.routes is None:
            return None
        return routes.of_call(self.rollouts.routes, [(self._place(r), begin, end) for r, begin, end, *_ in item.segments.tolist()], self.device)

    def _positions(self, item):
        """The position ids of an item's rows: [T], or [3, T] with M-RoPE."""
        if self.tower is None:
            return np.concatenate([np.arange(begin, end) for _, begin, end, *_ in item.segments.tolist()])
        of = self.rollouts.images.positions
        counted = np.concatenate([of(self._place(r), begin, end) for r, begin, end, *_ in item.segments.tolist()], 1)
        return counted if len(counted) > 1 else counted[0]

    def _place(self, rollout):
        return int(self.rollouts.places(np.array([rollout]))[0])

    def _image_rows(self, item):
        """[(index of the tower's inputs, begin, end of rows of their features)] of an item's image tokens, in order."""
        if self.tower is None:
            return []
        return [part for r, begin, end, *_ in item.segments.tolist() for part in self.rollouts.images.rows(self._place(r), begin, end)]

    def _image_blocks(self, item):
        """[(begin, end)] of an item's rows that see each other."""
        if self.tower is None:
            return []
        found = [(row - begin, self.rollouts.images.blocks(self._place(r), begin, end)) for r, begin, end, row, *_ in item.segments.tolist()]
        return [(b + shift, e + shift) for shift, blocks in found for b, e in blocks]

    def _last_with_images(self):
        """{item: indices of the tower's inputs whose rows no later item has}. A trunk counts as later than all items below it."""
        if self.tower is None:
            return {}
        ends = list(range(len(self.plan.items)))
        for index in reversed(ends[:]):
            parent = self.plan.items[index].parent
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[index])
        last = {}
        for index in sorted(range(len(ends)), key=lambda index: (ends[index], -index)):
            last.update({which: index for which, *_ in self._image_rows(self.plan.items[index])})
        return {index: [which for which, at in last.items() if at == index] for index in set(last.values())}

    def finish_images(self, which):
        pairs = self.tower.finish(which)
        if pairs:
            backward(Seed.apply(*pairs))

    def _router_term(self, result, item):
        if self.router is None:
            return None
        runs = [(begin, end, self.rollouts.places(rollouts)) for begin, end, rollouts in runs_of(item)]
        if self.loss is None:
            return self.router.count(logits_of(result), runs)
        return self.router.term(logits_of(result), runs) if torch.is_grad_enabled() else None

    def _statistics(self, logits, edges, with_entropy):
        place, target, sets = edges
        return TokenStatistics.apply(logits, place, target, float(self.temperature), with_entropy, sets)

    # ---- trunks ---------------------------------------------------------------------------------------------------------

    def forward_trunk(self, index):
        item = self.plan.items[index]
        trunk = OpenTrunk(index, item, Trunk(item.rows), self.plan.edges(index))
        self._run_trunk(trunk, torch.is_grad_enabled() and self.loss is not None and not self._runs_again(item))
        check_captured(self.model, trunk.kv)
        self.rows += item.rows
        self.open.append(trunk)
        if len(item.finished):
            wave, leaves = self._wave(item, to_device(self.device, *self._tokens(item, trunk.edges[:0])), None, None)
            self._deliver(wave, leaves)

    def _runs_again(self, item):
        """True if a trunk's whole forward runs once more before its backward."""
        return item.recompute and not self.by_layers

    def _saving(self, trunk, gradients):
        """Context manager for a trunk's call: decides what autograd saves."""
        if not gradients or not (self.offloads or self.by_layers):
            return contextlib.nullcontext()
        return states.Offload(self.model, trunk.kv) if self.offloads else states.layers_checkpointed(self.model)

    def forward_again(self):
        self._run_trunk(self.open[-1], True)

    def _run_trunk(self, trunk, gradients):
        above = [t.kv for t in self.open if t is not trunk]
        with torch.set_grad_enabled(gradients), self._saving(trunk, gradients):
            logits, edges, trunk.router_term, _ = self._call(trunk.item, trunk.edges, above, trunk.kv)
            statistics = self._statistics(logits, edges, True) if len(trunk.edges) else (None, None)
        if gradients:
            check_live(self.model, trunk.kv)
        trunk.keep(logits if self.through_everything else None, *statistics)  # frees the graph of rows that no edge scores behind the last keys and values

    def backward_trunk(self):
        trunk = self.open.pop()
        pairs = trunk.kv.gathered()
        if trunk.grads is not None and trunk.logprobs.requires_grad:
            pairs += [trunk.logprobs, trunk.grads[0], trunk.entropies, trunk.grads[1]]
        if trunk.router_term is not None and trunk.router_term.requires_grad:
            pairs += [trunk.router_term, torch.ones_like(trunk.router_term)]
        if self.through_everything and trunk.logits.requires_grad:
            pairs += [trunk.logits, torch.zeros_like(trunk.logits)]
        if pairs:
            backward(Seed.apply(*pairs))

    def forget_trunk(self):
        self.open.pop()

    # ---- waves ----------------------------------------------------------------------------------------------------------

    def forward_wave(self, index):
        item, edges = self.plan.items[index], self.plan.edges(index)
        logits, on_device, router_term, tokens = self._call(item, edges, [t.kv for t in self.open], None, self._tokens(item, edges))
        self.rows += item.rows
        self.waves += 1
        own = self._statistics(logits, on_device, False)[0] if len(edges) else None
        wave, leaves = self._wave(item, tokens, own, lambda: self._statistics(logits, on_device, True)[1])
        self._deliver(wave, leaves, logits, router_term)

    def backward_wave(self):
        loss, leaves = self.pending
        self.pending = None
        backward(loss)
        for trunk, leaf in leaves:
            if leaf.grad is not None:
                trunk.grads += leaf.grad

    def _tokens(self, item, edges):
        return tokens_of(self.open, edges, item.finished, self.rollouts.places)

    def _wave(self, item, tokens, own, own_entropies):
        return wave_of(self.open, self.rollouts.places(np.sort(item.finished)).tolist(), tokens, own, own_entropies, self.loss is not None)

    def _deliver(self, wave, leaves, logits=None, router_term=None):
        if self.loss is None:
            self.seen(wave)
            return
        zero = logits.sum() * 0 if self.through_everything and logits is not None else None
        if router_term is not None:
            zero = router_term if zero is None else router_term + zero
        if wave.rollouts:
            loss = self.loss(wave)
            if not torch.is_tensor(loss) or loss.numel() != 1:
                raise Error("input", "loss(wave)", "a scalar tensor", f"{type(loss).__name__} {tuple(getattr(loss, 'shape', ()))}", "", 2)
            self.losses.add(loss)
            zero = loss if zero is None else loss + zero
        if zero is None or not zero.requires_grad:
            zero = None
        if logits is None:  # rollouts that finish in a trunk: the graph ends at the leaves
            if zero is not None:
                self.pending = (zero, leaves)
                self.backward_wave()
            return
        self.pending = (zero, leaves)
