"""Shared prompts in a Megatron-Core model, through Megatron's own schedules, unpatched.

    espalier.megatron.install(chunks)                                 a built model, or the list of its chunks
    run = espalier.megatron.forward_backward(get_forward_backward_func())    the same signature: a trainer's own loop
    result = espalier.megatron.phased_step(chunks, rollouts, loss)    gradients of the sum of loss(wave), for a loop of one's own
    scores = espalier.megatron.score(chunks, rollouts)                log-probs of all response tokens, no gradients
    espalier.megatron.check(chunks)                                   refuses by name anything that would be silently wrong

`install` changes instance attributes alone: modules, parameters, state dicts and checkpoints stay Megatron's, and so do plain calls of the model.
Tensor, sequence, pipeline (interleaved too), context and expert parallelism, recurrent layers, recomputation, LoRA, DDP and the distributed
optimizer are supported (docs/megatron.md).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from espalier.extras import require

require("espalier.megatron", "megatron")

import torch

from espalier.megatron import trainer
from espalier.megatron.attach import install as _install
from espalier.megatron.checks import check
from espalier.megatron.run import Prepared
from espalier.rows import arguments, measure
from espalier.rows.waves import Result, Scores, Wave

__all__ = ["Result", "Scores", "Wave", "check", "forward_backward", "install", "phased_step", "score"]


def install(chunks: Any, verify: bool = False) -> None:
    """Attaches to a built model: one chunk, or the list of a rank's chunks. Refuses by name what it cannot share exactly.

    `verify`: the first step, and each step of a new regime, also runs densely, and an `espalier.Error` is raised on all ranks if they differ by more
    than rounding.
    """
    _install(chunks, verify)


def forward_backward(function: Callable[..., Any], first_rows: Callable[[Any], Sequence[int]] | None = None) -> Callable[..., Any]:
    """Megatron's forward-backward function (`get_forward_backward_func()`) with shared prompts for a trainer's unchanged loop: the same arguments, and the
    trainer's reports in its own order. Its attribute `rows` counts rows run and rows without sharing.

    The trainer's forward step calls the model once, with `input_ids`, `packed_seq_params` (thd) or batches of equal rows, and a `loss_mask` that marks
    the rows whose logits the loss reads; rows before the first marked one may be shared. `first_rows(batch)` returns that row of each sequence for
    trainers that hand the model no loss_mask; `batch` is what the trainer took from its iterator. Models without `install`, and steps
    that cannot be shared, run the function itself; one line in the log names the reason.
    """
    return trainer.forward_backward(function, first_rows)


def phased_step(chunks: Any, rollouts: Iterable[Mapping[str, Any]], loss: Callable[[Wave], torch.Tensor], *, wave_tokens: int = 4096,
                temperature: float = 1.0, micro_batches: Sequence[Sequence[int]] | None = None) -> Result:
    """Adds the gradients of the sum of `loss(wave)` over all waves, as Megatron's own schedule adds its micro-batches' gradients: to `main_grad` under
    DDP, which it reduces once, else to `.grad`. Every shared prompt runs once, forward and backward.

    All tensor, context and pipeline parallel ranks of a data parallel rank call it with the same `rollouts`: dicts with `prompt_ids` and
    `response_ids`, and `routed_experts` where experts were recorded (docs/rollout_format.md). `loss(wave)` returns a scalar; it is called on ranks of the last pipeline stage, with whole responses of the data parallel
    rank. At most `wave_tokens` rows of a context parallel rank run at once. With `calculate_per_token_loss` Megatron divides by all response
    tokens of the step. `micro_batches`: lists of rollouts whose router losses are computed together, as a dense step would run them; None: each
    rollout for itself. The `loss` of the result is that of the data parallel rank, on every stage.
    """
    arguments.loss(loss)
    temperature, wave_tokens = arguments.temperature(temperature), arguments.wave_tokens(wave_tokens)
    return stepped(Prepared(chunks, rollouts, wave_tokens, gradients=True, micro_batches=micro_batches), loss, temperature)


def stepped(prepared: Prepared, loss: Callable[[Wave], torch.Tensor], temperature: float, tokens: Callable[[Wave], int] | None = None,
            plain: Callable[[], float] | None = None, again: Callable[[], float] | None = None) -> Result:
    """`phased_step` of a step that is prepared. `tokens(wave)`: the tokens by which Megatron divides with calculate_per_token_loss. `plain` and `again`: a
    trainer's own step, densely, for a comparison."""
    table = prepared.verified(loss, temperature, tokens, plain, again)
    with measure.Peak() as peak:
        start = time.perf_counter()
        step = prepared.step(loss, temperature=temperature, tokens=tokens)
        total = prepared.from_last_stage(float(step.losses))
        seconds = time.perf_counter() - start
    return Result(total, step.rows, int(prepared.rollouts.lengths.sum()), sum(not item.trunk for item in prepared.plan.items), seconds, peak.bytes, table,
                  schedule=prepared.schedule, verified=prepared.was_verified())


@torch.no_grad()
def score(chunks: Any, rollouts: Iterable[Mapping[str, Any]], *, wave_tokens: int = 4096, temperature: float = 1.0,
          entropies: bool = False) -> Scores:
    """The log-probs of all response tokens and, if asked for, their entropies, without gradients. Ranks of other pipeline stages than the last get
    empty lists."""
    temperature, wave_tokens = arguments.temperature(temperature), arguments.wave_tokens(wave_tokens)
    prepared = Prepared(chunks, rollouts, wave_tokens, gradients=False)
    return scored(prepared, temperature, entropies)


def scored(prepared: Prepared, temperature: float, entropies: bool) -> Scores:
    """`score` of a step that is prepared."""
    kinds = ("logprobs", "entropies") if entropies else ("logprobs",)
    empty = torch.zeros(0, device=prepared.device)
    out = {kind: [empty] * len(prepared.rollouts) if prepared.last else [] for kind in kinds}  # empty responses belong to no wave

    def seen(wave: Wave) -> None:
        lengths = [len(prepared.rollouts.responses[rollout]) for rollout in wave.rollouts]
        for kind in kinds:
            for rollout, part in zip(wave.rollouts, getattr(wave, kind).split(lengths)):
                out[kind][rollout] = part

    step = prepared.step(seen=seen, temperature=temperature)
    return Scores(out["logprobs"], out.get("entropies"), step.rows, int(prepared.rollouts.lengths.sum()))
