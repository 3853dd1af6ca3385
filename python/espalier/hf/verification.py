"""The dense step, by transformers alone, that `verify=True` compares the shared step with.

Two dense runs give the floor. Both call the model once for every rollout, so that neither length nor padding differs between them. The second runs
the rollouts in reverse, with embeddings moved by one rounding step (probe.nudged). The shape of a call affects neither run, and so not the floor.

The verdict on a parameter is that of espalier.rows.verdict.
"""

import weakref

import torch
import torch.distributed as dist

from espalier.hf import dense, probe, ranks, rotary
from espalier.hf.model_parts import active_adapters, base_model, unwrapped
from espalier.hf.routers import RouterLoss
from espalier.hf.sets import whole
from espalier.hf.visibility import bounds
from espalier.rows.verdict import compared, demand

_verified: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model: the regimes that were compared


def regime(model, prepared, parts, schedule, trunk_state):
    """The properties of a step, besides its tokens, that its arithmetic depends on: the schedule, how deep trunks stand below each other, the next power
    of two above the number of trunks and above its longest rollout, whether there are several waves, which rotary tables, windows and chunks
    its rollouts pass; and how the model runs: its mode, autocast, types, modules, adapters and trained parameters."""
    base = base_model(model)
    how = (base.training, autocast(model), adapters(model), hash(tuple((type(module), getattr(module, "gradient_checkpointing", None)) for module in base.modules())),
           hash(tuple((p.dtype, p.requires_grad) for p in base.parameters())))
    if schedule == "dense":
        return ("dense", *how)
    depths, trunks, waves = [0], 0, 0
    for _, plan in parts:
        depth = []
        for item in plan.items:
            depth.append((depth[item.parent] if item.parent >= 0 else 0) + int(item.trunk))
            trunks, waves = trunks + int(item.trunk), waves + int(not item.trunk)
        depths += depth
    longest = int(prepared.lengths.max())
    passed = sum(longest > limit for _, _, limit in rotary.limits(base)), sum(longest > bound for bound in bounds(model))
    return (schedule, trunk_state, max(depths), trunks.bit_length(), waves > 1, longest.bit_length(), len(parts), passed,
            prepared.images is not None, *how)


def autocast(model):
    kind = ranks.device_of(model).type
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


def adapters(model):
    return tuple(sorted(active_adapters(unwrapped(model))))


def is_verified(model, regime):
    return regime in _verified.get(unwrapped(model), ())


def is_due(model, regime):
    """True if a step of this regime must be compared, on any rank: ranks that share layers compare together, even if their regimes differ."""
    return any(ranks.told_by_all(model, not is_verified(model, regime))) if ranks.sharded(model) else not is_verified(model, regime)


def is_first(model):
    """True if no step of the model was compared yet."""
    return unwrapped(model) not in _verified


def begin(model, router=None):
    """Stores the existing gradients and clears them, so that the step's own gradients can be compared."""
    return _Comparison(model, router)


class _Comparison:
    def __init__(self, model, router=None):
        self.model, self.router = model, router
        self.named = ranks.trained(model)
        self.before = self._take()

    def _take(self):
        grads = {name: p.grad for name, p in self.named}
        for _, p in self.named:
            p.grad = None
        return grads

    def put_back(self):
        """Restores the earlier gradients after the step has failed."""
        for name, p in self.named:
            p.grad = self.before[name]

    def compare(self, shared_loss, plain, again, regime=("verl",)):
        """`plain()` and `again()` run the same step densely and return its loss; embeddings are moved for `again`. Returns the table. Afterwards
        `.grad` is the earlier gradient plus the shared step's. Raises `Error` if shared is too far from dense."""
        shared = self._take()
        dense_loss = plain()
        wanted = self._take()
        everywhere = over_shards(self.model)
        other = {}

        def draw(number):
            other.clear()
            with probe.nudged(base_model(self.model).get_input_embeddings(), number):
                again()
            other.update(self._take())
            return [(name, shared[name], wanted[name], other[name]) for name, _ in self.named]

        table = compared(draw, shared_loss, dense_loss, everywhere)
        for name, p in self.named:
            parts = [g for g in (self.before[name], shared[name]) if g is not None]
            if parts and other[name] is not None:  # this memory is used again: under FSDP1 it may be a part of the flat gradient
                other[name].copy_(sum(parts[1:], parts[0]))
                p.grad = other[name]
            else:
                p.grad = sum(parts[1:], parts[0]) if parts else None
        demand(table)
        _verified.setdefault(unwrapped(self.model), set()).add(regime)
        return table

    def compare_dense(self, rollouts, loss, temperature, shared_loss, regime, sets=()):
        """`compare` with dense runs of the same rollouts: one by one, then in reverse. Sets stay whole."""
        singles = whole(sets, len(rollouts)) if sets else [[i] for i in range(len(rollouts))]
        run = lambda batches: lambda: self._dense(rollouts, loss, temperature, batches)
        return self.compare(shared_loss, run(singles), run(singles[::-1]), regime)

    def _dense(self, rollouts, loss, temperature, batches):
        router = self.router and RouterLoss(self.model, rollouts, self.router.coef, self.router.scope)
        with torch.compiler.set_stance("force_eager"):  # a compiled model would not see the hook that moves its embeddings
            return dense.run(self.model, rollouts, loss, temperature, batches, router).total


def over_shards(model):
    """(device, process group) of the sums over a sharded model's ranks; None for another model."""
    return (ranks.device_of(model), ranks.group_of(model)) if ranks.sharded(model) and dist.is_initialized() else None
