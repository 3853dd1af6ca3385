"""TRL's trainers with shared prompts computed once. TRL's own loss, head, optimizer loop and logging stay in charge.

    from espalier.trl import GRPOTrainer          (RLOOTrainer, DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer, DistillationTrainer,
                                                   GKDTrainer; the same arguments, shared_prompts=True, verify=False)

GRPO and RLOO (rollouts.py): a prompt, with its images, runs once for all micro-batches of an accumulation window. The others
(batches.py): the common beginnings of a batch's rows run once, also in the passes of a reference and a teacher. A batch that cannot be
shared (packing, anything that `espalier.hf.check` refuses) runs TRL's own path, with one note. Under DDP and FSDP all ranks share. verify=True
compares every model's first shared pass with TRL's own path (verification.py).
"""

from espalier.extras import require

require("espalier.trl", "trl")

from typing import Any

import trl

from espalier.trl.batches import SharedBatches, SharedReference
from espalier.trl.rollouts import SharedPrompts

__all__ = ["DPOTrainer", "DistillationTrainer", "GKDTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer",
           "SharedBatches", "SharedPrompts"]


class GRPOTrainer(SharedPrompts, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with shared prompts."""


class RLOOTrainer(SharedPrompts, trl.RLOOTrainer):
    """`trl.RLOOTrainer` with shared prompts."""


class DPOTrainer(SharedReference, trl.DPOTrainer):
    """`trl.DPOTrainer` with shared prompts, in the reference's pass too."""


class KTOTrainer(SharedReference, trl.KTOTrainer):
    """`trl.KTOTrainer` with shared prompts, in the reference's passes too."""


class RewardTrainer(SharedBatches, trl.RewardTrainer):
    """`trl.RewardTrainer` with shared prompts."""


class SFTTrainer(SharedBatches, trl.SFTTrainer):
    """`trl.SFTTrainer` with shared prefixes, such as a long system prompt."""


class DistillationTrainer(SharedBatches, trl.DistillationTrainer):
    """`trl.DistillationTrainer` with shared prompts, in the teacher's pass too."""


def __getattr__(name: str) -> Any:
    """Creates GKDTrainer on first use: importing TRL's experimental package logs a warning."""
    if name != "GKDTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trl.experimental.gkd import GKDTrainer as plain
    trainer = type(name, (SharedBatches, plain), {"__module__": __name__, "__doc__": "TRL's GKDTrainer with shared prompts, those of the teacher, too."})
    globals()[name] = trainer
    return trainer
