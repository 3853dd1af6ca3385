"""torch's FlashAttention kernels on a GPU, for bfloat16 and float16 (by_calls.py).

Heads of keys and values are not repeated for the query heads that share them. `torch.nn.attention.activate_flash_attention_impl` replaces
the two operations called here with the operations of FlashAttention 3 or 4.
"""

import functools
import sys

import torch

from espalier.rows import by_calls
from espalier.rows.by_calls import count  # noqa: F401  part of the interface

LARGEST_HEAD = 256


def serves(q, v=None):
    """True if these kernels run rows of this type and device, with heads of these sizes."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return v is None or q.shape[-1] == v.shape[-1] <= LARGEST_HEAD and q.shape[-1] % 8 == 0


def takes_windows():
    """True if the implementation in use has a backward with a window. torch's own and FlashAttention 3 have one; FlashAttention 4 has not."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return current() != "FA4"


def attend(q, k, v, runs, scale, window=0):
    """out [T, H, D] and lse [H, T] (float32). The rows of a run see its keys causally, so that the last row sees the last key, or all of them
    (`runs.causal`). `window`: a causal row sees at most so many keys, its own included; 0: no limit. Without `runs` every row sees every key."""
    if runs is not None:
        causal = runs.causal and not window
        return _forward(q, k, v, runs.ends, runs.ends_of_keys, runs.longest, runs.longest_keys, causal, scale, **_window(window))
    out, lse = _forward(q[None], k[None], v[None], None, None, len(q), len(k), False, scale)
    return out[0], lse[0]


def attend_backward(go, q, k, v, out, lse, runs, scale, window=0):
    """dq, dk and dv of `attend`."""
    if runs is not None:
        causal = runs.causal and not window
        return _backward(go, q, k, v, out, lse, runs.ends, runs.ends_of_keys, runs.longest, runs.longest_keys, causal, scale, **_window(window))
    batch = [x[None] for x in (go, q, k, v, out, lse)]
    return [x[0] for x in _backward(*batch, None, None, len(q), len(k), False, scale)]


def _window(window):
    """The number of keys that a row sees to the left and to the right of its own, as arguments of the operations."""
    return dict(window_size_left=window - 1, window_size_right=0) if window else {}


def _forward(q, k, v, ends_q, ends_k, longest_q, longest_k, causal, scale, **window):
    return torch.ops.aten._flash_attention_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, 0.0, causal, False, scale=scale, **window)[:2]


def _backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, causal, scale, **window):
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: dropout is off
    return torch.ops.aten._flash_attention_backward(
        go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, 0.0, causal, seed, seed[:0], scale=scale, **window)


forward = functools.partial(by_calls.forward, sys.modules[__name__])
backward = functools.partial(by_calls.backward, sys.modules[__name__])
