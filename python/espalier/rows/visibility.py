"""A layer's rules beyond plain causal attention: which rows of its own path a row sees, and how scores change.

Depth is a row's position in its rollout. Rows of a call may have any order, so all rules use depths and never row numbers.

    window W    the row at depth d sees depths d - W + 1 .. d
    chunk C     it sees depths C floor(d / C) .. d
    soft-cap c  scores s become c tanh(s / c)
"""

from dataclasses import dataclass

import numpy as np


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
