"""Layers that scale their queries by position and count a call's rows for it (Llama 4's layers without rotary embedding).

Such a layer adds to row numbers how many rows its cache holds. In a call of a phase an object in the cache's place says, for every row,
how far its depth is ahead of its number; keys and values pass it unchanged.
"""

import numpy as np

from espalier.hf.versions import cache_argument
from espalier.rows.transfer import to_device


def counts_rows(module):
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def tell_depths(module, args, kwargs):
    """A forward pre-hook with keyword arguments."""
    phase = kwargs.get("espalier")
    if phase is None:
        return None
    device = (args[0] if args else kwargs["hidden_states"]).device
    return args, {**kwargs, cache_argument(module): _Ahead(phase, device)}


class _Ahead:
    def __init__(self, phase, device):
        depths = np.concatenate([rows.depths for rows in phase.sets])
        self.rows = to_device(device, depths - np.arange(len(depths)))[0]

    def get_seq_length(self, layer_idx=0):
        return self.rows

    def update(self, key, value, *_, **__):
        return key, value
