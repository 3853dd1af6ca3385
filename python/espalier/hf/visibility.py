"""Reads a layer's rule (espalier.rows.visibility) from its module and config."""

import sys

from espalier.hf.model_parts import attention_layers, base_model, decoder_config
from espalier.rows.visibility import Rule

GIVEN_BY_THE_LAYER = object()  # default: the layer passed no window to the attention function and may keep it elsewhere


def rule_of(module, sliding_window=GIVEN_BY_THE_LAYER, softcap=None):
    """A layer's rule. A model family passes its window to the attention function, or keeps it on the module, or in the config for sliding layers
    (for all layers, if the config lists no kinds)."""
    config, kind = getattr(module, "config", None), kind_of(module)
    if sliding_window is GIVEN_BY_THE_LAYER:
        if hasattr(module, "sliding_window"):
            sliding_window = module.sliding_window
        else:
            slides = kind in (None, "sliding_attention") and getattr(config, "use_sliding_window", True)
            sliding_window = getattr(config, "sliding_window", None) if slides else None
        if not _makes_windows(module):
            sliding_window = None
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    return Rule(int(sliding_window or 0), int(chunk or 0), float(softcap or 0.0))


def kind_of(module):
    """The layer's kind, if the config lists kinds."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return kinds[module.layer_idx] if kinds is not None and module.layer_idx < len(kinds) else None


def bounds(model):
    """The lengths at which windows and chunks of a model's layers begin to cut rows off."""
    base = base_model(model)
    holders = [decoder_config(base), *(module for _, module in attention_layers(base).values())]
    found = {getattr(holder, name, None) for holder in holders for name in ("sliding_window", "attention_chunk_size")}
    return sorted(bound for bound in found if isinstance(bound, int) and bound)


def _makes_windows(module):
    """True if the file of a layer's model makes masks with a window. (Moshi's layers have a window, and its masks ignore it.)"""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return any(hasattr(file, "create_sliding_window_causal_mask") for file in files)
