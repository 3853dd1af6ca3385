"""TRL's trainers with shared prompts computed once. TRL's own loss, head, optimizer loop and logging stay in charge.

    from espalier.trl import GRPOTrainer          (RLOOTrainer, AsyncGRPOTrainer, DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer, DistillationTrainer,
                                                   GKDTrainer; the same arguments, shared_prompts=True, verify=False)

GRPO and RLOO (rollouts.py): a prompt, with its images, runs once for all micro-batches of an accumulation window. The others
(batches.py): the common beginnings of a batch's rows run once, also in the passes of a reference and a teacher. A batch that cannot be
shared (packing, anything that `espalier.hf.check` refuses) runs TRL's own path, with one note. Under DDP and FSDP all ranks share. verify=True
compares every model's first shared pass with TRL's own path (verification.py).
"""

from espalier.extras import require

require("espalier.trl", "trl")

import importlib
from typing import Any

import trl

from espalier.trl.batches import SharedBatches, SharedReference
from espalier.trl.loop import SharedLoop
from espalier.trl.rollouts import SharedPrompts

__all__ = ["AsyncGRPOTrainer", "DPOTrainer", "DistillationTrainer", "GKDTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer",
           "SharedBatches", "SharedLoop", "SharedPrompts", "SharedReference"]

_TRAINERS = {"AsyncGRPOTrainer": (None, "attention that reads a shared key where it lies (asynchronous.py)"),
             "DPOTrainer": (SharedReference, "shared prompts, in the reference's pass too"),
             "DistillationTrainer": (SharedBatches, "shared prompts, in the teacher's pass too"),
             "GKDTrainer": (SharedBatches, "shared prompts, those of the teacher, too"),
             "GRPOTrainer": (SharedPrompts, "shared prompts"),
             "KTOTrainer": (SharedReference, "shared prompts, in the reference's passes too"),
             "RLOOTrainer": (SharedPrompts, "shared prompts"),
             "RewardTrainer": (SharedBatches, "shared prompts"),
             "SFTTrainer": (SharedBatches, "shared prefixes, such as a long system prompt")}
_EXPERIMENTAL = {"AsyncGRPOTrainer": "trl.experimental.async_grpo", "GKDTrainer": "trl.experimental.gkd"}


def __getattr__(name: str) -> Any:
    """Creates a trainer on first use: importing TRL's experimental package logs a warning, and older releases of TRL lack some trainers."""
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place: Any = importlib.import_module(_EXPERIMENTAL[name]) if name in _EXPERIMENTAL else trl
    plain, (mixin, what) = getattr(place, name), _TRAINERS[name]
    if mixin is None:  # its module imports TRL's experimental package
        mixin = importlib.import_module("espalier.trl.asynchronous").TreeAttention
    trainer = type(name, (mixin, plain), {"__module__": __name__, "__doc__": f"`{plain.__module__.split('.')[0]}.{name}` with {what}."})
    globals()[name] = trainer
    return trainer
