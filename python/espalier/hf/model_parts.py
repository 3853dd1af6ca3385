"""The parts of a model: what its wrappers hold, its decoder's configuration and layers, its adapters."""

import sys

import torch


def unwrapped(model):
    """The module inside DistributedDataParallel, FSDP1 and torch.compile. (FSDP2 and PEFT change a module in place.)"""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) or is_fsdp1(model):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def is_fsdp1(module):
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def base_model(model):
    """The transformers model inside all wrappers, PEFT's included."""
    model = unwrapped(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_config(model):
    config = base_model(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_layers(model):
    """{layer index: (name, module)} of the attention modules, whose keys and values a trunk holds."""
    found = {}
    for name, module in base_model(model).named_modules():
        index = getattr(module, "layer_idx", None)
        if index is not None and (hasattr(module, "is_causal") or hasattr(module, "scaling")):
            found[index] = (name, module)
    return found


def decoder_layers(base):
    """The decoder's layers: the module list that contains the attention layers."""
    modules = dict(base.named_modules())
    for _, (name, _) in sorted(attention_layers(base).items()):
        parts = name.split(".")
        for at, part in enumerate(parts):
            above = modules.get(".".join(parts[:at]))
            if part.isdigit() and isinstance(above, torch.nn.ModuleList) and len(above) >= decoder_config(base).num_hidden_layers:
                return list(above)[:decoder_config(base).num_hidden_layers]
    return []


def active_adapters(inner):
    """{name: configuration} of a peft model's active adapters; empty without peft."""
    configs = getattr(inner, "peft_config", None)
    if not isinstance(configs, dict):
        return {}
    active = getattr(inner, "active_adapters", None)  # a method in transformers' own PEFT integration
    return {name: config for name, config in configs.items() if callable(active) or active is None or name in active}
