"""Registers the engines that verl uses for the vendor "espalier"."""

from typing import Any

from verl.utils.device import get_device_name
from verl.workers import engine as engines
from verl.workers.engine import BaseEngine, EngineRegistry

from espalier import native
from espalier.errors import Unsupported
from espalier.verl import own_forwards, sharing
from espalier.verl.fsdp import SharedPromptsEngine
from espalier.verl.options import Options

_BACKENDS = ("fsdp_turbo", "veomni", "torchtitan", "automodel")


def register(vendor: str, taken: Options) -> None:
    """Registers the vendor: fsdp, fsdp2 and megatron with shared prompts; every other backend and device is refused by name. Critics stay verl's.
    `taken`: the Options of engines made from now on."""
    sharing.options_of_new_engines["taken"] = taken
    registered = EngineRegistry._engines.get("language_model", {})
    if ("cuda", vendor) in registered.get("fsdp2", {}):
        return
    native.library()
    own_forwards.remember()
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=vendor)(SharedPromptsEngine)
    refused = [(["fsdp", "fsdp2"], ["npu"]), (list(_BACKENDS), ["cuda", "npu", "cpu"])]
    if getattr(engines, "MegatronEngineWithLMHead", None) is not None:  # verl sets it to None where Megatron-Core cannot be imported
        from espalier.verl.megatron import SharedMegatronEngine
        EngineRegistry.register(model_type="language_model", backend="megatron", device=["cuda", "cpu"], vendor=vendor)(SharedMegatronEngine)
        refused.append((["megatron"], ["npu"]))
    else:
        refused.append((["megatron"], ["cuda", "npu", "cpu"]))
    for backends, devices in refused:
        EngineRegistry.register(model_type="language_model", backend=backends, device=devices, vendor=vendor)(_Refused)


class _Refused(BaseEngine):
    def __init__(self, *_: Any, engine_config: Any = None, **__: Any) -> None:
        raise Unsupported("VERL_ENGINE_VENDOR=espalier", "actor.strategy=fsdp, fsdp2 or megatron (with Megatron-Core installed) on a CUDA device",
                          f"{getattr(engine_config, 'strategy', 'another backend')} on {get_device_name()}", "Unset VERL_ENGINE_VENDOR")
