"""Rows that see [open trunks | own tree], as an attention function of transformers' `AttentionInterface`.

A call of the model runs the rows of one item as a batch of one, [1, T]. Its keyword argument `espalier=Phase(...)` reaches
every attention layer; a layer that gets no keyword arguments reads the phase from a context variable. Without a phase the function is
the user's own (implementation.py), so that the same model still generates and evaluates.
The arithmetic is that of espalier.rows.attention.
"""

import collections
import contextlib
import functools
import weakref

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from espalier.errors import Unsupported
from espalier.hf import implementation, indexed
from espalier.hf.checkpoints import Place
from espalier.hf.current import current, phase_of_call
from espalier.hf.model_parts import attention_layers
from espalier.hf.implementation import NAME
from espalier.hf.visibility import GIVEN_BY_THE_LAYER, kind_of, rule_of
from espalier.rows.attention import RowAttention
from espalier.rows.trunk import RowSet, visible

told_by_context: weakref.WeakSet = weakref.WeakSet()  # attention layers that were not handed keyword arguments


class Phase:
    """The rows that each row of a call sees. `sets`: the RowSets of the call, in order. `longest`: the call's largest position plus one. `regime`: the
    length by which models that make rotary tables in each call choose them (rotary.py); None: the call's own length. `mutual`: (begin, end) of
    rows that also see later rows among themselves, such as an image's rows."""

    def __init__(self, sets, longest, captures=None, regime=None, mutual=()):
        self.sets, self.longest, self.captures, self.regime, self.mutual = sets, longest, captures, regime, mutual
        self.capturing, self.place, self.seen, self.mask = False, None, collections.Counter(), None
        self.rules, self.masks = {}, set()  # of this call: each layer's Rule, and the windows and chunks of the masks that the model asked for
        self.running, self.problem = False, None  # whether the call runs, and the first `Unsupported` of its layers

    def visible(self, device):
        """The call's mask, bool [1, 1, T, S]: true where row t sees key s."""
        if self.mask is None:
            self.mask = visible(self.sets, device)
        return self.mask

    @classmethod
    def of_runs(cls, runs, trunks, longest, captures=None, regime=None, mutual=()):
        """A phase of one RowSet, with the runs of an item."""
        return cls([RowSet(0, tuple(trunks), list(runs))], longest, captures, regime, mutual)

    @contextlib.contextmanager
    def forward(self, model=None):
        """Context manager for a call of the model: its attention layers run in this phase, and transformers builds no masks. If `captures` is a
        Trunk, it stores keys and values. Raises `Unsupported` if an attention layer cannot run in a phase, or if one of `model` did not see the phase
        exactly once. The call runs to its end before the error is raised: other ranks wait for its later layers if FSDP shards the model."""
        self.capturing, self.place = self.captures is not None, Place()
        for found in (self.seen, self.rules, self.masks):
            found.clear()
        before = phase_of_call.set(self)
        self.running, self.problem = True, None
        try:
            yield
        except Exception:
            if self.problem is None:
                raise
        finally:
            phase_of_call.reset(before)
            self.capturing = self.running = False
        if self.problem is not None:
            raise self.problem
        if model is not None:
            self._check_seen(attention_layers(model))

    def refuse(self, reason):
        """Keeps the first `Unsupported` for the end of the call. Raises it in a checkpointed layer that runs again, behind the call."""
        if not self.running:
            raise reason
        self.problem = self.problem or reason

    def check_place(self, where, since=None):
        """Refuses a checkpoint around `where` that loses the graph, or the phase of its second run. `since`: the Place where `where` was last told the
        phase, the call's beginning if it is None."""
        if not self.running:
            return
        try:
            self.place.check_graph(where)
            (since or self.place).check_encloses(where)
        except Unsupported as reason:
            self.refuse(reason)

    def _check_seen(self, layers):
        missing = sorted(set(layers) - set(self.seen))
        if missing:
            raise Unsupported(layers[missing[0]][0], "attention through transformers' AttentionInterface", f"none in layers {missing}")
        for layer, times in sorted(self.seen.items()):
            if times > 1:
                raise Unsupported(f"attention layer {layer}", "one attention per layer", f"{times} in one call")
        self._check_masks(layers)

    def _check_masks(self, layers):
        """Raises `Unsupported` if the windows and chunks of the layers differ from the masks that the model asked for. A mask may be unused
        in a model whose layers all have full attention."""
        if not self.masks:  # a model without masks of transformers' making, or a compiled one, whose probe ran eagerly
            return
        wanted = {size for rule in self.rules.values() for size in (rule.window, rule.chunk) if size}
        for layer, rule in sorted(self.rules.items()):
            missing = {size for size in (rule.window, rule.chunk) if size} - self.masks
            if missing:
                raise Unsupported(f"attention layer {layer}", "a window or chunk that the model's masks have", f"{missing.pop()} tokens, and none of its masks")
        more = self.masks - wanted - {0}
        if more and any(kind_of(module) != "full_attention" for _, module in layers.values()):
            raise Unsupported("model", "masks whose windows and chunks its attention layers name", f"one of {more.pop()} tokens, which no layer names")


def _mask(*args, **kwargs):
    """Rows of a phase need no mask, because their layers' rules say what they see. Indexers need one (indexed.py)."""
    phase = phase_of_call.get()
    if phase is None:
        return implementation.mask(*args, **kwargs)
    phase.check_place("attention mask")
    if kwargs.get("use_vmap"):  # how transformers marks functions that a model adds to a mask
        phase.refuse(Unsupported("attention mask", "causal masks, with a window or in chunks", "or_mask_function or and_mask_function of the model's own"))
    if not torch.compiler.is_compiling():
        phase.masks.add(int(kwargs.get("local_size") or 0))
    return phase.visible(kwargs["device"]) if indexed.needs_mask(kwargs.get("config")) else None


def attention(module, query, key, value, attention_mask=None, espalier=None, **kwargs):
    """The attention function that transformers knows as "espalier"."""
    if espalier is None and current() is None:
        return implementation.attend(module, query, key, value, attention_mask, **kwargs)
    return _within(module, query, key, value, attention_mask, espalier, **kwargs)


@torch.compiler.disable
def _within(module, query, key, value, mask, phase, scaling=None, dropout=0.0, sliding_window=GIVEN_BY_THE_LAYER, **kwargs):
    """One layer's attention in a phase."""
    by_context, phase = phase is None, phase if phase is not None else current()
    try:
        return _checked(module, query, key, value, mask, phase, by_context, scaling, dropout, sliding_window, kwargs)
    except Unsupported as reason:
        phase.refuse(reason)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None  # unread: Phase.forward raises


def _checked(module, query, key, value, mask, phase, by_context, scaling, dropout, sliding_window, kwargs):
    where = f"attention layer {module.layer_idx}"
    if by_context:
        told_by_context.add(module)
    phase.check_place(where, since=None if by_context else Place())
    if mask is not None and mask is not phase.mask:
        raise Unsupported(where, "causal attention without a mask of the model's own", f"a mask of shape {tuple(mask.shape)}")
    if kwargs.get("is_causal") is False:
        raise Unsupported(where, "causal attention", "bidirectional attention")
    if key.shape[2] != query.shape[2]:
        raise Unsupported(where, "keys of the call's own rows", f"{key.shape[2]} keys of {query.shape[2]} rows")
    phase.seen[module.layer_idx] += 1
    return _phase_attention(module, query, key, value, scaling, dropout, sliding_window, phase, kwargs)


def _phase_attention(module, query, key, value, scaling, dropout, sliding_window, phase, kwargs):
    where = f"attention layer {module.layer_idx}"
    if dropout:
        raise Unsupported(where, "no attention dropout", f"dropout {dropout}", "model.eval(), or attention_dropout=0")
    chosen = kwargs.get("indices")
    if chosen is not None and phase.mask is None:
        raise Unsupported(where, "keys chosen by an indexer that espalier.hf knows", "keys chosen in another way")
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise Unsupported(where, "softmax attention by position alone", f"{name} in use")
    if torch.is_autocast_enabled(query.device.type):
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(narrow) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (query, key, value))
    if phase.capturing:
        phase.captures.take(module.layer_idx, key, value)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rule = phase.rules[module.layer_idx] = rule_of(module, sliding_window, kwargs.get("softcap"))
    if chosen is not None and (rule.within(phase.longest) or phase.mutual):
        raise Unsupported(where, "chosen keys alone", "chosen keys with a window, a soft-cap or rows that see each other")
    with torch.autocast(query.device.type, enabled=False):
        return RowAttention.apply(query, key, value, kwargs.get("s_aux"), scale, phase, module.layer_idx, rule, chosen), None


def _without_packing(find):
    """Skips transformers' search for packed sequences during a phase. The search reads every call's position ids on the host and serves the masks
    only, which a phase does not have."""
    @functools.wraps(find)
    def found(*args, **kwargs):
        if not torch.compiler.is_compiling() and phase_of_call.get() is not None:
            return None
        return find(*args, **kwargs)

    return found


def register():
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)
    if hasattr(masking_utils, "find_packed_sequence_indices"):
        masking_utils.find_packed_sequence_indices = _without_packing(masking_utils.find_packed_sequence_indices)


register()
