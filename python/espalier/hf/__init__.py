"""Shared prompts around an unmodified transformers causal language model.

    result = espalier.hf.phased_step(model, rollouts, loss)     gradients of the sum of loss(wave), every prompt run once
    values = espalier.hf.logprobs(model, rollouts)              log-probs of all response tokens, no gradients
    scores = espalier.hf.score(model, rollouts, entropies=True) the same with entropies and the rows that ran
    espalier.hf.check(model)                                    refuses by name what would be silently wrong

The model stays what it is: LoRA, tied embeddings, non-reentrant checkpointing, autocast, DDP and FSDP are fine.
"""

import contextlib
import time
from dataclasses import dataclass

from espalier.extras import require

require("espalier.hf", "hf")

import torch

from espalier.errors import Unsupported
from espalier.hf import attention, choice, dense, measure, mixers, ranks, sets as coupled, verification
from espalier.hf.checks import attention_layers, base_model, check, decoder_config, unwrapped
from espalier.hf.rollouts import Rollouts
from espalier.hf.routers import RouterLoss
from espalier.hf.step import Executor, Wave

__all__ = ["Result", "Scores", "Wave", "check", "logprobs", "phased_step", "score"]


@dataclass(frozen=True)
class Result:
    """What one step did. `rows`: token rows run forward; `rows_without_sharing`: those of a dense step. `loss`: the sum over waves;
    `router_loss`: router_aux_loss_coef times the load-balancing loss. `schedule`: dense, packed or phased. `str()` is a line for a log.
    """
    loss: float
    rows: int
    rows_without_sharing: int
    waves: int
    seconds: float
    peak_bytes: int
    verification: "verification.Verification | None" = None
    router_loss: float = 0.0
    schedule: str = ""

    def __str__(self):
        return (f"{self.rows:,} rows run instead of {self.rows_without_sharing:,} ({self.rows_without_sharing / self.rows:.2f} times fewer), "
                f"{self.schedule}, {self.waves} waves, {self.seconds:.2f} s, peak {self.peak_bytes / 2**20:,.0f} MiB")


def phased_step(model, rollouts, loss, *, wave_tokens=4096, trunk_state="keep", schedule="auto", temperature=1.0,
                router_aux_loss_coef=None, router_aux_loss_scope="rollout", sets=(), verify=False):
    """Adds the gradients of sum over waves of `loss(wave)` to `.grad`, every shared prompt run once, forward and backward.

    `rollouts`: dicts with `prompt_ids` and `response_ids`. `loss(wave)` returns a scalar; a wave holds whole responses, at most
    `wave_tokens` rows run at once. `trunk_state`: "keep" a prompt's activations until its backward, or "recompute" them, as FSDP1
    always does. `schedule`: "shared", "dense" (every rollout with its prompt), or "auto", what is predicted to be faster: where a
    model is small and little is shared, calls cost more than rows.
    `router_aux_loss_coef`: of a mixture's load-balancing loss, as transformers defines it, over each rollout and averaged or
    ("minibatch") over all tokens of the step; it takes one pass more without gradients.
    `sets`: lists of rollouts that the loss couples, [[0, 1], ...]; each is whole in the wave that `loss` sees. What does not fit into one
    wave takes a second pass (sets.py).
    `verify`: a model's first step also runs dense; beyond what rounding explains `espalier.Error` is raised with the table.
    Under DDP the gradients are reduced once at the end (not inside `no_sync()`).
    """
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    check(model, longest=int(prepared.lengths.max()))
    sets = coupled.checked(sets, len(prepared))
    with _ours(model):
        if trunk_state == "keep" and ranks.alternating(model):
            trunk_state = "recompute"
        plan = prepared.plan(unwrapped(model), wave_tokens=wave_tokens, trunk_state=trunk_state, gradients=True)
        inner = ranks.without_replicas(model)
        coef = _router_coefficient(model, router_aux_loss_coef)
        router = RouterLoss(model, prepared, coef, router_aux_loss_scope) if coef else None
        by_kernel = attention.by_kernel(ranks.device_of(model), next(unwrapped(model).parameters()).dtype)
        schedule = choice.schedule(schedule, plan, prepared, len(attention_layers(model)), wave_tokens, by_kernel)
        before = verification.begin(model, router) if verify and verification.is_first(model) else None
        with measure.Peak() as peak:
            start = time.perf_counter()
            try:
                batches = dense.batches_of(prepared.lengths, wave_tokens) if schedule == "dense" else None
                step_loss, more_rows = _whole_sets(inner, rollouts, loss, sets, batches or [item.finished for item in plan.items], temperature,
                                                   wave_tokens)
                if schedule == "dense":
                    executor = dense.run(inner, prepared, step_loss, temperature, batches, router)
                else:
                    executor = _shared(inner, prepared, plan, step_loss, temperature, router)
            except BaseException:
                if before is not None:
                    before.put_back()
                raise
            seconds = time.perf_counter() - start
    table = before.compare_dense(prepared, loss, temperature, executor.total, sets) if before is not None else None
    if ranks.replicas(model) is not None:
        ranks.reduce_gradients(ranks.replicas(model))
    return Result(executor.total, executor.rows + more_rows, int(prepared.lengths.sum()), executor.waves, seconds, peak.bytes, table,
                  router.value if router else 0.0, schedule)


def _shared(model, prepared, plan, loss, temperature, router):
    executor = Executor(model, prepared, plan, loss=loss, temperature=temperature, through_everything=ranks.sharded(model), router=router)
    if router:
        _count(router, Executor(model, prepared, plan, seen=lambda wave: None, router=router))
    ranks.run(model, executor.program(), executor.device)
    return executor


@torch.no_grad()
def _whole_sets(model, rollouts, loss, sets, waves, temperature, wave_tokens):
    """(the loss of a wave, rows run for it): where `waves` cut a set, its log-probs are computed first."""
    split = coupled.cut(sets, waves)
    members = sorted(i for one in split for i in one)
    if not members and not (sets and ranks.sharded(model)):  # ranks that share layers come here together
        return loss, 0
    values = {}
    rows = _score([rollouts[i] for i in members], model, temperature, wave_tokens, lambda i, *of_it: values.update({members[i]: of_it}))
    return coupled.TwoPass(loss, split, values) if split else loss, rows


def _score(rollouts, model, temperature, wave_tokens, add):
    """Calls add(rollout, log-probs, entropies) for each; returns the rows that ran."""
    if not rollouts:
        ranks.run(model, [], ranks.device_of(model))
        return 0
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    empty = torch.zeros(0, device=ranks.device_of(model))
    for i, response in enumerate(prepared.responses):
        if not len(response):  # of no wave
            add(i, empty, empty)

    def seen(wave):
        lengths = [len(prepared.responses[rollout]) for rollout in wave.rollouts]
        for i, *values in zip(wave.rollouts, wave.logprobs.split(lengths), wave.entropies.split(lengths)):
            add(i, *values)

    plan = prepared.plan(unwrapped(model), wave_tokens=wave_tokens, trunk_state="keep", gradients=False)
    executor = Executor(model, prepared, plan, seen=seen, temperature=temperature)
    ranks.run(model, executor.program(), executor.device)
    return executor.rows


def _router_coefficient(model, given):
    if given is None and getattr(decoder_config(model), "output_router_logits", False):
        raise Unsupported("config.output_router_logits", "a word on the router's loss, which is no part of loss(wave)", "True",
                          "Give router_aux_loss_coef (config.router_aux_loss_coef, or 0)")
    return given or 0.0


@torch.no_grad()
def _count(router, executor):
    ranks.run(executor.model, executor.program(), executor.device)
    router.settle()


@dataclass(frozen=True)
class Scores:
    """Of each rollout, by response token: log-probs, and entropies where asked for. `rows` as in `Result`."""
    logprobs: list
    entropies: list | None
    rows: int
    rows_without_sharing: int


def logprobs(model, rollouts, *, wave_tokens=4096, temperature=1.0):
    """One tensor for each rollout: the log-prob of every response token."""
    return score(model, rollouts, wave_tokens=wave_tokens, temperature=temperature).logprobs


@torch.no_grad()
def score(model, rollouts, *, wave_tokens=4096, temperature=1.0, entropies=False):
    """`Scores` of all response tokens, every shared prompt run once."""
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    check(model, longest=int(prepared.lengths.max()))
    kinds = ("logprobs", "entropies") if entropies else ("logprobs",)
    empty = torch.zeros(0, device=ranks.device_of(model))
    out = {kind: [empty] * len(prepared) for kind in kinds}  # empty responses belong to no wave

    def seen(wave):
        lengths = [len(prepared.responses[rollout]) for rollout in wave.rollouts]
        for kind in kinds:
            for rollout, part in zip(wave.rollouts, getattr(wave, kind).split(lengths)):
                out[kind][rollout] = part

    with _ours(model):
        plan = prepared.plan(unwrapped(model), wave_tokens=wave_tokens, trunk_state="keep", gradients=False)
        inner = ranks.without_replicas(model)
        executor = Executor(inner, prepared, plan, seen=seen, temperature=temperature)
        ranks.run(inner, executor.program(), executor.device)
    return Scores(out["logprobs"], out.get("entropies"), executor.rows, int(prepared.lengths.sum()))


@contextlib.contextmanager
def _ours(model):
    """Our attention and our mixers in the model's place, for the time of a step."""
    base = base_model(model)
    before = base.config._attn_implementation
    if before != attention.NAME:
        base.set_attn_implementation(attention.NAME)
    try:
        with mixers.installed(base):
            yield
    finally:
        if before != attention.NAME:
            base.set_attn_implementation(before)
