"""The part that all trainers have in common: whether a model shares, one note if it does not, and when Espalier's attention replaces the user's."""

import contextlib
import logging

import torch
import torch.distributed as dist

from espalier.errors import Error, Unsupported
from espalier.hf import attention, mixers, probe, ranks
from espalier.hf.checks import base_model, check, unwrapped

_log = logging.getLogger("espalier")


class Sharing:
    """Mixin for a trainer. `shared_rows` counts token rows of all shared passes: "run", those that ran, and "without_sharing", those of plain passes
    without padding.
    """

    def __init__(self, *args, shared_prompts=True, verify=False, **kwargs):
        self.shared_prompts, self.verify = shared_prompts, verify  # first: a trainer may compute a reference while it is made
        self.verification = None  # the table of the last comparison
        self._verified = set()  # the compared passes: (id of a model, True if with gradients)
        self._verified_by_all = set()  # those that every rank has compared
        self.shared_rows = {"run": 0, "without_sharing": 0}
        self._noted = set()
        self._refused = {}  # by id: models that turned out not to share
        self._ours = {}  # by id: the function that gives a model its own attention and mixers back when the step is done
        super().__init__(*args, **kwargs)
        if shared_prompts:
            for model in self._models():
                if self._sharing(model, 0) and unwrapped(model).get_output_embeddings() is not None:
                    self._sharing(model, None, probing=True)

    def _models(self):
        """The policy, and the trainer's reference and teacher if it has them."""
        return [model for model in (self.model, getattr(self, "ref_model", None), getattr(self, "teacher_model", None)) if model is not None]

    def _to_verify(self, model):
        """True if this shared pass must first be compared with TRL's own path under the user's attention."""
        key = id(base_model(model)), torch.is_grad_enabled()
        if not self.verify or key in self._verified or id(base_model(model)) in self._ours:
            return False
        self._verified.add(key)
        return True

    def _verify(self, model, compare):
        """Calls `compare()` if a shared pass of this model must be compared. `compare` is None for a pass on TRL's own path. All ranks make the same passes.
        Until every rank has compared, they exchange results in each pass: an `Error` on one rank is raised on all of them, and none waits for it."""
        key, problem = (id(base_model(model)), torch.is_grad_enabled()), None
        if not self.verify or not self.shared_prompts or probe.running() or ranks.sharded(model) or key in self._verified_by_all:
            return
        try:
            if compare is not None and self._to_verify(model):
                compare()
        except Error as found:
            problem = found
        everyone = _told_by_all((problem, key in self._verified or key[0] in self._refused))
        if all(done for _, done in everyone):
            self._verified_by_all.add(key)
        if problem is not None:
            raise problem
        for rank, (other, _) in enumerate(everyone):
            if other is not None and not isinstance(other, Unsupported):
                raise Error(other.kind, f"rank {rank}", "a shared pass that agrees with TRL's own on every rank", str(other), exit_code=other.exit_code)

    def _note(self, reason):
        reason = reason.replace("base_model.model.", "", 1)  # PEFT's prefix: the same reason once
        if reason not in self._noted:
            self._noted.add(reason)
            _log.warning("prompts are not shared: %s", reason)

    def _sharing(self, model, longest, probing=False):
        """True if this model can share rows of up to `longest` tokens. The model is probed once, before the first step: within a step, the probe's
        calls would run the trainer's wrapped forward."""
        if not self.shared_prompts or probe.running() or id(base_model(model)) in self._refused:
            return False
        if ranks.sharded(model):
            self._note("the model's parameters are sharded, and ranks would call it different numbers of times"
                       + ("; verify=True has nothing to compare" if self.verify else ""))
            return False
        try:
            check(model, longest=longest, probing=probing)
        except Unsupported as reason:
            self._note(str(reason)) if not probing else self._refuse(model, reason)
            return False
        return True

    def _refuse(self, model, reason):
        """Switches this model to TRL's own path for the rest of the run."""
        self._note(str(reason))
        base = base_model(model)
        self._refused[id(base)] = base

    @contextlib.contextmanager
    def _our_layers(self, model):
        """Context manager for a call of the model: it runs with Espalier's attention and mixers. With gradients they stay until the step's backward,
        in which checkpointed layers run again. Everywhere else the model has the user's."""
        base = base_model(model)
        if id(base) in self._ours:
            yield
            return
        users = base.config._attn_implementation
        base.set_attn_implementation(attention.NAME)
        undo = mixers.install(base)

        def give_back():
            undo()
            base.set_attn_implementation(users)

        self._ours[id(base)] = give_back
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                self._ours.pop(id(base))()

    def _give_layers_back(self):
        while self._ours:
            self._ours.popitem()[1]()

    def training_step(self, model, *args, **kwargs):
        try:
            loss = super().training_step(model, *args, **kwargs)
            self._step_done(model)
            return loss
        finally:
            self._give_layers_back()

    def _step_done(self, model):
        """Called after a micro-batch's backward: gives the model the user's attention back."""


def _told_by_all(what):
    """`what` of every rank, in rank order. All ranks call this together."""
    if not (dist.is_available() and dist.is_initialized()):
        return [what]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, what)
    return everyone
