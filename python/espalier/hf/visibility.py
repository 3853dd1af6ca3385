"""Which rows of its own path a row sees, and with which scores: what a layer has beyond plain causal attention.

Depth is a row's position in its rollout; rows of one call stand in any order, so nothing here counts rows.

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
    """The rule of one layer; 0: the layer has no such restriction."""
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0

    def lowest(self, depths):
        """The lowest depth that rows at `depths` (int64) see; it never falls where the depth grows."""
        low = np.zeros_like(depths)
        if self.window:
            low = np.maximum(low, depths - (self.window - 1))
        return np.maximum(low, depths // self.chunk * self.chunk) if self.chunk else low

    def within(self, longest):
        """The same rule for rollouts of at most `longest` tokens, or None where it then is plain causal attention."""
        rule = Rule(self.window if self.window < longest else 0, self.chunk if self.chunk < longest else 0, self.softcap)
        return rule if rule != Rule() else None


GIVEN_BY_THE_LAYER = object()  # a layer that hands no window to the attention function has it elsewhere


def rule_of(module, sliding_window=GIVEN_BY_THE_LAYER, softcap=None):
    """A layer's rule. A family hands its window to the attention function, or keeps it on the module, or in the config for layers that
    slide (all, where no kinds are listed)."""
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
    """The layer's kind in the config, where kinds are listed."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return kinds[module.layer_idx] if kinds is not None and module.layer_idx < len(kinds) else None


def bounds(model):
    """The lengths from which on windows and chunks of a model's layers cut anything off."""
    base = base_model(model)
    holders = [decoder_config(base), *(module for _, module in attention_layers(base).values())]
    found = {getattr(holder, name, None) for holder in holders for name in ("sliding_window", "attention_chunk_size")}
    return sorted(bound for bound in found if isinstance(bound, int) and bound)


def _makes_windows(module):
    """Whether the file of a layer's model makes masks with a window: Moshi's layers name one, and its masks have none."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return any(hasattr(file, "create_sliding_window_causal_mask") for file in files)
