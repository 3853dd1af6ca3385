"""axolotl with shared prompts. In its configuration, with this file's folder on PYTHONPATH:

    plugins:
      - axolotl_plugin.SharedPrompts

GRPO runs every prompt once in an accumulation window. DPO, IPO, KTO and reward models run the common beginnings of a batch once, supervised
training without sample packing does, too. A batch that cannot be shared runs axolotl's own path, with one note in the log.
With `gradient_checkpointing: true` and no `gradient_checkpointing_kwargs`, axolotl checkpoints supervised training reentrantly, which loses the graph
of a shared prompt; with the plug-in the default is `use_reentrant: false`, as axolotl's own for the other kinds.
"""

from axolotl.integrations.base import BasePlugin
from axolotl.utils.import_helper import get_cls_from_module_str

from espalier import trl as shared

TRAINERS = {"grpo": ("SharedPrompts", "grpo.trainer.AxolotlGRPOTrainer"), "dpo": ("SharedReference", "dpo.trainer.AxolotlDPOTrainer"),
            "ipo": ("SharedReference", "dpo.trainer.AxolotlDPOTrainer"), "kto": ("SharedReference", "trl.AxolotlKTOTrainer"),
            "reward": ("SharedBatches", "trl.AxolotlRewardTrainer"), "sft": ("SharedBatches", "base.AxolotlTrainer")}


def __getattr__(name):
    """axolotl's trainer of this kind, with shared prompts."""
    if name not in TRAINERS:
        raise AttributeError(name)
    mixin, own = TRAINERS[name]
    trainer = type(f"Shared_{name}", (getattr(shared, mixin), get_cls_from_module_str(f"axolotl.core.trainers.{own}")), {})
    if name == "reward":  # axolotl passes every reward trainer but its own an argument that TRL's lacks
        trainer.__init__ = lambda self, *args, dataset_tags=None, **kwargs: super(trainer, self).__init__(*args, **kwargs)
    return trainer


class SharedPrompts(BasePlugin):
    def register(self, cfg):
        if cfg.get("gradient_checkpointing") is True and cfg.get("gradient_checkpointing_kwargs") is None:
            cfg["gradient_checkpointing_kwargs"] = {"use_reentrant": False}

    def pre_model_load(self, cfg):
        if cfg.rl and cfg.rl.value in TRAINERS and not cfg.trainer_cls:
            cfg.trainer_cls = f"{__name__}.{cfg.rl.value}"

    def get_trainer_cls(self, cfg):
        return None if cfg.rl or cfg.trainer_cls else __getattr__("reward" if cfg.reward_model else "sft")

    def post_trainer_create(self, cfg, trainer):
        self.trainer = trainer

    def post_train(self, cfg, model):
        rows = getattr(self.trainer, "shared_rows", {"run": 0, "without_sharing": 0})
        print(f"{rows['run']} rows run instead of {rows['without_sharing']}")
