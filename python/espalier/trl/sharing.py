"""The part that all trainers have in common: whether a model shares, one note if it does not, and when Espalier's attention replaces the user's."""

import contextlib
import logging

import torch
import torch.distributed as dist

from espalier.errors import Error, Unsupported
from espalier.hf import attention, mixers, probe, ranks
from espalier.hf.checks import check
from espalier.hf.model_parts import base_model, unwrapped

_log = logging.getLogger("espalier")


class Sharing:
    """Mixin for a trainer. `shared_rows` counts token rows of all shared passes: "run", rows that ran, and "without_sharing", rows of plain passes
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
        self._probed = set()  # (id of a model, whether it was sharded) of the models that were probed
        self._micro_batches = 0  # of the open accumulation window, that have run
        self._ours = {}  # by id: the function that gives a model its own attention and mixers back when the step is done
        super().__init__(*args, **kwargs)
        if shared_prompts and not getattr(self, "is_fsdp_enabled", False):  # under FSDP, a model is probed before its first pass: now it may have no weights
            self._probe(self._models())

    def _models(self):
        """The policy, and the trainer's reference and teacher if it has them."""
        return [model for model in (self.model, getattr(self, "ref_model", None), getattr(self, "teacher_model", None)) if model is not None]

    def _key(self, model):
        return id(base_model(model)), torch.is_grad_enabled()

    def _to_verify(self, model):
        """True if this shared pass must first be compared with TRL's own path under the user's attention."""
        key = self._key(model)
        if not self.verify or key in self._verified or id(base_model(model)) in self._ours:
            return False
        self._verified.add(key)
        return True

    def _verify(self, model, compare):
        """Calls `compare()` if a shared pass of this model must be compared. `compare` is None for a pass on TRL's own path. All ranks make the same passes.
        Until every rank has compared, they exchange results in each pass: an `Error` on one rank is raised on all of them, and none waits for it."""
        key, problem = self._key(model), None
        if not self.verify or not self.shared_prompts or probe.running() or key in self._verified_by_all or ranks.sharded(model) or self._divided(model):
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

    def _sharing(self, model, longest):
        """True if this model can share rows of up to `longest` tokens; 0: of any number, as far as is known without a call of the model."""
        if not self.shared_prompts or probe.running() or id(base_model(model)) in self._refused:
            return False
        if not self._undivided(model):
            return False
        try:
            check(model, longest=longest, probing=False)
        except Unsupported as reason:
            self._note(str(reason))
            return False
        return True

    def _undivided(self, model):
        """False, with a note, for a model that `_divided` names."""
        reason = self._divided(model)
        if reason is not None:
            self._note(reason)
        return reason is None

    def _divided(self, model):
        """The reason why no model of this run can be shared, or None: it, or its sequences, are sharded in another way than FSDP's."""
        if getattr(self, "is_deepspeed_enabled", False) or type(model).__name__ == "DeepSpeedEngine" or any(hasattr(p, "ds_id") for p in model.parameters()):
            return "DeepSpeed runs the model, and its engine takes one backward in a step; every batch runs TRL's own path" + self._nothing_to_verify()
        layout = getattr(getattr(self, "accelerator", None), "parallelism_config", None)
        names = [name for name in ("tp", "cp", "sp") if getattr(layout, f"{name}_enabled", False)]
        if names:
            return f"accelerate's parallelism_config shards layers or sequences ({', '.join(names)})" + self._nothing_to_verify()
        return None

    def _nothing_to_verify(self):
        return "; verify=True has nothing to compare" if self.verify else ""

    def _probe(self, models):
        """Probes models that were not probed yet, outside of any call that is wrapped. Under FSDP all ranks call this together, and one refusal is that
        of all."""
        for model in models if self.shared_prompts and not probe.running() else ():
            key = id(base_model(model)), ranks.sharded(model)
            if key in self._probed or not self._sharing(model, 0):
                continue
            self._probed.add(key)
            problem = None
            if unwrapped(model).get_output_embeddings() is not None:
                try:
                    check(model)
                except Unsupported as reason:
                    problem = reason
            try:
                self._agree(model, problem)
            except Unsupported as reason:
                self._refuse(model, reason)

    # ---- FSDP: all ranks take part in every call of the model -----------------------------------------------------------

    def _together(self, model):
        """True if FSDP shards the model and it may be shared. In every pass of it, ranks then agree on what they do (_agree)."""
        return self.shared_prompts and not probe.running() and id(base_model(model)) not in self._refused and (
            ranks.sharded(model) and self._divided(model) is None)

    def _agree(self, model, problem):
        """Raises `Unsupported` if `problem` is one. Under FSDP all ranks call this together, and raise if one of them has a problem: then none trains
        with a pass that another must run again."""
        together = ranks.sharded(model)
        if not together or not ranks.largest(model, problem is not None)[0]:
            if problem is not None:
                raise problem
            return
        everyone = ranks.told_by_all(model, None if problem is None else str(problem))
        self._refuse(model, problem if problem is not None else next(f"rank {rank}: {reason}" for rank, reason in enumerate(everyone) if reason))
        raise problem or Unsupported("another rank", "a pass that every rank can share", next(filter(None, everyone)))

    def _refuse(self, model, reason):
        """Switches this model to TRL's own path for the rest of the run."""
        base = base_model(model)
        if id(base) not in self._refused:
            self._note(str(reason))
        self._refused[id(base)] = base

    @contextlib.contextmanager
    def _our_layers(self, model):
        """Context manager for a call of the model: it runs with Espalier's attention and mixers. With gradients they stay until the step's backward,
        in which checkpointed layers run again. Everywhere else the model has the user's. A call that fails gives back the layers that it took, not
        those that an earlier call holds for its backward."""
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
        stay = False
        try:
            yield
            stay = torch.is_grad_enabled()
        finally:
            if not stay:
                self._give_layers_back(model)

    def _give_layers_back(self, model):
        """Gives one model the user's layers back. No backward of it may be still to come."""
        give_back = self._ours.pop(id(base_model(model)), None)
        if give_back is not None:
            give_back()

    def _end_step(self):
        """Gives every model the user's layers back: all backward passes are done, or will not run."""
        while self._ours:
            self._ours.popitem()[1]()

    def training_step(self, model, *args, **kwargs):
        if self.shared_prompts:
            ranks.gather_head(model)
        try:
            loss = super().training_step(model, *args, **kwargs)
            self._step_done(model)
            self._micro_batches = 0 if self.accelerator.sync_gradients else self._micro_batches + 1
            return loss
        finally:
            self._end_step()

    def _step_done(self, model):
        """Called after a micro-batch's backward: gives the model the user's attention back."""


def _told_by_all(what):
    """`what` of every rank, in rank order. All ranks call this together."""
    if not (dist.is_available() and dist.is_initialized()):
        return [what]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, what)
    return everyone
