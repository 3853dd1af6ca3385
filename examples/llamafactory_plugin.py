"""LLaMA-Factory (v1) with shared prompts: the same command with this file in place of llamafactory-cli,

    python llamafactory_plugin.py sft config.yaml

and in the configuration

    kernel_config:
      name: espalier

Supervised training runs the common beginnings of a micro-batch once, such as a long system prompt. A batch that cannot be shared (padding_free,
the reward model's two answers in one row) runs LLaMA-Factory's own path, with one note in the log.
"""

import atexit
import inspect

from llamafactory.v1 import launcher
from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin

from espalier.trl import SharedLoop


@KernelPlugin("espalier").register()
def share(model, include_kernels=None):
    shared, takes = SharedLoop(model), inspect.signature(type(model).forward).parameters
    shared.attach()
    own = model.forward
    model.forward = lambda *args, **batch: own(*args, **{name: x for name, x in batch.items() if name in takes})  # without the batch's loss_weights
    atexit.register(lambda: print(f"{shared.shared_rows['run']} rows run instead of {shared.shared_rows['without_sharing']}"))
    return model


if __name__ == "__main__":
    launcher.launch()
