"""ms-swift with shared prompts:

    swift rlhf --rlhf_type dpo --external_plugins swift_plugin.py ...        (also kto and rm; swift sft)

The common beginnings of a batch's rows run once, in the reference's pass too. A batch that cannot be shared (packing, padding_free, sequence
parallelism) runs ms-swift's own path, with one note in the log. GRPO of ms-swift computes log-probs in a way of its own and stays as it is.
In one process ms-swift checkpoints layers reentrantly, which loses the graph of a shared prompt; the plug-in's default is the other way, as
ms-swift's own with several processes. `--gradient_checkpointing_kwargs '{"use_reentrant": true}'` trains without sharing.
"""

import importlib

from swift.trainers.trainer_factory import TrainerFactory
from transformers import TrainerCallback

from espalier import trl as shared

MIXINS = {"dpo": "SharedReference", "kto": "SharedReference", "rm": "SharedBatches", "causal_lm": "SharedBatches"}
OWN = {kind: TrainerFactory.TRAINER_MAPPING[kind] for kind in MIXINS}
TrainerFactory.TRAINER_MAPPING.update({kind: f"{__name__}.{kind}" for kind in MIXINS})


class Rows(TrainerCallback):
    def __init__(self, rows):
        self.rows = rows

    def on_train_end(self, *_, **__):
        print(f"{self.rows['run']} rows run instead of {self.rows['without_sharing']}")


def __getattr__(name):
    """ms-swift's trainer of this kind, with shared prompts."""
    if name not in MIXINS:
        raise AttributeError(name)
    module, kind = OWN[name].rsplit(".", 1)
    own = getattr(importlib.import_module(module), kind)

    class Shared(getattr(shared, MIXINS[name]), own):
        def __init__(self, *args, **kwargs):
            settings = kwargs["args"]
            settings.gradient_checkpointing_kwargs = {"use_reentrant": False} | (settings.gradient_checkpointing_kwargs or {})
            super().__init__(*args, **kwargs)
            self.add_callback(Rows(self.shared_rows))

    return Shared
