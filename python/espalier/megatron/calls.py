"""The rows that one micro-batch runs on this rank, an item of the plan or a part of it, and how they reach Megatron's layers."""

import contextlib
import contextvars
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from espalier.rows.trunk import Trunk
from espalier.rows.waves import TrunkTokens

_current = contextvars.ContextVar("espalier_megatron_call", default=None)
NO_EDGES = np.zeros((0, 4), np.int32)


class OpenTrunk(TrunkTokens):
    """A trunk between its forward and its backward. `held`: keys, values and states of its rows in this rank's layers. `graphs`: for each model chunk,
    what its backward starts from. `own`: the indices of this rank's edges."""

    def __init__(self, rows, edges):
        super().__init__(edges)
        self.held, self.graphs, self.own = Trunk(rows), {}, None


@dataclass(eq=False)
class Call:
    """Rows of one forward of a model chunk. All tensors are on the model's device.

    `kind`: "open" (a trunk's forward), "wave", or "close" (a trunk's backward, which has no rows). `trunk`: what is opened or closed. `above`: the
    open trunks that the rows read, outermost first. `ids`, `positions` [T]: this rank's rows, padding behind them. `sets`: RowSets of these rows.
    `longest`: above all positions of the step. `outputs` [O]: rows whose logits are wanted; None: all. `place`, `target` [E]: the edges of this
    rank's rows, as indices into `outputs`; `edge` [E]: their indices among the item's `edges`. `finished`: rollouts whose last edge is among them.
    `members`: [(rows, rollouts)], the rollouts that rows are tokens of; rows on other ranks are -1. `split`: how rows are gathered from context
    parallel ranks, or None. `padding`: rows behind all others, which are the last of `sets`.
    `routing`: the step's router losses, and `below`: the rollouts of each row (routers.py), in a step of a model with experts. `routes`: the experts
    that were recorded for the rows, or None.
    `batch`, `read`: of a trainer's micro-batch, its number and the rows whose logits the trainer gets at `place` (trainer.py).
    """
    kind: str
    trunk: OpenTrunk | None = None
    above: tuple = ()
    ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    sets: list = field(default_factory=list)
    longest: int = 0
    outputs: torch.Tensor | None = None
    place: torch.Tensor | None = None
    target: torch.Tensor | None = None
    edge: torch.Tensor | None = None
    edges: np.ndarray = field(default_factory=lambda: NO_EDGES)
    finished: Sequence = ()
    members: list = field(default_factory=list)
    split: object = None
    padding: int = 0
    routing: object = None
    below: tuple = ()
    routes: object = None
    batch: int | None = None
    read: torch.Tensor | None = None
    mutual: tuple = ()  # rows that see later rows, for espalier.rows.attention

    @property
    def opens(self):
        return self.kind == "open"

    @property
    def without_padding(self):
        """(sets, rows) without padding, or padding alone if there is nothing else."""
        if not self.padding or len(self.sets) == 1:
            return self.sets, len(self.ids)
        return self.sets[:-1], len(self.ids) - self.padding


@dataclass
class Item(PackedSeqParams):
    """A Call on its way to the layers. Megatron hands packed_seq_params on untouched, to layers that run again in a backward too."""
    call: Call | None = None


def item_of(call, config):
    """The Item of a call. Latent attention takes packed rows only: one sequence of them."""
    local = len(call.ids)
    if not config.multi_latent_attention:
        return Item(qkv_format="sbhd", max_seqlen_q=local, max_seqlen_kv=local, call=call)
    ends = torch.tensor([0, local * config.context_parallel_size], dtype=torch.int32, device=call.ids.device)
    return Item(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=local, max_seqlen_kv=local, call=call)


def call_of(packed_seq_params):
    """The Call that reaches a layer, or None in a plain call of the model."""
    return packed_seq_params.call if isinstance(packed_seq_params, Item) else None


def current():
    """The Call that runs in this thread, or None. Layers read it from their arguments instead, because they may run again in a backward."""
    return _current.get()


@contextlib.contextmanager
def running(call):
    before = _current.set(call)
    try:
        yield
    finally:
        _current.reset(before)


def run(chunk, inner, call, **more):
    """Calls a model chunk with the rows of a call. `inner`: the chunk without wrappers. `more`: further arguments."""
    positions = call.positions[None]
    if getattr(inner, "position_embedding_type", "") == "mrope":
        positions = positions.expand(3, 1, -1)
    with running(call):
        return chunk(call.ids[None], positions, None, packed_seq_params=item_of(call, inner.config), **more)
