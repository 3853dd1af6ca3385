"""A layer's rules beyond plain causal attention: which rows of its own path a row sees, and how scores change.

Depth is a row's position in its rollout. Rows of a call may have any order, so all rules use depths and never row numbers.

    window W    the row at depth d sees depths d - W + 1 .. d
    chunk C     it sees depths C floor(d / C) .. d
    soft-cap c  scores s become c tanh(s / c)
"""

import sys
from dataclasses import dataclass

import numpy as np

from espalier.hf.checks import attention_layers, base_model, decoder_config


@dataclass(frozen=True)
class Rule:
    """The rule of one layer. 0 means that the layer has no such restriction."""
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0

    def lowest(self, depths):
        """The lowest depth that rows at `depths` (int64) see. It does not decrease as the depth grows."""
        low = np.zeros_like(depths)
        if self.window:
            low = np.maximum(low, depths - (self.window - 1))
        return np.maximum(low, depths // self.chunk * self.chunk) if self.chunk else low

    def within(self, longest):
        """The same rule for rollouts of at most `longest` tokens. None if it is plain causal attention for these."""
        rule = Rule(self.window if self.window < longest else 0, self.chunk if self.chunk < longest else 0, self.softcap)
        return rule if rule != Rule() else None


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
