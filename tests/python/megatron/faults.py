"""Deliberate faults of espalier.megatron, by name. Each must show in a gradient."""

import contextlib

import torch
import torch.distributed as dist

from espalier.megatron import attention, calls, microbatches, program, routers
from espalier.megatron.mixers import states
from espalier.rows import segments
from espalier.rows.trunk import Trunk
from espalier.rows.waves import TrunkTokens


@contextlib.contextmanager
def replaced(owner, name, function):
    before = owner.__dict__[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def injection_missing_in_one_layer():
    own = attention.keep

    def keep(call, layer, k, v):
        out = own(call, layer, k, v)
        return (k, v) if layer == 2 else out

    return replaced(attention, "keep", keep)


def gradients_of_values_dropped():
    own = attention.Inject.backward
    return replaced(attention.Inject, "backward", staticmethod(lambda ctx, dk, dv: own(ctx, dk, None)[:2] + (dv,)))


def gradients_added_twice():
    own = attention.Inject.backward

    def backward(ctx, *grads):
        sums, found = ctx.sums, []
        ctx.sums = lambda: found.append(sums()) or found[-1]
        out = own(ctx, *grads)
        return (None, *(x if more is None else x + torch.nn.functional.pad(more, (0,) * 7 + (len(x) - len(more),)) for x, more in zip(out[1:], found[0])))

    return replaced(attention.Inject, "backward", staticmethod(backward))


def positions_from_zero():
    own = calls.item_of

    def item_of(call, config):
        if call.kind == "wave":
            call.positions = torch.arange(len(call.positions))
        return own(call, config)

    return replaced(calls, "item_of", item_of)


def values_of_trunks_begin_with_ones():
    own = TrunkTokens.keep

    def keep(self, *values):
        own(self, *values)
        self.grads += 1

    return replaced(TrunkTokens, "keep", keep)


def closed_before_the_last_wave():
    own = program.aligned

    def aligned(found, *how):
        found = own(found, *how)
        at = next(i for i, one in enumerate(found) if one.kind == "close")
        found[at - 1:at + 1] = found[at - 1:at + 1][::-1]
        for one in found:
            one.last_of = []
        return found

    return replaced(program, "aligned", aligned)


def gradients_of_keys_lost():
    return replaced(Trunk, "sums", lambda self, layer: [torch.zeros_like(x[layer][0].transpose(0, 1)) for x in (self.k, self.v)])


def zeros_of_close_are_ones():
    return replaced(microbatches.Nothing, "backward", staticmethod(lambda ctx, _: torch.ones(ctx.like[0], dtype=ctx.like[1])))


def order_of_one_rank_swapped():
    """The last stage takes the rows of one wave for those of the next."""
    own = program.aligned

    def aligned(found, *how):
        found = own(found, *how)
        one, two = next(pair for pair in zip(found, found[1:]) if all(each.kind == "wave" for each in pair))
        if dist.get_rank() == dist.get_world_size() - 1:
            one.index, two.index = two.index, one.index
        return found

    return replaced(program, "aligned", aligned)


def state_of_the_wrong_fork():
    """The outermost trunk's instead of the innermost one's."""
    own = segments.Segments.above

    def above(self):
        before = self.sets
        self.sets = [type(rows)(rows.begin, rows.trunks[:1], rows.runs) for rows in before]
        try:
            return own(self)
        finally:
            self.sets = before

    return replaced(segments.Segments, "above", above)


def tail_of_the_convolution_lost():
    own = segments.Segments.above
    return replaced(segments.Segments, "above", lambda self: [
        x * 0 if x is not None and self.key[1] == "inputs" else x for x in own(self)])


def gradient_lost(name):
    own = Trunk.add_state_gradient
    return replaced(Trunk, "add_state_gradient", lambda self, key, gradient: own(self, key, gradient * (key[1] != name)))


def gradient_of_a_state_lost():
    return gradient_lost("state")


def gradient_of_a_tail_lost():
    return gradient_lost("inputs")


def recorded_experts_left_out():
    own = routers.CallRoutes.of_layer
    return replaced(routers.CallRoutes, "of_layer", lambda self, number: own(self, number) * 0 - 1)


def states_not_carried():
    return replaced(states.Look, "carried", lambda self, output: output)


FAULTS = {function.__name__: function for function in (
    injection_missing_in_one_layer, gradients_of_values_dropped, gradients_added_twice, positions_from_zero, values_of_trunks_begin_with_ones,
    closed_before_the_last_wave, gradients_of_keys_lost, zeros_of_close_are_ones, order_of_one_rank_swapped, state_of_the_wrong_fork,
    tail_of_the_convolution_lost, gradient_of_a_state_lost, gradient_of_a_tail_lost, states_not_carried, recorded_experts_left_out)}
