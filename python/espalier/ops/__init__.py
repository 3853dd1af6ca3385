"""Differentiable operations for your own models. Importing this module registers

    torch.ops.espalier.shared_prefix_attention    rows over [path | own rows], tree mask, grouped heads (attention.py)
    torch.ops.espalier.linear_logprob             log-probs and entropies, never all logits at once (logprob.py)

both with autograd, shapes for meta tensors, and usable under torch.compile without a graph break. On CPUs the engine's
kernels run (they know nothing of torch, so any torch from 2.6 will do); elsewhere torch's own.
"""

from espalier.ops.attention import shared_prefix_attention
from espalier.ops.logprob import linear_logprob

__all__ = ["linear_logprob", "shared_prefix_attention"]
