"""TRL's AsyncGRPOTrainer with Espalier's attention.

TRL folds the samples of a row into a prefix trie itself and lays its tokens in depth-first order, so every shared token runs once. Its attention
copies the keys and values of each segment's whole path and needs FlashAttention 3. Here the same rows run through `shared_prefix_attention`:
a shared key is read where it lies, on any device. Calls that it does not cover (a window or a cap that matters, values of another size than keys)
run TRL's own attention.
"""

import weakref

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo.packing import tree_attention as trl_attention

import espalier.ops  # noqa: F401, the operations of torch.ops.espalier

NAME = "espalier_tree"


def subtree_ends(cu_seqlens_q, cu_seqlens_k):
    """[rows] int32: the end of each row's subtree. A segment's descendants follow it, and their paths begin deeper."""
    bounds = cu_seqlens_q.tolist()
    depths = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).tolist()
    ends, open_segments = [bounds[-1]] * len(depths), []
    for segment, depth in enumerate(depths):
        while open_segments and depth <= depths[open_segments[-1]]:
            ends[open_segments.pop()] = bounds[segment]
        open_segments.append(segment)
    lengths = torch.tensor(bounds, dtype=torch.int64).diff()
    return torch.tensor(ends, dtype=torch.int32).repeat_interleave(lengths).to(cu_seqlens_q.device)


_of_batch = [lambda: None, None]  # the boundaries of the batch that was seen last, and its ends: equal for all layers


def _ends(cu_seqlens_q, cu_seqlens_k):
    if _of_batch[0]() is not cu_seqlens_q:
        _of_batch[:] = weakref.ref(cu_seqlens_q), subtree_ends(cu_seqlens_q, cu_seqlens_k)
    return _of_batch[1]


def tree_attention(module, query, key, value, attention_mask, *, tree_cu_seqlens_q, tree_cu_seqlens_k, tree_max_seqlen_k, scaling=None,
                   sliding_window=None, softcap=None, **more):
    """TRL's `tree_attention`: query, key and value [1, heads, rows, size]; out [1, rows, heads, size] and no weights."""
    if softcap or (sliding_window and sliding_window < tree_max_seqlen_k) or key.shape != value.shape:
        return trl_attention(module, query, key, value, attention_mask, tree_cu_seqlens_q=tree_cu_seqlens_q, tree_cu_seqlens_k=tree_cu_seqlens_k,
                             tree_max_seqlen_k=tree_max_seqlen_k, scaling=scaling, sliding_window=sliding_window, softcap=softcap, **more)
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    path = k.new_empty(0, *k.shape[1:])
    out, _ = torch.ops.espalier.shared_prefix_attention(q, k, v, path, path, _ends(tree_cu_seqlens_q, tree_cu_seqlens_k), None, None, scaling)
    return out.unsqueeze(0), None


def register_attention():
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, lambda **_: None)


class TreeAttention:
    """Mixin before `AsyncGRPOTrainer`. shared_prompts=False: TRL's own attention."""

    def __init__(self, *args, shared_prompts=True, **kwargs):
        super().__init__(*args, **kwargs)
        if shared_prompts:
            register_attention()
            model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            model.set_attn_implementation(NAME)
