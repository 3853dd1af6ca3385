"""The prompts of an accumulation window: each runs forward once, before the first micro-batch that needs it, and backward once, at the window's end.

If FSDP shards the model, every call of it is a collective. A rank with fewer prompts then makes stand-in calls, so that all ranks have equally many
calls open. FSDP1 also needs the backward directly after a forward with a graph: there a prompt runs without gradients first, and again at the end.
The vision tower runs so under both (hf/images.py, ShardedTower).
"""

import contextlib

import torch

from espalier.errors import Unsupported
from espalier.hf import ranks
from espalier.rows.trunk import Trunk
from espalier.hf.checks import check_captured, check_live
from espalier.hf.step import Seed, backward


class Prompt:
    """`call(trunk)` calls the model for the prompt's rows and returns its logits and, with a router's loss, the RowSums of its rows, else None. In
    every micro-batch `leaf` takes the place of these sums. `which`: the index of its images among those of `pictures`, or None."""

    def __init__(self, call, rows, pictures=None, which=None):
        self.call, self.trunk, self.pictures, self.which = call, Trunk(rows), pictures, which
        self.logits = self.router = self.leaf = None

    def run(self, model, trains):
        """Runs forward. `trains`: whether a backward will follow, perhaps of another forward."""
        self.logits, self.router = self.call(self.trunk)
        check_captured(model, self.trunk)
        if torch.is_grad_enabled():
            check_live(model, self.trunk)
        if self.router and self.leaf is None:
            self.leaf = self.router.sums.detach().requires_grad_(trains)

    def gathered(self):
        """[tensor, gradient, tensor, gradient, ...] for a Seed: tensors with a graph and the gradients gathered for them."""
        pairs = self.trunk.gathered()
        if self.router and self.leaf.grad is not None and self.router.sums.requires_grad:
            pairs += [self.router.sums, self.leaf.grad]
        return pairs


class StandIn:
    """A call of one token, on a rank without a prompt of its own where another rank has one."""

    def __init__(self, call):
        self.call, self.logits, self.pictures = call, None, None

    def run(self, model, trains):
        self.logits = self.call()

    def gathered(self):
        return []


class Window:
    """`prompts`: by key. `calls`: Prompts and StandIns in the order of their forwards. `towers`: of a sharded model, the ShardedTowers (hf/images.py)
    whose features they read."""

    def __init__(self):
        self.prompts, self.calls, self.towers = {}, [], []

    def forward(self, model, new, stand_in):
        """Runs `new`, a dict of Prompts. Under FSDP all ranks call this together. Returns the first `Unsupported` of a prompt, or None: the other calls
        are made, for the other ranks."""
        trains, together, problem = torch.is_grad_enabled(), ranks.sharded(model), None
        count = ranks.largest(model, len(new))[0] if together else len(new)
        again = together and ranks.alternating(model)
        for call in [*new.values()] + [StandIn(stand_in) for _ in range(count - len(new))]:
            with torch.no_grad() if again else contextlib.nullcontext():
                try:
                    call.run(model, trains)
                except Unsupported as reason:
                    problem = problem or reason
            if problem is not None and not together:
                break
            if not together or again:
                call.logits = None  # frees the graph of rows behind the last keys and values
            self.calls.append(call)
        self.prompts.update(new)
        return problem

    def mark(self):
        """The state to which `reset` returns."""
        return set(self.prompts), len(self.calls), len(self.towers)

    def reset(self, mark):
        known, calls, towers = mark
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key in known}
        self.calls, self.towers = self.calls[:calls], self.towers[:towers]

    def backward(self, model):
        """Runs the backward of all calls, then of the images. Returns the first `Unsupported` of a prompt that ran again, or None."""
        together, problem = ranks.sharded(model), None
        for call in self.calls:
            if together and ranks.alternating(model):
                try:
                    call.run(model, True)
                except Unsupported as reason:
                    problem = problem or reason
            pairs = call.gathered()
            if together and call.logits is not None and call.logits.requires_grad:  # every layer's hooks fire only if every layer's output gets a gradient
                pairs += [call.logits, torch.zeros_like(call.logits)]
            if pairs:
                backward(Seed.apply(*pairs))
            call.logits = None
        for tower in self.towers:
            tower.finish()
        for pictures in {id(call.pictures): call.pictures for call in self.calls if call.pictures and not together}.values():
            pairs = pictures.gathered()
            if pairs:
                backward(Seed.apply(*pairs))
        return problem
