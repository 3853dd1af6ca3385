"""A step from rollouts to gradients, or to log-probs."""

import functools
import zlib

import numpy as np
import torch
import torch.distributed as dist

from espalier.errors import Error, Unsupported
from espalier.megatron import program as programs, verification
from espalier.megatron.attach import install, listed, state_of
from espalier.megatron.checks import check_config, has_router_losses
from espalier.megatron.layout import agree, layout_of
from espalier.megatron.plain import PlainStep
from espalier.megatron.routers import RouterStep, layers_with_experts
from espalier.megatron.shape import shape_of, vocabulary_of
from espalier.megatron.schedule import inner_of
from espalier.megatron.step import Step
from espalier.rows.rollouts import Rollouts
from espalier.rows.routes import Routes, recorded


_FEWER = .95  # rows of a shared step over all rows: a step that saves less may lose it to its further micro-batches


class Prepared:
    """A step's rollouts, their plan and this rank's program. All tensor, context and pipeline parallel ranks of a data parallel rank make the same."""

    def __init__(self, chunks, rollouts, wave_tokens, *, gradients, micro_batches=None):
        self.chunks, self.gradients = listed(chunks), gradients
        self.inners = [inner_of(chunk) for chunk in self.chunks]
        if any(state_of(inner) is None for inner in self.inners):
            install(self.chunks)
        for inner in self.inners:
            check_config(inner)
        self.state, self.config = state_of(self.inners[0]), self.inners[0].config
        self.layout, like = layout_of(self.config), next(self.inners[0].parameters())
        self.device, vocabulary = like.device, vocabulary_of(self.inners)
        self.rollouts = Rollouts(rollouts, vocabulary)
        with_sets = [i for i, sets in enumerate(self.rollouts.kept) if sets is not None]
        if with_sets:
            raise Unsupported(f"rollouts[{with_sets[0]}]['kept_ids']", "rollouts without kept sets: a rank may have a part of the vocabulary", "kept sets",
                              "Leave kept_ids out to train over the whole vocabulary; espalier.hf and espalier train train over kept sets")
        with_images = [i for i, record in enumerate(self.rollouts.records) if record.get("images")]
        if with_images:
            raise Unsupported(f"rollouts[{with_images[0]}]['images']", "rollouts without images: no tower runs here", "images",
                              "Use the trainer's own path, or espalier.hf, which shares prompts with images")
        if recorded(self.rollouts):
            self.rollouts.with_routes(self._recorded())
        self.plan = self.rollouts.planned(shape_of(self.config, vocabulary), like, wave_tokens=wave_tokens * self.layout.cp, trunk_state="keep",
                                          gradients=gradients)
        agree(_fingerprint(self.rollouts, self.plan), self.device, (self.layout.tp_group, self.layout.cp_group, self.layout.pp_group))
        self.micro_batches = self._batches(micro_batches)
        self.program = self._program(gradients)

    def _recorded(self):
        """The Routes of the rollouts, some of which have recorded experts."""
        config = self.config
        if getattr(config, "moe_router_fusion", False):
            raise Unsupported("config.moe_router_fusion", "False with recorded experts: the fused router chooses by itself", "True",
                              "Set moe_router_fusion to False, or leave routed_experts out")
        return Routes(self.rollouts, config.num_moe_experts or 0, config.moe_router_topk if config.num_moe_experts else 0,
                      layers_with_experts(self.inners[0]) if config.num_moe_experts else [], config.num_layers)

    @property
    def last(self):
        """True if this rank has the last pipeline stage."""
        return any(inner.post_process for inner in self.inners)

    @property
    def shares(self):
        """True if the plan runs so few rows that a trainer's own path would be slower."""
        return sum(item.rows for item in self.plan.items) <= _FEWER * int(self.rollouts.lengths.sum())

    def _batches(self, given):
        batches = [[i] for i in range(len(self.rollouts))] if given is None else [list(batch) for batch in given]
        if sorted(i for batch in batches for i in batch) != list(range(len(self.rollouts))):
            raise Error("option", "micro_batches", f"lists that have each of the {len(self.rollouts)} rollouts once", repr(batches)[:80], "", 2)
        return batches

    def _program(self, gradients):
        return programs.aligned(programs.program_of(self.plan.program(), self.plan.items, gradients), self.layout.together, self.layout.microbatches)

    def routing(self):
        """The RouterStep of a step, or None without experts. If routers have losses, a pass without gradients counts their choices first."""
        if not self.config.num_moe_experts:
            return None
        make = lambda **how: RouterStep(self.config, self.rollouts.lengths, self.micro_batches, len(self.program), self.device, **how)
        routing = make()
        if has_router_losses(self.config) and self.inners[0].training:
            counting = make(counting=True)
            with torch.no_grad():
                Step(self.chunks, self.rollouts, self.plan.items, self._program(False), self.layout, edges=self.plan.edges, seen=lambda wave: None,
                     routing=counting).run()
            routing.settle(counting.counts)
        return routing

    def step(self, loss=None, seen=None, temperature=1.0, tokens=None):
        """Runs the step. `tokens(wave)`: the tokens by which Megatron divides with calculate_per_token_loss; None: the responses' tokens."""
        return Step(self.chunks, self.rollouts, self.plan.items, self.program, self.layout, edges=self.plan.edges, loss=loss, seen=seen,
                    temperature=temperature, routing=self.routing() if self.gradients else None, tokens=tokens).run()

    def verified(self, loss, temperature, tokens=None, plain=None, again=None):
        """The table of a comparison if this step must be compared, else None. `plain` and `again` run the step densely and return its loss; None: plain
        calls of the model, one rollout a micro-batch."""
        if not verification.due(self.state, self.regime):
            return None
        if plain is None:
            again = [*(self.config.recompute_modules or ())] if self.config.recompute_granularity == "selective" else ["moe"]
            if self.rollouts.routes is not None and self.config.recompute_granularity and "moe" in again:
                raise Unsupported("verify=True", "recorded experts without recomputation of their layers: a plain call does not know its rows when it runs again",
                                  f"recompute_granularity {self.config.recompute_granularity}", "Verify a step without routed_experts, or without recomputation")
            if has_router_losses(self.config) and any(len(batch) > 1 for batch in self.micro_batches):
                raise Unsupported("verify=True", "router losses of one rollout a micro-batch", "micro_batches of several rollouts",
                                  "Leave micro_batches out, or set the router losses' coefficients to 0")
            plain = again = lambda: float(PlainStep(self.chunks, self.rollouts, self.layout, loss=loss, temperature=temperature, tokens=tokens).run().losses)
        table = verification.compare(self.chunks, self.inners, lambda: float(self.step(loss, None, temperature, tokens).losses), plain, again)
        self.state.verified.add(self.regime)
        return table

    @functools.cached_property
    def regime(self):
        return verification.regime(self.inners, self.plan.items, self.program, self.rollouts)

    def was_verified(self):
        """True if a step of this regime was compared."""
        return self.regime in self.state.verified

    def from_last_stage(self, total):
        """A number that only the last stage has, on every stage."""
        if self.layout.pp == 1:
            return total
        told = torch.tensor([total], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, group=self.layout.pp_group)  # the other stages have 0
        return told.item()

    @property
    def schedule(self):
        return "phased" if any(item.trunk for item in self.plan.items) else "packed"


def _fingerprint(rollouts, plan):
    found = 0
    for array in (*rollouts.prompts, *rollouts.responses, *(part for item in plan.items for part in (item.segments, item.finished))):
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    return found
