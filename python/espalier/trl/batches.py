"""Trainers whose loss couples only rows of one batch: the backbone runs once, over the batch's unique rows.

TRL calls a model on a padded batch. Within `compute_loss`, the backbone (the model below its head) runs the batch's tree instead. It returns
hidden states, and router logits of a mixture of experts, for every token of the padded batch. Head, pooling and loss stay TRL's. Everything is
one autograd graph, so DDP, accumulation and clipping work as before.

TRL's fused head (SFT, DPO, KTO) reads only rows before a label. It gets them as one sequence, each different pair of a row and its label once, and
its values go back to their places in the padded batch, where TRL's loss and metrics find them.
"""

import contextlib
import functools
import inspect

import torch

from espalier.errors import Unsupported
from espalier.hf import ranks
from espalier.hf.attention import Phase
from espalier.rows.trunk import RowSet, Trunk
from espalier.hf.checks import check_captured
from espalier.hf.model_parts import base_model
from espalier.hf.calls import Seed
from espalier.trl import verification
from espalier.trl.sharing import Sharing
from espalier.trl.tree import Tree

_OF_HEAD = {"fused_lm_head", "labels", "shift_labels", "num_items_in_batch"}  # arguments of TRL's fused head that the backbone does not get
_PASSED_ON = {"output_router_logits", "return_dict", "margin"}  # TRL's heads read the last one, no layer does
_ROWS_OF_HEAD = "logits_to_keep"  # heads, and TRL behind a backbone, take the last rows themselves; Gemma 4's backbone would run its last layers for these alone


class SharedBatches(Sharing):
    """Mixin for a trainer with `compute_loss`; precedes it among the bases."""

    _inside = False  # while backbones run unique rows
    _comparison = None  # while a sharded model is compared: what its backbone's forward calls

    def __init__(self, *args, **kwargs):
        self._kept = {}  # by (id of a sharded model, True if with gradients): a batch for its comparison
        super().__init__(*args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        with self._shared_backbones():
            return super().compute_loss(*args, **kwargs)

    @contextlib.contextmanager
    def _shared_backbones(self):
        """Context manager: within it, the backbones of policy, reference and teacher run unique rows. One inside another changes nothing."""
        if not self.shared_prompts or self._inside:
            yield
            return
        models = {id(base_model(model)): model for model in self._models() if self._undivided(model)}
        self._probe(models.values())
        with contextlib.ExitStack() as stack:
            for model in models.values():
                base = base_model(model)
                stack.enter_context(_replaced_forward(base, functools.partial(self._model_forward, base)))
                stack.enter_context(_replaced_forward(base.base_model, functools.partial(self._backbone_forward, base)))
            for model in models.values():
                self._compare_together(model)
            self._inside = True
            stack.callback(setattr, self, "_inside", False)
            yield

    def _model_forward(self, base, forward, *args, **kwargs):
        """The model's forward. TRL's fused head runs only labelled rows of a shared batch."""
        labels = kwargs.get("labels")
        if not kwargs.get("fused_lm_head") or labels is None or kwargs.get("shift_labels") is not None or self._comparison is not None:
            return forward(*args, **kwargs)
        batch = self._batch(base, args, {name: value for name, value in kwargs.items() if name not in _OF_HEAD}, labels)
        labelled = batch and batch[0].labelled
        if not labelled:
            return forward(*args, espalier_batch=batch, **kwargs)
        try:
            out = forward(*args, espalier_batch=batch, **{**kwargs, "labels": None, "shift_labels": labelled.labels[None]})
        except Unsupported as reason:
            self._refuse(base, reason)
            return forward(*args, espalier_batch=False, **kwargs)
        return _in_their_places(out, labelled)

    def _backbone_forward(self, base, forward, *args, **kwargs):
        """The backbone's forward: over unique rows if the batch can be shared, else `forward(*args, **kwargs)`."""
        batch = kwargs.pop("espalier_batch") if "espalier_batch" in kwargs else self._batch(base, args, kwargs)
        if batch is False:  # a second forward of this pass: ranks have exchanged in the first one
            return forward(*args, **kwargs)
        tree, more = batch or (None, None)
        every_row = functools.partial(forward, *args, **_without_rows_of_head(kwargs))
        if self._comparison is not None:
            return self._comparison(tree, every_row, lambda: self._shared(base, forward, tree, more))
        together, problem, out = self._together(base), None, None
        try:
            self._verify(base, tree and (lambda: self._compare_backbone(base, forward, every_row, tree, more)))
            out = self._shared(base, forward, tree, more, tree.labelled and tree.labelled.rows) if tree else forward(*args, **kwargs)
        except Unsupported as reason:
            problem = reason
        try:
            if together:
                self._agree(base, problem)
            elif problem is not None:
                raise problem
        except Unsupported as reason:
            if tree and tree.labelled:
                raise  # to the model's forward, which chose the labels
            self._refuse(base, reason)
            return forward(*args, **kwargs)
        if tree:
            self.shared_rows["run"] += tree.rows
            self.shared_rows["without_sharing"] += tree.tokens
        return out

    def _shared(self, base, forward, tree, more, rows=None):
        with self._our_layers(base):
            return _run(base, forward, tree, more, rows)

    def _compare_backbone(self, base, forward, every_row, tree, more):
        """Compares with `every_row()`, TRL's padded call: hidden states, and router logits, of every token that is not padding."""
        try:
            self.verification = verification.compare(base, lambda: _read(every_row(), tree), lambda: _read(self._shared(base, forward, tree, more), tree))
        finally:
            self._give_layers_back(base)  # other models' backward passes are still to come

    def _compare_together(self, model):
        """Compares the same values of a sharded model, in whole calls of it on all ranks, before the loss: within one, FSDP counts its calls. The batch is
        the first of an earlier pass that can be shared, which ran TRL's own path. Gradients are compared at the beginning of an accumulation window, when
        no others are there."""
        for gradients in (True, False):
            key = (id(base_model(model)), gradients)
            if not self.verify or not self._together(model) or key in self._verified_by_all or gradients and (
                    self._micro_batches or not torch.is_grad_enabled()):
                continue
            if not ranks.largest(model, key in self._kept)[0]:
                continue
            batch = self._kept.pop(key, None)
            try:
                with torch.set_grad_enabled(gradients):
                    self.verification = verification.compare(model, *(functools.partial(self._values, model, batch, shared) for shared in (False, True)))
                self._verified_by_all.add(key)
            except Unsupported:
                return  # all ranks have refused the model
            finally:
                self._give_layers_back(model)

    def _values(self, model, batch, shared):
        """The values that `_compare_backbone` compares, of a call of a sharded model; none on a rank without a `batch`. One more value is 0, and its
        backward reaches every layer's output, without which FSDP's hooks do not fire."""
        base, found, refused = base_model(model), [], []
        ids, mask, more = batch or (torch.zeros(1, 1, dtype=torch.long, device=ranks.device_of(model)), None, {})
        if _ROWS_OF_HEAD in inspect.signature(type(base).forward).parameters:
            more = {**more, _ROWS_OF_HEAD: 1}

        def backbone(tree, plain, ours):
            problem, out = None, None
            try:
                out = ours() if shared and tree else plain()
                found.extend(_read(out, tree) if tree else ())
            except Unsupported as reason:
                problem = reason
            try:
                self._agree(model, problem)
            except Unsupported as reason:  # this call goes on, as on every rank
                refused.append(reason)
                return plain()
            return out

        self._comparison = backbone
        try:
            out = model(input_ids=ids, attention_mask=mask, use_cache=False, **more)
        finally:
            self._comparison = None
        if refused:
            raise refused[0]
        live = [x for x in out.values() if torch.is_tensor(x) and x.requires_grad]
        zero = Seed.apply(*(part for x in live for part in (x, torch.zeros_like(x)))) if live else torch.zeros((), device=ranks.device_of(model))
        return found + [zero.reshape(1)]

    def _batch(self, base, args, kwargs, labels=None):
        """(tree, keyword arguments to pass on), or None: the backbone is not called with a plain padded batch, or nothing is shared."""
        given = {name: value for name, value in _without_rows_of_head(kwargs).items() if value is not None and value is not False}
        if len(args) == 1 and "input_ids" not in given:
            given["input_ids"] = args[0]
        ids, mask, positions = (given.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids"))
        others = sorted(set(given) - _PASSED_ON)
        if len(args) > 1 or not torch.is_tensor(ids) or others:
            self._note("this batch has " + (", ".join(others) or "no input_ids"))
            return None
        if mask is not None and mask.dim() != 2:
            self._note(f"an attention mask of {mask.dim()} dimensions")
            return None
        if not self._sharing(base, ids.shape[1]):
            return None
        tree = Tree.of(ids, mask, labels)
        if tree is None:
            self._note("this batch has an attention mask with gaps or several documents in a row, or an empty row")
            return None
        if tree.label_behind_padding:
            self._note("this batch has a label for a token behind padding, which TRL predicts from the padding")
            return None
        if positions is not None and not tree.moved(positions):
            self._note("this batch has position_ids that do not count each row's tokens from one number")
            return None
        if tree.rows == tree.tokens:
            return None
        key = self._key(base)
        if self.verify and self._comparison is None and key not in self._verified_by_all and self._together(base):
            self._kept.setdefault(key, (ids, mask, {name: value for name, value in given.items() if name == "output_router_logits"}))
            return None
        return tree, given


def _without_rows_of_head(kwargs):
    return {name: value for name, value in kwargs.items() if name != _ROWS_OF_HEAD}


def _read(out, tree):
    """The values of the backbone's output that heads and losses read, of every token that is not padding."""
    routers = [x.view(*tree.live.shape, -1) for x in getattr(out, "router_logits", None) or ()]
    return [x[tree.live] for x in (out.last_hidden_state, *routers)]


def _run(base, forward, tree, more, rows=None):
    """Runs the backbone on the tree's rows. Returns its output for every token of the padded batch. With `rows`, hidden states are for these
    rows alone, [1, rows, H]."""
    seen = Trunk(tree.rows)
    phase = Phase([RowSet(0, (), tree.runs)], tree.longest, captures=seen)
    with phase.forward():
        out = forward(input_ids=tree.ids[None], position_ids=tree.positions[None], use_cache=False, espalier=phase, **more)
    check_captured(base, seen)
    out.last_hidden_state = out.last_hidden_state[0][tree.place] if rows is None else out.last_hidden_state[:, rows]
    if getattr(out, "router_logits", None) is not None:
        out.router_logits = tuple(x.flatten(0, -2)[tree.place.flatten()] for x in out.router_logits)
    return out


def _in_their_places(out, labelled):
    """The output of TRL's fused head, with one value a pair in its per-token fields, as that of the padded batch. `loss`, a sum over the pairs,
    is left out if pairs repeat; TRL's trainers do not read it."""
    of_pairs = (1, len(labelled.rows))
    fields = {name: labelled.whole(value) if torch.is_tensor(value) and value.shape == of_pairs else value for name, value in out.items()}
    if labelled.repeats:
        fields.pop("loss", None)
    return type(out)(**fields)


class SharedReference(SharedBatches):
    """Mixin for a trainer that can also compute a reference's log-probs before training."""

    def compute_ref_log_probs(self, *args, **kwargs):
        with self._shared_backbones():
            return super().compute_ref_log_probs(*args, **kwargs)


@contextlib.contextmanager
def _replaced_forward(module, forward):
    """Context manager: calls of the module run `forward(original, ...)`, where `original` is the module's own forward."""
    own = module.__dict__.get("forward")
    module.forward = functools.partial(forward, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
