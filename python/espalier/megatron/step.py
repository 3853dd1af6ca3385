"""A step over waves of whole responses: `loss(wave)` sees log-probs and entropies."""

import numpy as np
import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from espalier.errors import Error
from espalier.megatron import calls
from espalier.megatron.calls import NO_EDGES, Call, OpenTrunk
from espalier.megatron.head import vocabulary_group
from espalier.megatron.microbatches import Nothing, Spread
from espalier.megatron.routers import CallRoutes
from espalier.megatron.schedule import Schedule
from espalier.megatron.split import Split, dealt_runs, parts_of
from espalier.rows.head import TokenStatistics
from espalier.rows.transfer import Total, to_device
from espalier.rows.trunk import RowSet
from espalier.rows.waves import tokens_of, wave_of


class Step(Schedule):
    """Runs a plan's program. `items`: of the plan, `edges(index)`: an item's loss edges. `loss(wave)` returns a wave's part of the loss; without it the step
    is forward only and calls `seen(wave)`, on ranks of the last pipeline stage. `tokens(wave)`: by which Megatron divides with
    calculate_per_token_loss; None: the responses' tokens."""

    def __init__(self, chunks, rollouts, items, program, layout, *, edges=None, loss=None, seen=None, temperature=1.0, routing=None, tokens=None):
        super().__init__(chunks, program, layout, gradients=loss is not None, longest=int(rollouts.lengths.max()), routing=routing)
        self.rollouts, self.items, self.edges = rollouts, items, edges
        self.loss, self.seen, self.temperature, self.tokens = loss, seen, temperature, tokens or len
        self.losses, self.paths, self.group = Total(), _paths(items), vocabulary_group(layout.tp_group)

    def run(self):
        super().run(get_forward_backward_func(), seq_length=1, micro_batch_size=1)
        return self

    # ---- the last stage -------------------------------------------------------------------------------------------------

    def _wave(self, call, chunk, which, inner, received):
        output = calls.run(chunk, inner, call)
        return output, lambda output: self._answer(*self._loss_of(call, output[0]))

    def _statistics(self, call, logits, with_entropy):
        """Log-probs and entropies of an item's edges, those on other context parallel ranks included."""
        found = TokenStatistics.apply(logits, call.place, call.target, self.temperature, with_entropy, None, self.group)
        return found if self.layout.cp == 1 else self._spread(call, found)

    def _spread(self, call, values):
        return [Spread.apply(x, call.edge, len(call.edges), self.layout.cp_group) for x in values]

    def _roots(self, call, logits):
        """Keeps the values of a trunk's edges, too."""
        roots, trunk = super()._roots(call, logits), call.trunk
        if len(call.edges):
            own = TokenStatistics.apply(logits, call.place, call.target, self.temperature, True, None, self.group)
            roots += own
            trunk.keep(*(own if self.layout.cp == 1 else self._spread(call, [x.detach() for x in own])))
            trunk.own = call.edge
        value, _ = self._finish(call, (*call.above, trunk), NO_EDGES, None, None)
        if value is not None and value.requires_grad:  # its graph ends at the leaves
            cp = 1 if self.config.calculate_per_token_loss else self.layout.cp
            (self.config.grad_scale_func or (lambda x: x))(value * cp).backward()
        return roots

    def _gradients(self, trunk, roots):
        """Waves read a trunk's values. Every context parallel rank has the gradients of all values and takes its own part."""
        grads = super()._gradients(trunk, roots)
        if trunk.values is not None:
            grads += [x.index_select(0, trunk.own).to(root.dtype) for x, root in zip(trunk.grads, roots[1:])]
        return grads

    def _loss_of(self, call, logits):
        """(the loss of a wave, its tokens), with a graph that reaches all rows."""
        own, entropies = None, None
        if len(call.edges):
            own = self._statistics(call, logits, False)[0]
            entropies = lambda: self._statistics(call, logits, True)[1]
        value, tokens = self._finish(call, call.above, call.edges, own, entropies)
        if value is None or own is None or not value.requires_grad:
            value = Nothing.apply(logits) + (0 if value is None else value)
        return value, tokens

    def _finish(self, call, above, edges, own, entropies):
        """Calls the loss for the rollouts that finish in a call. Returns its value, or None, and the number of their tokens."""
        if not len(call.finished):
            return None, 0
        tokens = to_device(self.device, *tokens_of(above, edges, call.finished, self.rollouts.places))
        wave, leaves = wave_of(above, self.rollouts.places(np.sort(call.finished)).tolist(), tokens, own, entropies, self.loss is not None)
        if self.loss is None:
            self.seen(wave)
            return None, 0
        for trunk, leaf in leaves:
            leaf.register_hook(trunk.grads.add_)
        value = self.loss(wave)
        if not torch.is_tensor(value) or value.numel() != 1:
            raise Error("input", "loss(wave)", "a scalar tensor", f"{type(value).__name__} {tuple(getattr(value, 'shape', ()))}", "", 2)
        self.losses.add(value)
        return value.reshape(()), self.tokens(wave)

    # ---- rows -----------------------------------------------------------------------------------------------------------

    def _item(self, kind, index):
        item, edges = self.items[index], self.edges(index)
        trunk = None
        if item.trunk:
            trunk = self.trunks[index] = OpenTrunk(item.rows, edges)
        self.rows += item.rows
        return self._rows(kind, trunk, tuple(self.trunks[at] for at in self.paths[index]), item, edges)

    def _rows(self, kind, trunk, above, item, edges):
        layout, runs, held = self.layout, item.runs, tuple(one.held for one in above)
        ids = np.concatenate([self.rollouts.tokens(r, begin, end) for r, begin, end, *_ in item.segments.tolist()])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end, *_ in item.segments.tolist()])
        parts, gathered = ([np.arange(item.rows)], False) if layout.cp == 1 else parts_of(runs, item.rows, layout.cp, item.trunk)
        own = parts[layout.cp_rank if layout.cp > 1 else 0]
        rows = layout.padded(max(map(len, parts)) if gathered else len(own))
        split = Split(runs, parts, layout.cp_rank, rows, held, layout.cp_group, self.device) if gathered else None
        own_runs = runs if layout.cp == 1 or gathered else dealt_runs(runs, own)
        sets = split.sets if gathered else [RowSet(0, held, own_runs)] if own_runs else []
        if rows > len(own):
            sets = [*sets, RowSet(len(own), (), [(len(own), rows - len(own), rows)])]
        at = np.full(item.rows, -1)
        at[own] = np.arange(len(own))
        mine = np.flatnonzero(at[edges[:, 0]] >= 0)
        outputs, place = np.unique(at[edges[mine, 0]], return_inverse=True)
        padded = lambda x: np.concatenate([x[own], np.zeros(rows - len(own), x.dtype)])
        ids, positions, outputs, place, target, edge = to_device(self.device, padded(ids), padded(positions), outputs, place, self.rollouts.targets(edges[mine, 1]), mine)
        members = [(at[row:row + end - begin], self.rollouts.places(item.rollouts[first:last]))
                   for _, begin, end, row, _, _, first, last in item.segments.tolist()]
        routes = self._routes([(self.rollouts.places(r), begin, end) for r, begin, end, *_ in item.segments.tolist()], own, rows)
        return Call(kind, trunk, above, ids, positions, sets, self.longest, outputs, place, target, edge, edges, item.finished, members, split,
                    rows - len(own), routes=routes)

    def _routes(self, parts, own, rows):
        """The recorded experts of this rank's rows `own` of an item that is `parts` (rollout, begin, end) end to end, and of padding up to `rows`."""
        routes = self.rollouts.routes
        if routes is None:
            return None
        found = np.concatenate([routes.rows(parts)[own], routes.rows([(None, 0, rows - len(own))])])
        return CallRoutes(*to_device(self.device, found), routes.layers)


def _paths(items):
    """The trunks above each item, outermost first."""
    paths = []
    for item in items:
        paths.append((*paths[item.parent], item.parent) if item.parent >= 0 else ())
    return paths
