"""Differentiable operations for your own models. Importing this module registers

    torch.ops.espalier.shared_prefix_attention    rows over [path | own rows], tree mask, grouped heads (attention.py)
    torch.ops.espalier.linear_logprob             log-probs and entropies without the full logits (logprob.py)

Both support autograd, meta tensors, and torch.compile without a graph break. On CPUs they run the engine's kernels, which do not depend on
torch, so any torch from 2.6 works. On other devices they run torch's own kernels.
"""

from espalier.ops.attention import shared_prefix_attention
from espalier.ops.logprob import linear_logprob

__all__ = ["linear_logprob", "shared_prefix_attention"]
