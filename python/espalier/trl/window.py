"""The prompts of an accumulation window: each runs forward once, before the first micro-batch that needs it, and backward once, at the window's end.

If FSDP shards the model, every call of it is a collective. A rank with fewer prompts then makes stand-in calls, so that all ranks have equally many
calls open. FSDP1 also needs the backward directly after a forward with a graph: there a prompt runs without gradients first, and again at the end.
The vision tower runs so under both (hf/towers.py, ShardedTower). Otherwise
the tower's graph of a prompt's images stays until the window's end, and that of a response's images until its micro-batch's backward.
"""

import contextlib

import torch

from espalier.errors import Unsupported
from espalier.hf import ranks
from espalier.rows.trunk import Trunk
from espalier.hf.checks import check_captured, check_live
from espalier.hf.calls import Seed, backward


class Prompt:
    """`call(trunk)` calls the model for the prompt's rows and returns its logits and, with a router's loss, the RowSums of its rows, else None. In
    every micro-batch `leaf` takes the place of these sums."""

    def __init__(self, call, rows):
        self.call, self.trunk = call, Trunk(rows)
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
        self.call, self.logits = call, None

    def run(self, model, trains):
        self.logits = self.call()

    def gathered(self):
        return []


class Window:
    """`prompts`: by key. `calls`: Prompts and StandIns in the order of their forwards. `pictures`: the images of its micro-batches (rollouts.py).
    `towers`: of a sharded model, the ShardedTowers (hf/towers.py) that compute their features."""

    def __init__(self):
        self.prompts, self.calls, self.pictures, self.towers = {}, [], [], []

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
        return set(self.prompts), len(self.calls), len(self.pictures), len(self.towers)

    def reset(self, mark):
        known, calls, pictures, towers = mark
        self.prompts = {key: prompt for key, prompt in self.prompts.items() if key in known}
        self.calls, self.pictures, self.towers = self.calls[:calls], self.pictures[:pictures], self.towers[:towers]

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
        if not together:
            self.release(prompts_too=True)
        return problem

    def release(self, prompts_too=False):
        """Runs the vision tower's backward for images that no later call reads: images of responses alone or, with `prompts_too`, all."""
        for pictures in self.pictures:
            pairs = pictures.gathered(prompts_too)
            if pairs:
                backward(Seed.apply(*pairs))
        self.pictures = [pictures for pictures in self.pictures if pictures.tower.open]
