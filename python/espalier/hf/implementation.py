"""Espalier's attention function in a model's configs while a step runs; calls that belong to no step run the user's own.

transformers picks the function by the name in a config, which all threads share. So a call without a phase, from another thread or
within the step, is handed on to the function that the config named before.
"""

import contextlib
import sys
import threading

import torch
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from espalier.hf import indexed, mixers
from espalier.hf.current import current
from espalier.hf.model_parts import base_model

NAME = "espalier"

_lock = threading.Lock()
_steps: dict = {}  # by id of a model's config: number of running steps, [(config, user's function name)] of all sub-configs, function that undoes _install
_users: dict = {}  # by id of a config: the user's name, while a step runs


@contextlib.contextmanager
def in_use(model):
    """Context manager in which the model's attention layers, mixers and indexers run Espalier's. Steps of several threads may overlap."""
    base = base_model(model)
    with _lock:
        held = _steps.setdefault(id(base.config), [0, (), None])
        if held[0] == 0:
            if base.config._attn_implementation != NAME:
                held[1] = [(config, config._attn_implementation) for config in _configs(base)]
                _users.update({id(config): name for config, name in held[1]})
                base.set_attn_implementation(NAME)
            held[2] = _install(base)
        held[0] += 1
    try:
        yield
    finally:
        with _lock:
            held[0] -= 1
            if held[0] == 0:
                del _steps[id(base.config)]
                held[2]()
                _give_back(held[1])


@contextlib.contextmanager
def users_own(model):
    """Context manager within a step: the configs name the user's function again, for calls that belong to no phase."""
    configs = [(config, _users.get(id(config), _default(model))) for config in _configs(base_model(model)) if config._attn_implementation == NAME]
    for config, name in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, _ in configs:
            config._attn_implementation_internal = NAME


def _install(base):
    """Installs mixers that pass states on and indexers that choose among the rows of a phase. Returns a function that removes them."""
    undo = [mixers.install(base), indexed.install(base, current)]
    return lambda: [action() for action in undo]


def _default(model):
    return "sdpa" if getattr(base_model(model), "_supports_sdpa", False) else "eager"


def _give_back(configs):
    for config, name in configs:
        config._attn_implementation_internal = name
        _users.pop(id(config), None)


def _configs(base):
    """Every config that a module of the model reads, with its sub-configs."""
    found, waiting = {}, [getattr(module, "config", None) for module in base.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, part, None) for part in config.sub_configs]
    return list(found.values())


def attend(module, query, key, value, attention_mask, **kwargs):
    """Calls the user's attention function with transformers' arguments, or torch's if the user's is not known."""
    name = _users.get(id(getattr(module, "config", None)))
    if name == "eager":
        return _eager(module)(module, query, key, value, attention_mask, **kwargs)
    if name is None and (kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None):
        return _eager(module)(module, query, key, value, _added(attention_mask, query, key), **kwargs)
    function = ALL_ATTENTION_FUNCTIONS[name] if name in ALL_ATTENTION_FUNCTIONS and name != NAME else sdpa_attention_forward
    return function(module, query, key, value, attention_mask, **kwargs)


def _eager(module):
    """`eager_attention_forward` of the model's own file."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _added(mask, query, key):
    """Converts torch's mask to the one that `eager_attention_forward` adds to the scores."""
    if mask is None:
        at = torch.arange(key.shape[2], device=query.device)
        mask = at <= at[-query.shape[2]:, None]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return mask


def mask(*args, config=None, **kwargs):
    """The mask that transformers makes for the user's attention function."""
    name = _users.get(id(config), "sdpa")
    make = ALL_MASK_ATTENTION_FUNCTIONS[name] if name in ALL_MASK_ATTENTION_FUNCTIONS and name != NAME else sdpa_mask
    return make(*args, config=config, **kwargs)
