"""Shared prompts in a Megatron-Core model, through Megatron's own schedules, unpatched.

    espalier.megatron.install(chunks)                                 a built model, or the list of its chunks
    run = espalier.megatron.forward_backward(get_forward_backward_func())    the same signature: a trainer's own loop
    result = espalier.megatron.phased_step(chunks, rollouts, loss)    gradients of the sum of loss(wave), for a loop of one's own
    scores = espalier.megatron.score(chunks, rollouts)                log-probs of all response tokens, no gradients
    espalier.megatron.check(chunks)                                   refuses by name anything that would be silently wrong

`install` changes instance attributes alone: modules, parameters, state dicts and checkpoints stay Megatron's, and so do plain calls of the model.
Tensor, sequence, pipeline (interleaved too), context and expert parallelism, recomputation, LoRA, DDP and the distributed optimizer are
supported (docs/megatron.md).
"""

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from espalier.extras import require

require("espalier.megatron", "megatron")

import numpy as np
import torch
import torch.distributed as dist

from espalier.errors import Error
from espalier.megatron import program as programs
from espalier.megatron.attach import install as _install, listed, state_of
from espalier.megatron.checks import check, check_config, has_router_losses
from espalier.megatron.layout import agree, layout_of
from espalier.megatron.routers import RouterStep
from espalier.megatron.shape import shape_of, vocabulary_of
from espalier.megatron.step import Step, inner_of
from espalier.rows import arguments, measure
from espalier.rows.rollouts import Rollouts
from espalier.rows.waves import Result, Scores, Wave

__all__ = ["Result", "Scores", "Wave", "check", "install", "phased_step", "score"]


def install(chunks: Any, verify: bool = False) -> None:
    """Attaches to a built model: one chunk, or the list of a rank's chunks. Refuses by name what it cannot share exactly.

    `verify`: the first step, and each step of a new regime, also runs densely, and an `espalier.Error` is raised on all ranks if they differ by more
    than rounding.
    """
    _install(chunks, verify)


def phased_step(chunks: Any, rollouts: Iterable[Mapping[str, Any]], loss: Callable[[Wave], torch.Tensor], *, wave_tokens: int = 4096,
                temperature: float = 1.0, micro_batches: Sequence[Sequence[int]] | None = None) -> Result:
    """Adds the gradients of the sum of `loss(wave)` over all waves, as Megatron's own schedule adds those of its micro-batches: to `main_grad` under
    DDP, which it reduces once, else to `.grad`. Every shared prompt runs once, forward and backward.

    All tensor, context and pipeline parallel ranks of a data parallel rank call it with the same `rollouts`: dicts with `prompt_ids` and
    `response_ids`. `loss(wave)` returns a scalar; it is called on ranks of the last pipeline stage, with whole responses of the data parallel
    rank. At most `wave_tokens` rows of a context parallel rank run at once. With `calculate_per_token_loss` Megatron divides by all response
    tokens of the step. `micro_batches`: lists of rollouts whose router losses are computed together, as a dense step would run them; None: each
    rollout for itself. The `loss` of the result is that of the data parallel rank, on every stage.
    """
    chunks, inners = _checked(chunks)
    arguments.loss(loss)
    temperature, layout = arguments.temperature(temperature), layout_of(inners[0].config)
    prepared, plan = _planned(inners, rollouts, arguments.wave_tokens(wave_tokens), layout, True)
    program = programs.aligned(programs.program_of(plan.items, True), layout.together, layout.microbatches)
    with measure.Peak() as peak:
        start = time.perf_counter()
        routing = _routing(chunks, inners, prepared, plan, layout, micro_batches, len(program))
        step = Step(chunks, prepared, plan, program, layout, loss=loss, temperature=temperature, routing=routing).run()
        total = _from_last_stage(float(step.losses), layout, step.device)
        seconds = time.perf_counter() - start
    kinds = {one.kind for one in program if one.index is not None}
    return Result(total, step.rows, int(prepared.lengths.sum()), sum(not item.trunk for item in plan.items), seconds, peak.bytes,
                  schedule="phased" if "open" in kinds else "packed")


def _routing(chunks, inners, prepared, plan, layout, micro_batches, count):
    """The RouterStep of a step, or None without experts. If routers have losses, a first pass without gradients counts their choices."""
    config, device = inners[0].config, next(inners[0].parameters()).device
    if not config.num_moe_experts:
        return None
    batches = [[i] for i in range(len(prepared))] if micro_batches is None else [list(batch) for batch in micro_batches]
    if sorted(i for batch in batches for i in batch) != list(range(len(prepared))):
        raise Error("option", "micro_batches", f"lists that have each of the {len(prepared)} rollouts once", repr(batches)[:80], "", 2)
    routing = RouterStep(config, prepared.lengths, batches, count, device)
    if has_router_losses(config) and inners[0].training:
        counting = RouterStep(config, prepared.lengths, batches, count, device, counting=True)
        program = programs.aligned(programs.program_of(plan.items, False), layout.together, layout.microbatches)
        with torch.no_grad():
            Step(chunks, prepared, plan, program, layout, seen=lambda wave: None, routing=counting).run()
        routing.settle(counting.counts)
    return routing


@torch.no_grad()
def score(chunks: Any, rollouts: Iterable[Mapping[str, Any]], *, wave_tokens: int = 4096, temperature: float = 1.0,
          entropies: bool = False) -> Scores:
    """The log-probs of all response tokens and, if asked for, their entropies, without gradients. Ranks of other pipeline stages than the last get
    empty lists."""
    chunks, inners = _checked(chunks)
    temperature, layout = arguments.temperature(temperature), layout_of(inners[0].config)
    prepared, plan = _planned(inners, rollouts, arguments.wave_tokens(wave_tokens), layout, False)
    program = programs.aligned(programs.program_of(plan.items, False), layout.together, layout.microbatches)
    kinds = ("logprobs", "entropies") if entropies else ("logprobs",)
    last = any(inner.post_process for inner in inners)
    empty = torch.zeros(0, device=next(inners[0].parameters()).device)
    out = {kind: [empty] * len(prepared) if last else [] for kind in kinds}  # empty responses belong to no wave

    def seen(wave: Wave) -> None:
        lengths = [len(prepared.responses[rollout]) for rollout in wave.rollouts]
        for kind in kinds:
            for rollout, part in zip(wave.rollouts, getattr(wave, kind).split(lengths)):
                out[kind][rollout] = part

    step = Step(chunks, prepared, plan, program, layout, seen=seen, temperature=temperature).run()
    return Scores(out["logprobs"], out.get("entropies"), step.rows, int(prepared.lengths.sum()))


def _checked(chunks):
    chunks = listed(chunks)
    inners = [inner_of(chunk) for chunk in chunks]
    if any(state_of(inner) is None for inner in inners):
        _install(chunks)
    for inner in inners:
        check_config(inner)
    return chunks, inners


def _planned(inners, rollouts, wave_tokens, layout, gradients):
    """(Rollouts, their plan), the same on all ranks of a model replica."""
    vocabulary = vocabulary_of(inners)
    prepared, like = Rollouts(rollouts, vocabulary), next(inners[0].parameters())
    plan = prepared.planned(shape_of(inners[0].config, vocabulary), like, wave_tokens=wave_tokens * layout.cp, trunk_state="keep", gradients=gradients)
    agree(_fingerprint(prepared, plan), like.device, (layout.tp_group, layout.cp_group, layout.pp_group))
    return prepared, plan


def _fingerprint(prepared, plan):
    found = 0
    for array in (*prepared.prompts, *prepared.responses, *(part for item in plan.items for part in (item.segments, item.finished))):
        found = zlib.crc32(np.ascontiguousarray(array).tobytes(), found)
    return found


def _from_last_stage(total, layout, device):
    if layout.pp == 1:
        return total
    told = torch.tensor([total], dtype=torch.float64, device=device)
    dist.all_reduce(told, group=layout.pp_group)  # the other stages have 0
    return told.item()
