"""States at forks: what a mixer's functions over segments read of open trunks, and what they leave in a trunk."""

import functools

import torch

from espalier.megatron.attention import Gathered
from espalier.megatron.calls import call_of
from espalier.rows.segments import Segments


class Carry(torch.autograd.Function):
    """(output, sums, *states) -> the output. A trunk's last states are not upstream of its output, so the output carries them: the backward gives each
    state the gradients that everything below the trunk has summed. `sums()` returns them, one for each state, or None."""

    @staticmethod
    def forward(ctx, output, sums, *states):
        ctx.sums = sums
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, *ctx.sums()


class Look:
    """How the rows of a mixer's call look back. `left`: states of the trunk that the call opens, with their graph."""

    def __init__(self, sets, trunk, mixer):
        self.sets, self.trunk, self.mixer, self.left = sets, trunk, id(mixer), {}

    def segments(self, name):
        """The segments of the call, for a function over them that keeps its states under `name`."""
        key = (self.mixer, name)
        return Segments(self.sets, key, None if self.trunk is None else functools.partial(self._leave, key))

    def _leave(self, key, state):
        if key not in self.trunk.states:  # a layer that runs again leaves the same ones
            self.trunk.states[key] = state.detach().clone()
        self.left[key] = state

    def carried(self, output):
        """The output, which carries the gradients of the states that the call has left."""
        if not self.left:
            return output
        return Carry.apply(output, self._sums, *self.left.values())

    def _sums(self):
        found = [self.trunk.dstates.pop(key, None) for key in self.left]
        return [None if grad is None else grad.to(state.dtype) for grad, state in zip(found, self.left.values())]


def attach(mixer, rows_of):
    """Makes a mixer run the rows of calls. `rows_of(mixer, x, look)`: from the input projection's [T, C] to what the output projection takes."""
    own = mixer.forward

    def forward(hidden_states, *args, packed_seq_params=None, **more):
        call = call_of(packed_seq_params)
        if call is None:
            return own(hidden_states, *args, packed_seq_params=packed_seq_params, **more)
        projected, _ = mixer.in_proj(hidden_states)
        if call.split is None:
            sets, rows = call.without_padding
            x = projected[:rows]
        else:  # every context parallel rank runs all rows of the item, and has the gradients of its own
            sets, x = [call.split.whole], Gathered.apply(projected, call.split)
        look = Look(sets, call.trunk.held if call.opens else None, mixer)
        out = look.carried(rows_of(mixer, x[:, 0], look))
        if call.split is not None:
            out = out.index_select(0, call.split.own)
        padding = len(projected) - len(out)
        return mixer.out_proj((torch.cat([out, out.new_zeros(padding, out.shape[1])]) if padding else out)[:, None])

    mixer.forward = forward
