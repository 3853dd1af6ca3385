"""Shared prompts around an unmodified transformers causal language model.

    result = espalier.hf.phased_step(model, rollouts, loss)     gradients of the sum of loss(wave), every prompt run once
    values = espalier.hf.logprobs(model, rollouts)              log-probs of all response tokens, no gradients
    scores = espalier.hf.score(model, rollouts, entropies=True) the same with entropies and the rows that ran
    espalier.hf.check(model)                                    refuses by name what would be silently wrong

The model stays what it is: LoRA, tied embeddings, non-reentrant checkpointing, autocast, DDP and FSDP are fine.
"""

import time
from dataclasses import dataclass

from espalier.extras import require

require("espalier.hf", "hf")

import numpy as np
import torch

from espalier.errors import Unsupported
from espalier.hf import arguments, attention, choice, dense, images, implementation, measure, ranks, rotary, routes, sets as coupled, verification
from espalier.hf.checks import attention_layers, base_model, check, decoder_config, unwrapped
from espalier.hf.rollouts import Rollouts
from espalier.hf.routers import RouterLoss
from espalier.hf.step import Executor, Wave

__all__ = ["Result", "Scores", "Wave", "check", "logprobs", "phased_step", "score"]


@dataclass(frozen=True)
class Result:
    """Result of one step. `rows`: token rows run forward; `rows_without_sharing`: those of a dense step. `loss`: the sum over waves;
    `router_loss`: router_aux_loss_coef times the load-balancing loss. `schedule`: dense, packed or phased. `verification`: the table where
    this step was compared with the dense one; `verified`: it was, or an earlier step of its regime (verification.py) was. `str()` is a
    line for a log.
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
    verified: bool = False

    def __str__(self):
        return (f"{self.rows:,} rows run instead of {self.rows_without_sharing:,} ({self.rows_without_sharing / self.rows:.2f} times fewer), "
                f"{self.schedule}, {self.waves} waves, {self.seconds:.2f} s, peak {self.peak_bytes / 2**20:,.0f} MiB")


def phased_step(model, rollouts, loss, *, wave_tokens=4096, trunk_state="keep", schedule="auto", temperature=1.0,
                router_aux_loss_coef=None, router_aux_loss_scope="rollout", sets=(), verify=False):
    """Adds the gradients of sum over waves of `loss(wave)` to `.grad`, every shared prompt run once, forward and backward.

    `rollouts`: dicts with `prompt_ids` and `response_ids`, and `images` where a prompt has any: the dict that the model's processor gives
    for that prompt (`pixel_values`, `image_grid_thw`, ...), which the vision tower runs once (images.py). `loss(wave)` returns a scalar; a
    wave holds whole responses, at most `wave_tokens` rows run at once. `trunk_state`: "keep" a prompt's activations until its backward, or "recompute" them, as FSDP1
    always does. `schedule`: "shared", "dense" (every rollout with its prompt), or "auto", what is predicted to be faster: where a
    model is small and little is shared, calls cost more than rows.
    `routed_experts` of a rollout: the experts that the inference engine chose, chosen again (routes.py).
    `router_aux_loss_coef`: of a mixture's load-balancing loss, as transformers defines it, over each rollout and averaged or
    ("minibatch") over all tokens of the step; it takes one pass more without gradients.
    `sets`: lists of rollouts that the loss couples, [[0, 1], ...]; each is whole in the wave that `loss` sees. A set that does not fit into one
    wave takes a second pass (sets.py).
    `verify`: a model's first step also runs dense, as does every step of a regime that was not compared yet (another schedule, deeper
    trunks, rollouts beyond the next power of two or another rotary table); beyond what rounding explains `espalier.Error` is raised
    with the table.
    Under DDP the gradients are reduced once at the end (not inside `no_sync()`).
    """
    _check_arguments(model, loss, schedule, router_aux_loss_coef)
    temperature, wave_tokens = arguments.temperature(temperature), arguments.wave_tokens(wave_tokens)
    trunk_state = arguments.choice("trunk_state", trunk_state, arguments.TRUNK_STATES)
    prepared = _prepared(model, rollouts)
    check(model, longest=int(prepared.lengths.max()), by_regime=True)
    check_images(model, prepared, wave_tokens)
    sets = coupled.checked(sets, len(prepared))
    if trunk_state == "keep" and ranks.alternating(model):
        trunk_state = "recompute"
    inner = ranks.without_replicas(model)
    coef = _router_coefficient(model, router_aux_loss_coef)
    router = RouterLoss(model, prepared, coef, router_aux_loss_scope) if coef else None
    parts = _parts(model, prepared, wave_tokens=wave_tokens, trunk_state=trunk_state, gradients=True)
    schedule = _schedule(model, schedule, parts, wave_tokens)
    regime = verification.regime(model, prepared, parts, schedule, trunk_state)
    before = verification.begin(model, router) if verify and not verification.is_verified(model, regime) else None
    with measure.Peak() as peak:
        start = time.perf_counter()
        try:
            waves = _waves(parts, schedule, wave_tokens)
            step_loss, more_rows = _whole_sets(inner, prepared.records, loss, sets, waves, temperature, wave_tokens)
            if schedule == "dense":
                executors = [dense.run(inner, prepared, step_loss, temperature, waves, router)]
            else:
                executors = _shared(inner, parts, router, loss=step_loss, temperature=temperature, through_everything=ranks.sharded(model))
        except BaseException:
            if before is not None:
                before.put_back()
            raise
        seconds = time.perf_counter() - start
    total = sum(executor.total for executor in executors)
    table = before.compare_dense(prepared, loss, temperature, total, regime, sets) if before is not None else None
    if ranks.replicas(model) is not None:
        ranks.reduce_gradients(ranks.replicas(model))
    return Result(total, sum(executor.rows for executor in executors) + more_rows, int(prepared.lengths.sum()),
                  sum(executor.waves for executor in executors), seconds, peak.bytes, table, router.value if router else 0.0, schedule,
                  verification.is_verified(model, regime))


def _waves(parts, schedule, wave_tokens):
    """The rollouts that finish together, as places in the step: a dense run's batches, or those of the plans' items."""
    if schedule == "dense" and any(part.images is not None for part, _ in parts):
        return [[int(i)] for part, _ in parts for i in part.places(np.arange(len(part)))]
    if schedule == "dense":
        return [part.places(np.array(batch)).tolist() for part, _ in parts for batch in dense.batches_of(part.lengths, wave_tokens)]
    return [part.places(item.finished) for part, plan in parts for item in plan.items]


def _prepared(model, rollouts):
    """Rollouts, with their images and recorded experts."""
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    prepared = prepared.with_images(images.of(model, prepared))
    return prepared.with_routes(routes.of(model, prepared))


def check_images(model, prepared, wave_tokens):
    """Once for each model with images: images.check."""
    if prepared.images is None:
        return
    inner = ranks.without_replicas(model)

    def plain(records, seen):
        run = dense.DenseRun(inner, _prepared(model, records), lambda wave: seen(wave) or wave.logprobs.sum() * 0, 1.0)
        with implementation.users_own(inner):
            for i in range(len(records)):
                run.forward([i])

    def shared(records, seen):
        few = _prepared(model, records)
        _shared(inner, _parts(model, few, wave_tokens=wave_tokens, trunk_state="keep", gradients=False), seen=seen)

    images.check(model, prepared, plain, shared)


def _check_arguments(model, loss, schedule, router_aux_loss_coef):
    arguments.model(model)
    arguments.gradients_wanted(model)
    arguments.loss(loss)
    arguments.choice("schedule", schedule, arguments.SCHEDULES)
    arguments.coefficient(router_aux_loss_coef)


def _parts(model, prepared, **how):
    """(rollouts, their plan) of each set of rollouts that has the same rotary tables: mostly one (rotary.py)."""
    parts = [prepared.part(members) for members in rotary.regimes(base_model(model), prepared.lengths)]
    return [(part, part.plan(unwrapped(model), **how)) for part in parts]


def _schedule(model, asked, parts, wave_tokens):
    by_kernel = attention.by_kernel(ranks.device_of(model), next(unwrapped(model).parameters()).dtype)
    layers = len(attention_layers(model))
    if all(choice.schedule(asked, plan, part, layers, wave_tokens, by_kernel) == "dense" for part, plan in parts):
        return "dense"
    return "phased" if any(item.trunk for _, plan in parts for item in plan.items) else "packed"


def _shared(model, parts, router=None, **how):
    """The executors of all parts, run."""
    replaying = any(part.routes is not None for part, _ in parts)
    with implementation.in_use(model), rotary.installed(base_model(model), attention.current), routes.installed(model, replaying):
        if router:
            with torch.no_grad():
                _run(model, [Executor(model, part, plan, seen=lambda wave: None, router=router) for part, plan in parts])
            router.settle()
        return _run(model, [Executor(model, part, plan, router=router, **how) for part, plan in parts])


def _run(model, executors):
    ranks.run(model, [step for executor in executors for step in executor.program()], executors[0].device)
    return executors


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
    prepared = _prepared(model, rollouts)
    empty = torch.zeros(0, device=ranks.device_of(model))
    for i, response in enumerate(prepared.responses):
        if not len(response):  # of no wave
            add(i, empty, empty)

    def seen(wave):
        lengths = [len(prepared.responses[rollout]) for rollout in wave.rollouts]
        for i, *values in zip(wave.rollouts, wave.logprobs.split(lengths), wave.entropies.split(lengths)):
            add(i, *values)

    parts = _parts(model, prepared, wave_tokens=wave_tokens, trunk_state="keep", gradients=False)
    return sum(executor.rows for executor in _shared(model, parts, seen=seen, temperature=temperature))


def _router_coefficient(model, given):
    if given is None and getattr(decoder_config(model), "output_router_logits", False):
        raise Unsupported("config.output_router_logits", "a word on the router's loss, which is no part of loss(wave)", "True",
                          "Give router_aux_loss_coef (config.router_aux_loss_coef, or 0)")
    return given or 0.0


@dataclass(frozen=True)
class Scores:
    """Log-probs of each rollout by response token, and entropies if asked for. `rows` as in `Result`."""
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
    arguments.model(model)
    temperature, wave_tokens = arguments.temperature(temperature), arguments.wave_tokens(wave_tokens)
    prepared = _prepared(model, rollouts)
    check(model, longest=int(prepared.lengths.max()), by_regime=True)
    check_images(model, prepared, wave_tokens)
    kinds = ("logprobs", "entropies") if entropies else ("logprobs",)
    empty = torch.zeros(0, device=ranks.device_of(model))
    out = {kind: [empty] * len(prepared) for kind in kinds}  # empty responses belong to no wave

    def seen(wave):
        lengths = [len(prepared.responses[rollout]) for rollout in wave.rollouts]
        for kind in kinds:
            for rollout, part in zip(wave.rollouts, getattr(wave, kind).split(lengths)):
                out[kind][rollout] = part

    parts = _parts(model, prepared, wave_tokens=wave_tokens, trunk_state="keep", gradients=False)
    executors = _shared(ranks.without_replicas(model), parts, seen=seen, temperature=temperature)
    rows = sum(executor.rows for executor in executors)
    return Scores(out["logprobs"], out.get("entropies"), rows, int(prepared.lengths.sum()))
