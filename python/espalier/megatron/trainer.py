"""Megatron's forward-backward function for an unchanged trainer, whose forward step is `output = model(**batch); return output, loss_func`.

1. The trainer's own forward step runs once for every micro-batch, with a stand-in of the model (captured.py).
2. The sequences make a prefix tree (sequences.py).
3. Megatron's own function runs the program: open, waves (one micro-batch of the trainer each), close. A wave's logits are laid out as the trainer
   expects them; rows of shared prompts are zeros. The trainer's loss function runs on them. Reports come back in the trainer's order.

Steps that cannot be shared, or would not be faster, run the trainer's forward step and Megatron's function as they are.
"""

import logging
from collections import namedtuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from espalier.errors import Unsupported
from espalier.megatron import calls, verification
from espalier.megatron.attach import listed, state_of
from espalier.megatron.calls import NO_EDGES, Call, OpenTrunk
from espalier.megatron.captured import Captured, Tape, whole
from espalier.megatron.checks import check_config, has_router_losses
from espalier.megatron.head import chooses_rows
from espalier.megatron.layout import device_of, layout_of
from espalier.megatron.microbatches import Nothing
from espalier.megatron.program import aligned
from espalier.megatron.routers import RouterStep
from espalier.megatron.schedule import Schedule, inner_of
from espalier.megatron.sequences import program_of, rows_of, tree_of
from espalier.rows.transfer import to_device
from espalier.rows.trunk import RowSet

FEWER = .95  # rows of a shared step over all rows: a step that saves less may lose it to its further micro-batches
_log = logging.getLogger("espalier")
_noted: set = set()
_Report = namedtuple("_Report", "batch report")


class TrainerStep(Schedule):
    """Runs a trainer's captured micro-batches: items are nodes, waves the numbers of micro-batches."""

    def __init__(self, chunks, captured, nodes, layout, gradients, counting=False, routing=None):
        program = aligned(program_of(len(captured.losses), nodes, layout.together is not None, gradients), layout.together, layout.microbatches)
        super().__init__(chunks, program, layout, gradients=gradients, longest=captured.longest, routing=routing, more=captured.more)
        self.captured, self.nodes, self.counting = captured, nodes, counting
        self.number = {id(s): at for at, s in enumerate(captured.sequences)}

    def reports(self, function, **more):
        """The trainer's reports in its order."""
        found = [one for one in self.run(function, **more) if isinstance(one, _Report)]
        return [one.report for one in sorted(found, key=lambda one: one.batch)]

    def _wave(self, call, chunk, which, inner, received):
        output = calls.run(chunk, inner, call, **self.more)
        return output, lambda output: self._trainers_loss(call, output[0])

    def _trainers_loss(self, call, logits):
        if call.batch is None or self.counting:
            return self._answer(Nothing.apply(logits), 0)
        batch, captured = call.batch, self.captured
        if len(logits) != len(call.place):
            logits = logits.index_select(0, call.read)
        value, *counted, report = captured.losses[batch](whole(logits, call.place, captured.shapes[batch], captured.divisors[batch]))
        if not self.config.calculate_per_token_loss:  # the schedule divides by the micro-batches that it runs; the trainer counted its own
            value = value * (len(self.program) / len(captured.losses))
        if self.gradients and not value.requires_grad:
            value = value + Nothing.apply(logits)
        return value, *counted, _Report(batch, report)

    def _item(self, kind, index):
        return self._node(index) if kind == "open" else self._micro_batch(index)

    def _node(self, node):
        trunk = self.trunks[node] = OpenTrunk(node.end - node.begin, NO_EDGES)
        runs = [(node.tokens, node.begin, node.sequences)]
        sets = [RowSet(0, tuple(self.trunks[above].held for above in node.path), [(0, trunk.held.rows, trunk.held.rows)])]
        return self._rows("open", trunk, node.path, runs, sets, np.zeros(0), np.zeros(0))

    def _micro_batch(self, batch):
        runs, sets, above, read, place = [], [], [], [], []
        for path, own in rows_of(batch, self.captured.sequences, self.nodes):
            sets.append(RowSet(own[0].begin, tuple(self.trunks[node].held for node in path), [(run.begin, len(run.tokens), run.end) for run in own]))
            above += path
            for run in own:
                runs.append((run.tokens, run.position, run.sequences))
                if len(run.sequences) == 1:  # rows that several have in common stand before those that the loss reads
                    read.append(np.arange(run.begin, run.begin + len(run.tokens)))
                    place.append(run.sequences[0].at + run.position + np.arange(len(run.tokens)))
        join = lambda parts: np.concatenate(parts) if parts else np.zeros(0)
        call = self._rows("wave", None, tuple(dict.fromkeys(above)), runs, sets, join(read), join(place))
        call.batch = batch
        return call

    def _rows(self, kind, trunk, above, runs, sets, read, place):
        """A Call of runs (tokens, first position, sequences). `read`: rows whose logits the trainer gets, at `place` among its own."""
        tokens = np.concatenate([run[0] for run in runs]) if runs else np.zeros(0, np.int64)
        positions = np.concatenate([run[1] + np.arange(len(run[0])) for run in runs]) if runs else np.zeros(0, np.int64)
        rows = self.layout.padded(len(tokens))
        if rows > len(tokens):
            sets = [*sets, RowSet(len(tokens), (), [(len(tokens), rows - len(tokens), rows)])]
        padded = lambda x: np.concatenate([x, np.zeros(rows - len(x), np.int64)])
        members, at = [], 0
        for own, _, sequences in runs:
            members.append((at + np.arange(len(own)), np.array([self.number[id(s)] for s in sequences])))
            at += len(own)
        ids, positions, read, place = to_device(self.device, padded(tokens), padded(positions), read, place)
        self.rows += len(tokens)
        chosen = read if kind == "open" or any(chooses_rows(inner) for inner in self.inners) else None
        call = Call(kind, trunk, tuple(self.trunks[node] for node in above), ids, positions, sets, self.longest, chosen, place, members=members,
                    padding=rows - len(tokens))
        call.read = read
        return call


def forward_backward(function, first_rows=None, attach=None):
    """See espalier.megatron.forward_backward. `attach(chunks)`: called before a model's first step."""

    def forward_backward_func(*, forward_step_func, data_iterator, model, num_microbatches, forward_only=False, collect_non_loss_data=False, **more):
        chunks = listed(model)
        own = lambda iterators: function(forward_step_func=forward_step_func, data_iterator=iterators, model=model, num_microbatches=num_microbatches,
                                         forward_only=forward_only, collect_non_loss_data=collect_non_loss_data, **more)
        if attach is not None:
            attach(chunks)
        if collect_non_loss_data or any(state_of(inner_of(chunk)) is None for chunk in chunks):
            return own(data_iterator)
        several = isinstance(data_iterator, (list, tuple))
        tapes = [Tape(one) for one in (data_iterator if several else [data_iterator])]
        again = lambda: [tape.again() for tape in tapes] if several else tapes[0].again()
        step = _Shared(chunks, forward_step_func, tapes, num_microbatches, first_rows, not forward_only)
        if not step.worthwhile:
            _count(step, step.without_sharing)
            return own(again())
        if not forward_only:
            step.verify(function, lambda: own(again()), more)
        found, run = step.run(function, more)
        _count(step, run)
        return found

    def _count(step, rows):
        forward_backward_func.rows["run"] += rows
        forward_backward_func.rows["without_sharing"] += step.without_sharing

    forward_backward_func.rows = {"run": 0, "without_sharing": 0}
    return forward_backward_func


class _Shared:
    """One call of the trainer: its captured step, and whether all ranks share it."""

    def __init__(self, chunks, forward_step, tapes, count, first_rows, gradients):
        self.chunks, self.gradients, self.without_sharing = chunks, gradients, 0
        self.inners = [inner_of(chunk) for chunk in chunks]
        self.config, self.state = self.inners[0].config, state_of(self.inners[0])
        self.layout, reason, fingerprint, saved = layout_of(self.config), "", 0, 0
        try:
            for inner in self.inners:
                check_config(inner)
            if parallel_state.get_context_parallel_world_size() > 1:
                raise Unsupported("context_parallel_size", "1, because a rank has a part of each sequence's tokens", str(self.layout.cp),
                                  "Use espalier.megatron.phased_step, or context_parallel_size 1")
            self.captured = Captured(forward_step, tapes, chunks, count, first_rows, self._padding())
            self.nodes, fingerprint = tree_of(self.captured.sequences), self.captured.fingerprint()
            self.without_sharing = self.captured.rows
            saved = sum((node.end - node.begin) * (len(node.sequences) - 1) for node in self.nodes)
        except Unsupported as refusal:
            reason = str(refusal)
        self.worthwhile = self._agreed(reason, fingerprint, saved >= (1 - FEWER) * max(1, self.without_sharing))

    def _padding(self):
        """True if rows behind a sequence's tokens count: routers have losses over all rows of a micro-batch."""
        return has_router_losses(self.config) or bool(self.config.num_moe_experts and getattr(self.config, "moe_router_enable_expert_bias", False))

    def _agreed(self, reason, fingerprint, saves):
        """True if no rank refuses, ranks of a replica have the same sequences, and any rank saves enough. One wait of the host a step."""
        device, layout = device_of(self.inners[0]), self.layout
        same = torch.tensor([fingerprint, -fingerprint], dtype=torch.int64, device=device)
        for group in (layout.tp_group, layout.pp_group):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(same, dist.ReduceOp.MAX, group)
        told = torch.stack([torch.tensor(int(bool(reason)), device=device), (same[0] != -same[1]).long(), torch.tensor(int(saves), device=device)])
        dist.all_reduce(told, dist.ReduceOp.MAX)
        refused, different, worthwhile = told.tolist()
        if refused:
            _note(reason or "another rank cannot")
        elif different:
            _note("tensor or pipeline parallel ranks have different micro-batches")
        return bool(worthwhile and not refused and not different)

    def _step(self, **how):
        return TrainerStep(self.chunks, self.captured, self.nodes, self.layout, self.gradients, **how)

    def _routing(self, function, more):
        """The step's router losses, as in the trainer's micro-batches; counts their choices first if there are any."""
        if not (self.config.num_moe_experts and self.gradients):
            return None
        captured, lengths = self.captured, [len(s.tokens) for s in self.captured.sequences]
        batches = [[at for at, s in enumerate(captured.sequences) if s.batch == number] for number in range(len(captured.losses))]
        program = len(self._step().program)
        make = lambda **how: RouterStep(self.config, lengths, batches, program, device_of(self.inners[0]), **how)
        routing = make()
        if has_router_losses(self.config) and self.inners[0].training:
            counting = make(counting=True)
            with torch.no_grad():
                TrainerStep(self.chunks, captured, self.nodes, self.layout, False, counting=True, routing=counting).run(function, **more)
            routing.settle(counting.counts)
        return routing

    def run(self, function, more):
        """(the trainer's reports, rows that ran)"""
        step = self._step(routing=self._routing(function, more))
        return step.reports(function, **more), step.rows

    def verify(self, function, own, more):
        """Compares a step of a new regime with the trainer's own, if `install` was asked to."""
        depths = [len(node.path) for node in self.nodes if node.trunk]
        regime = ("trainer", max(depths, default=-1), len(depths).bit_length(), self.captured.longest.bit_length(), self.inners[0].training,
                  hash(tuple((p.dtype, p.requires_grad) for inner in self.inners for p in inner.parameters())))
        if not verification.due(self.state, regime):
            return

        def nothing(run):
            def called():
                run()
                return 0.0
            return called

        table = verification.compare(self.chunks, self.inners, nothing(lambda: self.run(function, more)), nothing(own), nothing(own))
        self.state.verified.add(regime)
        if dist.get_rank() == 0:
            _log.warning("a step against the trainer's own:\n%s", table)


def _note(reason):
    if reason not in _noted:
        _noted.add(reason)
        if dist.get_rank() == 0:
            _log.warning("prompts are not shared: %s", reason)
