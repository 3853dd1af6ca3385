"""One step over a program of micro-batches: the forward step that Megatron's schedules call."""

import numpy as np
import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model

from espalier.errors import Error
from espalier.megatron import calls
from espalier.megatron.calls import NO_EDGES, Call, OpenTrunk
from espalier.megatron.head import vocabulary_group
from espalier.megatron.microbatches import Close, Graph, Hold, Nothing, Spread, alias
from espalier.megatron.routers import below_of
from espalier.megatron.split import Split, dealt_runs, parts_of
from espalier.rows.head import TokenStatistics
from espalier.rows.transfer import Total, to_device
from espalier.rows.trunk import RowSet, runs_of
from espalier.rows.waves import tokens_of, wave_of


def inner_of(chunk):
    """The model inside of DDP and Float16Module."""
    return get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)


def received_by(inner):
    """The input that a schedule has set for a chunk's next call, or None in the first stage."""
    received = inner.decoder.input_tensor
    return (received[0] if received else None) if isinstance(received, list) else received


class Step:
    """Runs a program. `items`: of the plan, `edges(index)`: an item's loss edges. `loss(wave)` returns a wave's part of the loss; without it the step is forward only and calls `seen(wave)`, on ranks of the last
    pipeline stage. `routing`: the step's router losses. `tokens(wave)`: by which Megatron divides with calculate_per_token_loss; None: those of the
    responses."""

    def __init__(self, chunks, rollouts, items, program, layout, *, edges=None, loss=None, seen=None, temperature=1.0, routing=None, tokens=None):
        self.chunks, self.rollouts, self.items, self.program, self.layout = chunks, rollouts, items, program, layout
        self.edges, self.tokens = edges, tokens or len
        self.loss, self.seen, self.temperature, self.routing = loss, seen, temperature, routing
        self.inners = [inner_of(chunk) for chunk in chunks]
        self.config, self.device = self.inners[0].config, next(self.inners[0].parameters()).device
        self.losses, self.rows, self.waves = Total(), 0, 0
        self.calls, self.trunks, self.fillers = {}, {}, {}
        self.path = _paths(items)
        self.longest = int(rollouts.lengths.max())
        self.group = vocabulary_group(layout.tp_group)

    def run(self):
        """Runs the program through Megatron's own schedule."""
        data = [iter(range(len(self.program))) for _ in self.chunks]
        chunked = len(self.chunks) > 1
        get_forward_backward_func()(forward_step_func=self.forward_step, data_iterator=data if chunked else data[0],
                                    model=self.chunks if chunked else self.chunks[0], num_microbatches=len(self.program), seq_length=1,
                                    micro_batch_size=1, forward_only=self.loss is None)
        return self

    def forward_step(self, numbers, chunk):
        number, which = next(numbers), next(at for at, one in enumerate(self.chunks) if one is chunk)
        inner = self.inners[which]
        received = received_by(inner)
        if number not in self.calls:
            self.calls[number] = self._call(self.program[number])
        call = self.calls[number]
        if which == len(self.chunks) - 1:
            del self.calls[number]
        out = getattr(self, f"_{call.kind}")(call, chunk, which, inner, received)
        if self.loss is None and which == len(self.chunks) - 1:
            for index in self.program[number].last_of:
                self.trunks.pop(index, None)
        return out

    # ---- the three kinds of micro-batches -------------------------------------------------------------------------------

    def _open(self, call, chunk, which, inner, received):
        output = calls.run(chunk, inner, call)
        if not inner.post_process:
            return self._held(call, which, output, received, [output], output.shape)
        roots = self._score_trunk(call, output[0])
        return self._held(call, which, output.new_zeros(()), received, roots, None)

    def _held(self, call, which, output, received, roots, shape):
        sent = alias(output) if received is None else Hold.apply(received, [output])
        if shape is not None and self.config.deallocate_pipeline_outputs and self.loss is not None:
            output.data = output.new_empty(1)  # the storage belongs to what is sent, which the schedule frees
        if self.loss is not None:
            call.trunk.graphs[which] = Graph(roots, received, shape)
        return sent, lambda sent: self._answer(sent.sum() * 0, 0)

    def _wave(self, call, chunk, which, inner, received):
        output = calls.run(chunk, inner, call)
        return output, lambda output: self._answer(*self._loss_of(call, output[0]))

    def _close(self, call, chunk, which, inner, received):
        graph = call.trunk.graphs.pop(which)
        root = received if received is not None else torch.zeros((), device=self.device, requires_grad=True)
        last = graph.shape is None
        sent = Close.apply(root, graph, (lambda _: self._trunk_gradients(call.trunk, graph.roots)) if last else (lambda grad: [grad]))
        return sent, lambda sent: self._answer(sent, 0)

    def _answer(self, value, tokens):
        """The values that a schedule takes from a loss function. With two it divides by the number of micro-batches, which also counts what opens and
        closes. With three it divides all gradients by the step's tokens in the end; ranks of context parallelism have the same ones. It frees the
        storage of what it takes, which may be no view."""
        if self.config.calculate_per_token_loss:
            return value.clone(), torch.tensor(tokens if self.layout.cp_rank == 0 else 0, dtype=torch.int), {}
        return value * len(self.program), {}

    # ---- the last stage -------------------------------------------------------------------------------------------------

    def _statistics(self, call, logits, with_entropy):
        """Log-probs and entropies of an item's edges, those on other context parallel ranks included."""
        found = TokenStatistics.apply(logits, call.place, call.target, self.temperature, with_entropy, self.group)
        if self.layout.cp == 1:
            return found
        return [Spread.apply(x, call.edge, len(call.edges), self.layout.cp_group) for x in found]

    def _score_trunk(self, call, logits):
        """Keeps the values of a trunk's edges. Returns what the trunk's backward starts from."""
        roots, trunk = [Nothing.apply(logits)], call.trunk
        if len(call.edges):
            own = TokenStatistics.apply(logits, call.place, call.target, self.temperature, True, self.group)
            roots += own
            everywhere = own if self.layout.cp == 1 else [Spread.apply(x.detach(), call.edge, len(call.edges), self.layout.cp_group) for x in own]
            trunk.keep(*everywhere)
            trunk.own = call.edge
        if len(call.finished):
            value, tokens = self._finish(call, (*call.above, trunk), NO_EDGES, None, None)
            if value is not None and value.requires_grad:  # its graph ends at the leaves
                cp = 1 if self.config.calculate_per_token_loss else self.layout.cp
                scale = self.config.grad_scale_func or (lambda x: x)
                scale(value * cp).backward()
        return roots

    def _trunk_gradients(self, trunk, roots):
        """The gradients of a trunk's roots in the last stage: nothing reads its output, waves read its values. Every context parallel rank
        has the gradients of all values and takes its own part."""
        grads = [torch.zeros_like(roots[0])]
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
        self.waves += 1
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

    def _call(self, micro_batch):
        kind, index = micro_batch.kind, micro_batch.index
        if kind == "close":
            trunk = self.fillers.pop(micro_batch.slot) if index is None else self.trunks[index]
            if index is not None and index in micro_batch.last_of:
                del self.trunks[index]
            return Call("close", trunk)
        if index is None:
            return self._filler(kind, micro_batch.slot)
        item, edges = self.items[index], self.edges(index)
        trunk = None
        if item.trunk:
            trunk = self.trunks[index] = OpenTrunk(item.rows, edges)
        above = tuple(self.trunks[at] for at in self.path[index])
        self.rows += item.rows
        return self._routed(self._rows(kind, trunk, above, item, edges))

    def _routed(self, call):
        if self.routing is not None:
            call.routing, call.below = self.routing, below_of(call, len(self.rollouts), self.rollouts.places, self.device)
        return call

    def _rows(self, kind, trunk, above, item, edges):
        layout, runs, held = self.layout, runs_of(item.segments), tuple(one.held for one in above)
        ids = np.concatenate([self.rollouts.tokens(r, begin, end) for r, begin, end, *_ in item.segments.tolist()])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end, *_ in item.segments.tolist()])
        parts, gathered = ([np.arange(item.rows)], False) if layout.cp == 1 else parts_of(runs, item.rows, layout.cp, item.trunk)
        own = parts[layout.cp_rank if layout.cp > 1 else 0]
        rows = max(map(len, parts)) if gathered else len(own)
        rows = max(1, -(-rows // layout.multiple)) * layout.multiple
        split = None
        if gathered:
            split = Split(runs, parts, layout.cp_rank, rows, held, layout.cp_group, self.device)
            sets = split.sets
        else:
            own_runs = runs if layout.cp == 1 else dealt_runs(runs, own)
            sets = [RowSet(0, held, own_runs)] if own_runs else []
        if rows > len(own):
            sets = [*sets, RowSet(len(own), (), [(len(own), rows - len(own), rows)])]
        at = np.full(item.rows, -1)
        at[own] = np.arange(len(own))
        mine = np.flatnonzero(at[edges[:, 0]] >= 0)
        outputs, place = np.unique(at[edges[mine, 0]], return_inverse=True)
        padded = lambda x: np.concatenate([x[own], np.zeros(rows - len(own), x.dtype)])
        ids, positions, outputs, place, target, edge = to_device(self.device, padded(ids), padded(positions), outputs, place, edges[mine, 1], mine)
        return Call(kind, trunk, above, ids, positions, sets, self.longest, outputs, place, target, edge, edges, item, at, split)

    def _filler(self, kind, slot):
        rows = self.layout.multiple
        ids, outputs = to_device(self.device, np.zeros(rows), np.zeros(0))
        trunk = None
        if kind == "open":
            trunk = OpenTrunk(rows, NO_EDGES)
            self.fillers[slot] = trunk
        return self._routed(Call(kind, trunk, (), ids, ids, [RowSet(0, (), [(0, rows, rows)])], 1, outputs, outputs, outputs, outputs))


def _paths(items):
    """The trunks above each item, outermost first."""
    paths = []
    for item in items:
        paths.append((*paths[item.parent], item.parent) if item.parent >= 0 else ())
    return paths
