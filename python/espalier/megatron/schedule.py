"""The forward step that Megatron's schedules call: opens, waves and closes of one step's program."""

import numpy as np
import torch
from megatron.core.utils import get_attr_wrapped_model

from espalier.megatron import calls
from espalier.megatron.calls import NO_EDGES, Call, OpenTrunk
from espalier.megatron.microbatches import Close, Graph, Hold, Nothing, alias
from espalier.rows.transfer import to_device
from espalier.rows.trunk import RowSet


def inner_of(chunk):
    """The model inside of DDP and Float16Module."""
    return get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)


def received_by(inner):
    """The input that a schedule has set for a chunk's next call, or None in the first stage."""
    received = inner.decoder.input_tensor
    return (received[0] if received else None) if isinstance(received, list) else received


class Schedule:
    """Runs a program of micro-batches on the chunks of this rank. `longest`: above all positions. `routing`: the step's router losses. `more`: further
    arguments of the model's calls. A subclass makes the rows of items (`_item`), and takes a wave's output (`_wave`) and a trunk's (`_roots`)."""

    def __init__(self, chunks, program, layout, *, gradients, longest, routing=None, more=None):
        self.chunks, self.program, self.layout, self.gradients = chunks, program, layout, gradients
        self.longest, self.routing, self.more = longest, routing, more or {}
        self.inners = [inner_of(chunk) for chunk in chunks]
        self.config, self.device = self.inners[0].config, next(self.inners[0].parameters()).device
        self.rows, self.calls, self.trunks, self.fillers = 0, {}, {}, {}

    def run(self, function, **more):
        """Runs the program through one of Megatron's schedules. Returns what that returns."""
        data = [iter(range(len(self.program))) for _ in self.chunks]
        chunked = len(self.chunks) > 1
        return function(forward_step_func=self.forward_step, data_iterator=data if chunked else data[0],
                        model=self.chunks if chunked else self.chunks[0], num_microbatches=len(self.program), forward_only=not self.gradients, **more)

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
        if not self.gradients and which == len(self.chunks) - 1:
            for index in self.program[number].last_of:
                self.trunks.pop(index, None)
        return out

    # ---- the kinds of micro-batches -------------------------------------------------------------------------------------

    def _open(self, call, chunk, which, inner, received):
        output = calls.run(chunk, inner, call, **self.more)
        if not inner.post_process:
            return self._held(call, which, output, received, [output], output.shape)
        return self._held(call, which, output.new_zeros(()), received, self._roots(call, output[0]), None)

    def _held(self, call, which, output, received, roots, shape):
        sent = alias(output) if received is None else Hold.apply(received, [output])
        if shape is not None and self.config.deallocate_pipeline_outputs and self.gradients:
            output.data = output.new_empty(1)  # the storage belongs to what is sent, which the schedule frees
        if self.gradients:
            call.trunk.graphs[which] = Graph(roots, received, shape)
        return sent, lambda sent: self._answer(sent.sum() * 0, 0)

    def _roots(self, call, logits):
        """The tensors that a trunk's backward starts from in the last stage; the first one gets the gradient 0."""
        return [Nothing.apply(logits)]

    def _gradients(self, trunk, roots):
        """The gradients of these tensors."""
        return [torch.zeros_like(roots[0])]

    def _wave(self, call, chunk, which, inner, received):
        raise NotImplementedError

    def _close(self, call, chunk, which, inner, received):
        graph = call.trunk.graphs.pop(which)
        root = received if received is not None else torch.zeros((), device=self.device, requires_grad=True)
        last = graph.shape is None
        sent = Close.apply(root, graph, (lambda _: self._gradients(call.trunk, graph.roots)) if last else (lambda grad: [grad]))
        return sent, lambda sent: self._answer(sent, 0)

    def _answer(self, value, tokens):
        """The values that a schedule takes from a loss function. With two it divides by the number of micro-batches, which also counts what opens and
        closes. With three it divides all gradients by the step's tokens in the end; ranks of context parallelism have the same ones. It frees the
        storage of what it takes, which may be no view."""
        if self.config.calculate_per_token_loss:
            return value.clone(), torch.tensor(tokens if self.layout.cp_rank == 0 else 0, dtype=torch.int), {}
        return value * len(self.program), {}

    # ---- rows -----------------------------------------------------------------------------------------------------------

    def _item(self, kind, index):
        """The Call of an item; a trunk's OpenTrunk is in `self.trunks` afterwards."""
        raise NotImplementedError

    def _call(self, micro_batch):
        kind, index = micro_batch.kind, micro_batch.index
        if kind == "close":
            trunk = self.fillers.pop(micro_batch.slot) if index is None else self.trunks[index]
            if index is not None and index in micro_batch.last_of:
                del self.trunks[index]
            return Call("close", trunk)
        call = self._filler(kind, micro_batch.slot) if index is None else self._item(kind, index)
        if self.routing is not None:
            call.routing, call.below = self.routing, self.routing.below(call)
        return call

    def _filler(self, kind, slot):
        rows = self.layout.multiple
        ids, outputs = to_device(self.device, np.zeros(rows), np.zeros(0))
        trunk = None
        if kind == "open":
            trunk = self.fillers[slot] = OpenTrunk(rows, NO_EDGES)
        return Call(kind, trunk, (), ids, ids, [RowSet(0, (), [(0, rows, rows)])], 1, outputs, outputs, outputs, outputs)
