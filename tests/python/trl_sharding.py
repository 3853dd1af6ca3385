"""accelerate's FSDP without accelerators, for trl_shard_ranks.py and bench/trainer_steps.py."""

import contextlib
import os

import accelerate.state
import torch
from accelerate.utils import DistributedType


@contextlib.contextmanager
def sharding_on_a_cpu():
    """accelerate uses its FSDP plugin only with accelerators. Context manager: it also does with gloo."""
    state, parent = accelerate.state.AcceleratorState, accelerate.state.PartialState
    made, before = state.__init__, dict(parent._shared_state)

    def with_plugin(self, *args, fsdp_plugin=None, **kwargs):
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            parent._shared_state.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))  # not cpu:0
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.__dict__.update(parent._shared_state, fsdp_plugin=fsdp_plugin)

    state._reset_state()
    state.__init__ = with_plugin
    try:
        yield
    finally:
        state.__init__ = made
        state._reset_state()
        parent._shared_state.update(before)
        os.environ.pop("ACCELERATE_USE_FSDP", None)
