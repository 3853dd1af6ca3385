"""Layers whose rows attend to chosen keys: the sparse attention of DeepSeek-V3.2, GLM-5 and their relatives.

An indexer scores the keys that a row may see, I_ts = sum_h w_th relu(q_th . k_s), and the row attends to the `index_topk` best. The choice
depends on the row and on its own path alone, so a shared row chooses the same keys in all its rollouts. It has no gradient. A `Trunk` keeps
the indexer's keys of its rows beside its keys and values; rows below it score [keys of the trunks | own keys].

The indexer's own forward does the arithmetic. Its mask argument says which rows each row sees, and the keys of the trunks take the place of
transformers' cache. Among equal scores torch.topk chooses, as in a call of the model alone.
"""

import functools
import inspect

import torch

from espalier.errors import Unsupported
from espalier.hf.versions import cache_argument
from espalier.rows.trunk import trunks_of

_ARGUMENTS = {"self", "hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids"}  # and the cache
KIND = "indexed_attention"

_configs: dict = {}  # number of running steps, by the id of the model's config


def indexers(base):
    """{name: module} of the model's indexers of this form."""
    return {name: module for name, module in base.named_modules() if _is_indexer(module)}


def _is_indexer(module):
    forward = inspect.unwrap(type(module).forward)
    return "update_indexer" in getattr(getattr(forward, "__code__", None), "co_names", ()) and set(inspect.signature(forward).parameters) == {*_ARGUMENTS, cache_argument(module)}


def serves(attention):
    """True if an attention layer takes its keys from such an indexer: its own, or that of an earlier layer."""
    if not hasattr(attention, "indexer"):
        return False
    return getattr(attention, "skip_topk", False) if attention.indexer is None else _is_indexer(attention.indexer)


def check(base):
    found = indexers(base)
    if found and any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        raise Unsupported(next(iter(found)), "no gradient checkpointing: an indexer that runs again would not know its rows", "checkpointed layers",
                          'model.gradient_checkpointing_disable() and trunk_state="recompute"')


def install(base, current):
    """Makes a model's indexers choose among the keys that rows of the running phase see. Returns a function that undoes it."""
    found = indexers(base)
    handles = [module.register_forward_pre_hook(functools.partial(_with_keys, current), with_kwargs=True) for module in found.values()]
    configs = {id(module.config) for module in base.modules() if found and hasattr(module, "config")}
    for config in configs:
        _configs[config] = _configs.get(config, 0) + 1

    def undo():
        for handle in handles:
            handle.remove()
        for config in configs:
            _configs[config] -= 1
            if not _configs[config]:
                del _configs[config]

    return undo


def needs_mask(config):
    return id(config) in _configs


def _with_keys(current, module, args, kwargs):
    phase = current()
    if phase is None:
        return None
    phase.check_place("an indexer")
    return args, {**kwargs, cache_argument(module): _Keys(phase)}


class _Keys:
    """Takes the place of transformers' cache in an indexer's call."""

    def __init__(self, phase):
        self.phase = phase

    def update_indexer(self, k_1TD, layer):
        if self.phase.capturing:
            self.phase.captures.index_keys.setdefault(layer, k_1TD.detach())
        return torch.cat([*(trunk.index_keys[layer] for trunk in trunks_of(self.phase.sets)), k_1TD], 1)
