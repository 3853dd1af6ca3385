"""verl on a machine without a GPU, to try a step: VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu.

verl's interface of a platform with nothing to do, and verl's own FSDP engine registered for it.
"""

import contextlib
import sys
import types

from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _cpu_platform():
    """verl's platform interface with nothing to do."""
    nothing = lambda *_, **__: None
    memory = {name: lambda *_, **__: 0 for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")}
    module = types.SimpleNamespace(**memory, synchronize=nothing, empty_cache=nothing, set_device=nothing, is_available=lambda: False,
                                   current_device=lambda: "cpu", device_count=lambda: 1, get_device_name=lambda *_: "CPU",
                                   mem_get_info=lambda *_: (1, 1))
    members = {name: nothing for name in PlatformBase.__abstractmethods__}
    for name, value in dict(device_name="cpu", vendor_name="cpu", device_module=module).items():
        members[name] = property(lambda _, value=value: value)
    for name, value in dict(current_device="cpu", device_count=1, communication_backend_name="gloo", is_available=True,
                            is_platform_available=True, visible_devices_envvar="CUDA_VISIBLE_DEVICES", ray_resource_name="CPU",
                            ray_noset_envvars=[], nvtx_range=contextlib.nullcontext(), is_ipc_supported=False).items():
        members[name] = lambda *_, value=value, **__: value
    return type("PlatformCPU", (PlatformBase,), members)


PlatformRegistry.register("cpu")(_cpu_platform())
sys.modules.setdefault("trl", None)  # verl 0.9.1 asks an installed TRL for a class that TRL 1.16 no longer has

from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithValueHead)
