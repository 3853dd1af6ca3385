"""Shared prompts around an unmodified transformers causal language model.

    result = espalier.hf.phased_step(model, rollouts, loss)     gradients of the sum of loss(wave), every prompt run once
    values = espalier.hf.logprobs(model, rollouts)              log-probs of all response tokens, no gradients
    scores = espalier.hf.score(model, rollouts, entropies=True) the same with entropies and the rows that ran
    memory = espalier.hf.estimate(model, rollouts)              bytes of the step before it runs, with each trunk_state
    espalier.hf.check(model)                                    refuses by name anything that would be silently wrong
    choice = espalier.hf.choose_flash_attention(model)          activates the fastest FlashAttention that is installed on this GPU

The model is not changed. LoRA, tied embeddings, non-reentrant checkpointing, autocast, DDP and FSDP are supported.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from espalier.extras import require

require("espalier.hf", "hf")

import numpy as np
import torch

from espalier.errors import Error, Unsupported
from espalier.hf import arguments, attention, choice, dense, flash_choice, images, implementation, ranks, rotary, routes, sets as coupled, towers, verification
from espalier.hf import memory_estimate, trunk_state as states, versions
from espalier.hf.checks import check
from espalier.hf.model_parts import attention_layers, base_model, decoder_config, unwrapped
from espalier.hf.memory_estimate import Estimate
from espalier.hf.rollouts import Rollouts
from espalier.hf.routers import RouterLoss
from espalier.hf.step import Executor
from espalier.rows import arguments as checked, measure
from espalier.rows.attention import kernels_for
from espalier.rows.verdict import failed_elsewhere
from espalier.rows.waves import Result, Scores, Wave

versions.note_if_newer()

__all__ = ["Estimate", "Result", "Scores", "Wave", "check", "choose_flash_attention", "estimate", "logprobs", "phased_step", "score"]


def choose_flash_attention(model: torch.nn.Module) -> flash_choice.Choice:
    """Measures torch's FlashAttention, and FlashAttention 3 and 4 if their packages are installed, on the model's GPU with its heads. Activates the fastest
    one whose results agree with torch's own, for this process. Returns its name, the seconds of each, and why others were refused."""
    return flash_choice.choose(model)


def phased_step(model: torch.nn.Module, rollouts: Iterable[Mapping[str, Any]], loss: Callable[[Wave], torch.Tensor], *, wave_tokens: int = 4096,
                trunk_state: Literal["keep", "recompute", "offload"] = "keep", schedule: Literal["auto", "shared", "dense"] = "auto",
                temperature: float = 1.0, router_aux_loss_coef: float | None = None,
                router_aux_loss_scope: Literal["rollout", "minibatch"] = "rollout", sets: Sequence[Sequence[int]] = (),
                verify: bool = False) -> Result:
    """Adds the gradients of the sum of `loss(wave)` over all waves to `.grad`. Every shared prompt runs once, forward and backward.

    `rollouts`: dicts with `prompt_ids` and `response_ids`. Optional: `images`, the dict that the model's processor returned for all images
    of prompt and response (`pixel_values`, `image_grid_thw`, ...; images.py), `routed_experts`, the experts that the inference engine chose, which are used
    again (routes.py), and `kept_ids`, the tokens that top-p and top-k left to the sampler, over which log-probs and entropies then are.
    `loss(wave)` returns a scalar. A wave holds whole responses. At most `wave_tokens` rows run at once.
    `trunk_state`: "keep" a prompt's activations until its backward, "recompute" them layer by layer, or on a GPU "offload" them to pinned
    memory of the host. FSDP1 always recomputes.
    `schedule`: "shared", "dense" (every rollout with its prompt), or "auto", the one that is predicted to be faster. With a small model
    or little to share, calls cost more than rows.
    `router_aux_loss_coef`: coefficient of a mixture's load-balancing loss, in transformers' definition. It is computed for each rollout
    and averaged, or ("minibatch") computed over all tokens of the step. It takes one more pass without gradients.
    `sets`: lists of rollouts that the loss couples, [[0, 1], ...]. `loss` sees each set whole. A set that does not fit into one wave takes
    a second pass (sets.py).
    `verify`: a model's first step also runs dense. So does every step of a new regime (verification.py): another schedule, deeper trunks,
    rollouts beyond the next power of two, a window or another rotary table, another mode, autocast or adapter. If they differ by more than
    rounding, `espalier.Error` is raised with the table.

    Under DDP the gradients are reduced once at the end (not inside `no_sync()`).
    """
    _check_arguments(model, loss, schedule, router_aux_loss_coef)
    temperature, wave_tokens = checked.temperature(temperature), checked.wave_tokens(wave_tokens)
    trunk_state = checked.choice("trunk_state", trunk_state, arguments.TRUNK_STATES)
    prepared = _prepared(model, rollouts)
    check(model, longest=int(prepared.lengths.max()), by_regime=True)
    check_images(model, prepared, wave_tokens)
    if _any_images(model, prepared) and ranks.sharded(model):  # a dense call runs the tower in its midst
        if schedule == "dense" or verify:
            raise Unsupported("schedule='dense'" if schedule == "dense" else "verify=True",
                              "text alone, or a model whose parameters are whole on every rank", "images in a sharded model")
        schedule = "shared"
    sets = coupled.checked(sets, len(prepared))
    coupled.refuse_branches(prepared.records)
    if trunk_state == "keep" and ranks.alternating(model):
        trunk_state = "recompute"
    if trunk_state == "offload":
        states.check_offload(model)
    inner = ranks.without_replicas(model)
    coef = _router_coefficient(model, router_aux_loss_coef)
    router = RouterLoss(model, prepared, coef, router_aux_loss_scope) if coef else None
    parts = _parts(model, prepared, wave_tokens=wave_tokens, trunk_state=trunk_state, gradients=True)
    schedule = _schedule(model, schedule, parts, wave_tokens)
    if schedule != "dense" and prepared.images is None and prepared.routes is None:
        memory_estimate.note_if_too_large(inner, parts, lambda parts, **how: _shared(inner, parts, **how), trunk_state)
    regime = verification.regime(model, prepared, parts, schedule, trunk_state)
    before = verification.begin(model, router) if verify and verification.is_due(model, regime) else None
    with measure.Peak() as peak:
        start = time.perf_counter()
        try:
            waves = _waves(parts, schedule, wave_tokens)
            step_loss, more_rows = _whole_sets(inner, prepared.records, loss, sets, waves, temperature, wave_tokens)
            if schedule == "dense":
                executors = [dense.run(inner, prepared, step_loss, temperature, waves, router)]
            else:
                executors = _shared(inner, parts, router, loss=step_loss, temperature=temperature, through_everything=ranks.sharded(model),
                                    trunk_state=trunk_state)
            total = sum(executor.total for executor in executors)  # the only time that the host waits for the step's losses
        except BaseException:
            if before is not None:
                before.put_back()
            raise
        seconds = time.perf_counter() - start
    table, problem = None, None
    if before is not None:
        try:
            table = before.compare_dense(prepared, loss, temperature, total, regime, sets)
        except Error as found:
            problem = found
    failed = problem is not None
    if ranks.replicas(model) is not None:  # replicas compare at steps of their own
        failed = ranks.reduce_gradients(ranks.replicas(model), failed)
    if failed:
        raise problem or failed_elsewhere()
    return Result(total, sum(executor.rows for executor in executors) + more_rows, int(prepared.lengths.sum()),
                  sum(executor.waves for executor in executors), seconds, peak.bytes, table, router.value if router else 0.0, schedule,
                  verification.is_verified(model, regime))


def estimate(model: torch.nn.Module, rollouts: Iterable[Mapping[str, Any]], *, wave_tokens: int = 4096, entropies: bool = False) -> Estimate:
    """Predicts the bytes that `phased_step` adds with each `trunk_state`, from small steps of the same model. Gradients do not change.

    `entropies`: whether `loss` reads `wave.entropies`. Not for rollouts with images, recorded experts, or models that FSDP shards.
    """
    arguments.model(model)
    arguments.gradients_wanted(model)
    prepared, inner = _prepared(model, rollouts), ranks.without_replicas(model)
    check(model, longest=int(prepared.lengths.max()), by_regime=True)
    parts = _parts(model, prepared, wave_tokens=checked.wave_tokens(wave_tokens), trunk_state="keep", gradients=True)
    among = [state for state in arguments.TRUNK_STATES if state != "offload" or ranks.device_of(model).type != "cpu"]
    return memory_estimate.estimate(inner, parts, lambda parts, **how: _shared(inner, parts, **how), among, entropies)


def _waves(parts, schedule, wave_tokens):
    """Lists of rollouts that finish together, as indices into the step's list: the batches of a dense run, or the plans' items."""
    if schedule == "dense" and any(part.images is not None for part, _ in parts):
        return [[int(i)] for part, _ in parts for i in part.places(np.arange(len(part)))]
    if schedule == "dense":
        return [part.places(np.array(batch)).tolist() for part, _ in parts for batch in dense.batches_of(part.lengths, wave_tokens)]
    return [part.places(item.finished) for part, plan in parts for item in plan.items]


def _prepared(model, rollouts):
    """Returns the records as `Rollouts`, with their images and recorded experts."""
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    prepared = prepared.with_images(images.of(model, prepared))
    return prepared.with_routes(routes.of(model, prepared))


def _any_images(model, prepared):
    """True if any rank that shares the model's layers has images."""
    own = prepared.images is not None
    return any(ranks.told_by_all(model, own)) if images.takes(model) and ranks.sharded(model) else own


def check_images(model, prepared, wave_tokens):
    """Runs images.check, once for each model with images. `prepared`: Rollouts, or None on a rank of a sharded model that has none to compare."""
    if not images.takes(model) or images.checked(model):
        return
    prompt = None if prepared is None else images.shortest(prepared)
    if ranks.sharded(model):
        prompt = next((told for told in ranks.told_by_all(model, prompt) if told is not None), None)
    if prompt is None:
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

    images.check(model, prompt, plain, shared)


def _check_arguments(model, loss, schedule, router_aux_loss_coef):
    arguments.model(model)
    arguments.gradients_wanted(model)
    checked.loss(loss)
    checked.choice("schedule", schedule, checked.SCHEDULES)
    arguments.coefficient(router_aux_loss_coef)


def _parts(model, prepared, **how):
    """[(rollouts, their plan)], one entry for all rollouts with the same rotary tables; usually there is one entry (rotary.py)."""
    parts = [prepared.part(members) for members in rotary.regimes(base_model(model), prepared.lengths)]
    return [(part, part.plan(unwrapped(model), **how)) for part in parts]


def _schedule(model, asked, parts, wave_tokens):
    kernels = kernels_for(torch.empty(0, dtype=next(unwrapped(model).parameters()).dtype, device=ranks.device_of(model)))
    layers = len(attention_layers(model))
    if all(choice.schedule(asked, plan, part, layers, wave_tokens, kernels) == "dense" for part, plan in parts):
        return "dense"
    return "phased" if any(item.trunk for _, plan in parts for item in plan.items) else "packed"


def _shared(model, parts, router=None, **how):
    """Runs all parts. Returns their executors."""
    replaying = any(part.routes is not None for part, _ in parts)
    with implementation.in_use(model), rotary.installed(base_model(model), attention.current), routes.installed(model, replaying):
        if router:
            with torch.no_grad():
                counting = [Executor(model, part, plan, seen=lambda wave: None, router=router) for part, plan in parts]
                _run(model, counting, _towers(model, counting))
            router.settle()
        executors = [Executor(model, part, plan, router=router, **how) for part, plan in parts]
        return _run(model, executors, _towers(model, executors))


def _towers(model, executors):
    """The ShardedTower of a sharded model if any of its ranks has images, else None."""
    if not (ranks.sharded(model) and images.takes(model)):
        return None
    own = [(e.tower, index) for e in executors if e.tower is not None for index in range(len(e.tower.images.inputs))]
    found = towers.ShardedTower(model, own, any(e.loss is not None for e in executors))
    return found if found.calls else None


def _run(model, executors, sharded_tower=None):
    if sharded_tower is not None:
        sharded_tower.begin()
    ranks.run(model, [step for executor in executors for step in executor.program(sharded_tower is not None)], ranks.device_of(model))
    if sharded_tower is not None:
        sharded_tower.finish()
    return executors


@torch.no_grad()
def _whole_sets(model, rollouts, loss, sets, waves, temperature, wave_tokens):
    """(the function that computes a wave's loss, rows run to make it). If `waves` cut a set, the log-probs of the set are computed first."""
    split = coupled.cut(sets, waves)
    members = sorted(i for one in split for i in one)
    if not members and not (sets and ranks.sharded(model)):  # ranks that share layers must all run the pass below
        return loss, 0
    values = {}
    rows = _score([rollouts[i] for i in members], model, temperature, wave_tokens, lambda i, *of_it: values.update({members[i]: of_it}))
    return coupled.TwoPass(loss, split, values) if split else loss, rows


def _score(rollouts, model, temperature, wave_tokens, add):
    """Calls add(rollout, log-probs, entropies) for each rollout. Returns the number of rows that ran."""
    if not rollouts:
        _run(model, [], _towers(model, []))
        return 0
    prepared = _prepared(model, rollouts)
    empty = torch.zeros(0, device=ranks.device_of(model))
    for i, response in enumerate(prepared.responses):
        if not len(response):  # no wave has it
            add(i, empty, empty)

    def seen(wave):
        lengths = [len(prepared.responses[rollout]) for rollout in wave.rollouts]
        for i, *values in zip(wave.rollouts, wave.logprobs.split(lengths), wave.entropies.split(lengths)):
            add(i, *values)

    parts = _parts(model, prepared, wave_tokens=wave_tokens, trunk_state="keep", gradients=False)
    return sum(executor.rows for executor in _shared(model, parts, seen=seen, temperature=temperature))


def _router_coefficient(model, given):
    if given is None and getattr(decoder_config(model), "output_router_logits", False):
        raise Unsupported("config.output_router_logits", "router_aux_loss_coef, because loss(wave) does not contain the router's loss", "True",
                          "Give router_aux_loss_coef (config.router_aux_loss_coef, or 0)")
    return given or 0.0


def logprobs(model: torch.nn.Module, rollouts: Iterable[Mapping[str, Any]], *, wave_tokens: int = 4096,
             temperature: float = 1.0) -> list[torch.Tensor]:
    """The log-probs of every response token, one tensor for each rollout, without gradients. Every shared prompt runs once."""
    return score(model, rollouts, wave_tokens=wave_tokens, temperature=temperature).logprobs


@torch.no_grad()
def score(model: torch.nn.Module, rollouts: Iterable[Mapping[str, Any]], *, wave_tokens: int = 4096, temperature: float = 1.0,
          entropies: bool = False) -> Scores:
    """The log-probs of all response tokens and, if asked for, their entropies, without gradients. Every shared prompt runs once."""
    arguments.model(model)
    temperature, wave_tokens = checked.temperature(temperature), checked.wave_tokens(wave_tokens)
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
