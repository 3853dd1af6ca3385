"""Attaches shared prompts to a built model, by instance attributes alone."""

import weakref

import torch
from megatron.core.transformer.attention import Attention

from espalier.megatron import attention, head, mixers, positions, routers
from espalier.megatron.checks import check
from espalier.megatron.schedule import inner_of

_attached: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # inner model: the Attached of its chunks


class Attached:
    """The options of `install`. `verified`: the regimes of steps that were compared."""

    def __init__(self, verify):
        self.verify, self.verified = verify, set()


def listed(chunks):
    return list(chunks) if isinstance(chunks, (list, tuple, torch.nn.ModuleList)) else [chunks]


def install(chunks, verify=False):
    """Attaches to the chunks of a model on this rank. A second call changes `verify`."""
    chunks = listed(chunks)
    inners = [inner_of(chunk) for chunk in chunks]
    if all(inner in _attached for inner in inners):
        for inner in inners:
            _attached[inner].verify = verify
        return
    check(chunks)
    state = Attached(verify)
    for inner in inners:
        if inner in _attached:
            continue
        for module in list(inner.modules()):
            embedding = getattr(module, "rotary_pos_emb", None)
            if hasattr(embedding, "get_rotary_seq_len"):
                positions.attach(embedding)
            if isinstance(module, Attention):
                attention.attach(module)
            mixers.attach(module)
            routers.attach(module)
        head.attach(inner)
        _attached[inner] = state


def state_of(inner):
    """The Attached of a model, or None."""
    return _attached.get(inner)
