"""slime and miles with shared prompts, through their own hook:

    --custom-megatron-init-path espalier.megatron.slime.install

Every actor calls it before its model is made. The forward-backward function that slime's `megatron_utils/model.py` takes from Megatron is then the one
of `espalier.megatron.forward_backward`. A model is attached at its first step. ESPALIER_VERIFY=1 compares steps with slime's own.
"""

import functools
import importlib
import os
import sys
from typing import Any

from espalier import megatron
from espalier.errors import Error, Unsupported
from espalier.megatron import trainer
from espalier.megatron.attach import state_of
from espalier.megatron.schedule import inner_of

_MODULES = ("slime.backends.megatron_utils.model", "miles.backends.megatron_utils.model")
_NAME = "get_forward_backward_func"


def install(args: Any = None) -> None:
    """Puts shared prompts into the running slime or miles. `args`: its arguments, which are not changed."""
    if os.environ.get("ENABLE_ROUTING_REPLAY", "0") == "1":
        raise Unsupported("ENABLE_ROUTING_REPLAY", "0: recorded experts are read in the order of forwards", "1", "Leave out --use-rollout-routing-replay")
    found = [name for name in _MODULES if name.partition(".")[0] in sys.modules]
    if not found:
        raise Error("input", "espalier.megatron.slime.install", "a call by slime or miles", "neither is imported",
                    "Give it as --custom-megatron-init-path", 2)
    for name in found:
        module = importlib.import_module(name)
        own = getattr(module, _NAME, None)
        if own is None:
            raise Unsupported(name, f"a module that imports {_NAME} from Megatron", "one that does not", "Use espalier.megatron.forward_backward")
        if not hasattr(own, "without_sharing"):
            setattr(module, _NAME, _getter(own))


def _getter(own):
    """Megatron's `get_forward_backward_func`, whose functions share prompts."""
    shared = functools.cache(lambda function: trainer.forward_backward(function, attach=_attach))

    def get_forward_backward_func(*args, **more):
        return shared(own(*args, **more))

    get_forward_backward_func.without_sharing = own
    return get_forward_backward_func


def _attach(chunks):
    if any(state_of(inner_of(chunk)) is None for chunk in chunks):
        megatron.install(chunks, verify=os.environ.get("ESPALIER_VERIFY", "0").lower() in ("1", "true"))
