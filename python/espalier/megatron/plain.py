"""The dense step that `verify` compares with: plain calls of the model, one rollout a micro-batch, through the same schedule."""

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention

from espalier.megatron.calls import Call
from espalier.megatron.program import MicroBatch
from espalier.megatron.routers import plain_routes
from espalier.megatron.step import Step
from espalier.native import Item
from espalier.rows.transfer import to_device


class PlainStep(Step):
    """A Step whose micro-batches are whole rollouts, run by Megatron's own attention."""

    def __init__(self, chunks, rollouts, layout, **how):
        items = [_item_of(rollouts, i) for i in range(len(rollouts))]
        count = len(items)
        if layout.together is not None:
            told = [None] * dist.get_world_size(layout.together)
            dist.all_gather_object(told, count, layout.together)
            count = max(told)
        count += -count % layout.microbatches
        super().__init__(chunks, rollouts, items, [MicroBatch("plain", i if i < len(items) else None) for i in range(count)], layout, **how)
        masked = [module for inner in self.inners for module in inner.modules() if type(module) is DotProductAttention]
        self.masked = bool(masked)  # Transformer Engine's attention is causal without a mask

    def _plain(self, call, chunk, which, inner, received):
        mask = torch.ones(len(call.ids), len(call.ids), dtype=torch.bool, device=self.device).triu(1)[None, None] if self.masked else None
        positions = call.positions[None]
        if getattr(inner, "position_embedding_type", "") == "mrope":
            positions = positions.expand(3, 1, -1)
        token = plain_routes.set(call.routes)
        try:
            output = chunk(call.ids[None], positions, mask)
        finally:
            plain_routes.reset(token)
        return output, lambda output: self._answer(*self._loss_of(call, output[0].index_select(0, call.outputs)))

    def edges_of(self, index):
        prompt, response = self.rollouts.prompts[index], self.rollouts.responses[index]
        at = np.arange(len(response))
        return np.stack([len(prompt) - 1 + at, response, np.full(len(response), index), at], 1) if len(response) else np.zeros((0, 4), np.int64)

    def _call(self, micro_batch):
        index, layout = micro_batch.index, self.layout
        tokens = np.array([0]) if index is None else self.rollouts.tokens(index, 0, int(self.rollouts.lengths[index]))
        edges = np.zeros((0, 4), np.int64) if index is None else self.edges_of(index)
        n = len(tokens) + -len(tokens) % (layout.multiple * (2 * layout.cp if layout.cp > 1 else 1))
        pieces = np.array_split(np.arange(n), 2 * layout.cp)
        own = np.arange(n) if layout.cp == 1 else np.concatenate([pieces[layout.cp_rank], pieces[-1 - layout.cp_rank]])
        at = np.full(n, -1)
        at[own] = np.arange(len(own))
        mine = np.flatnonzero(at[edges[:, 0]] >= 0)
        padded = np.concatenate([tokens, np.zeros(n - len(tokens), tokens.dtype)])
        ids, positions, outputs, place, target, edge = to_device(
            self.device, padded[own], own, at[edges[mine, 0]], np.arange(len(mine)), edges[mine, 1], mine)
        self.rows += len(tokens)
        routes = self._routes([(index, 0, len(tokens)), (None, len(tokens), n)], own, len(own))
        return Call("plain", None, (), ids, positions, [], self.longest, outputs, place, target, edge, edges,
                    [] if index is None else self.items[index].finished, routes=routes)


def _item_of(rollouts, index):
    one, rows = np.array([index]), int(rollouts.lengths[index])
    return Item(False, False, -1, 0, rows, np.array([[index, 0, rows, 0, rows, 1, 0, 1]]), [(0, rows, rows)], one,
                one if len(rollouts.responses[index]) else one[:0])
