"""Shared prompts around an unmodified transformers causal language model.

    result = espalier.hf.phased_step(model, rollouts, loss)     gradients of the sum of loss(wave), every prompt run once
    values = espalier.hf.logprobs(model, rollouts)              log-probs of all response tokens, no gradients
    espalier.hf.check(model)                                    refuses by name what would be silently wrong

The model stays what it is: LoRA, tied embeddings, non-reentrant checkpointing, autocast, DDP and FSDP2 are fine.
"""

import contextlib
import time
from dataclasses import dataclass

import torch

from espalier.hf import attention, measure, ranks, verification
from espalier.hf.checks import base_model, check, decoder_config, unwrapped
from espalier.hf.rollouts import Rollouts
from espalier.hf.step import Executor, Wave

__all__ = ["Result", "Wave", "check", "logprobs", "phased_step"]


@dataclass(frozen=True)
class Result:
    """What one step did. `rows`: token rows run forward; `rows_without_sharing`: those of a dense step. `loss`: the sum over waves."""
    loss: float
    rows: int
    rows_without_sharing: int
    waves: int
    seconds: float
    peak_bytes: int
    verification: "verification.Verification | None" = None


def phased_step(model, rollouts, loss, *, wave_tokens=4096, trunk_state="keep", temperature=1.0, verify=False):
    """Adds the gradients of sum over waves of `loss(wave)` to `.grad`, every shared prompt run once, forward and backward.

    `rollouts`: dicts with `prompt_ids` and `response_ids`. `loss(wave)` returns a scalar; a wave holds whole responses, at most
    `wave_tokens` rows run at once. `trunk_state`: "keep" a prompt's activations until its backward, or "recompute" them.
    `verify`: a model's first step also runs dense; beyond what rounding explains `espalier.Error` is raised with the table.
    Under DDP the gradients are reduced once at the end (not inside `no_sync()`).
    """
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    check(model, longest=int(prepared.lengths.max()))
    with _our_attention(model):
        plan = prepared.plan(unwrapped(model), wave_tokens=wave_tokens, trunk_state=trunk_state, gradients=True)
        inner = ranks.without_replicas(model)
        executor = Executor(inner, prepared, plan, loss=loss, temperature=temperature, through_everything=ranks.sharded(model))
        before = verification.begin(model) if verify and verification.is_first(model) else None
        with measure.Peak() as peak:
            start = time.perf_counter()
            try:
                ranks.run(inner, executor.program(), executor.device)
            except BaseException:
                if before is not None:
                    before.put_back()
                raise
            seconds = time.perf_counter() - start
    table = before.compare(prepared, loss, temperature, executor.total) if before is not None else None
    if ranks.replicas(model) is not None:
        ranks.reduce_gradients(ranks.replicas(model))
    return Result(executor.total, executor.rows, int(prepared.lengths.sum()), executor.waves, seconds, peak.bytes, table)


@torch.no_grad()
def logprobs(model, rollouts, *, wave_tokens=4096, temperature=1.0):
    """One tensor for each rollout: the log-prob of every response token."""
    prepared = Rollouts(rollouts, decoder_config(model).vocab_size)
    check(model, longest=int(prepared.lengths.max()))
    out = [None] * len(prepared)

    def seen(wave):
        for rollout in wave.rollouts:
            out[rollout] = wave.logprobs[wave.rollout == rollout]

    with _our_attention(model):
        plan = prepared.plan(unwrapped(model), wave_tokens=wave_tokens, trunk_state="keep", gradients=False)
        inner = ranks.without_replicas(model)
        executor = Executor(inner, prepared, plan, seen=seen, temperature=temperature)
        ranks.run(inner, executor.program(), executor.device)
    empty = torch.zeros(0, device=executor.device)
    return [empty if values is None else values for values in out]


@contextlib.contextmanager
def _our_attention(model):
    base = base_model(model)
    before = base.config._attn_implementation
    if before != attention.NAME:
        base.set_attn_implementation(attention.NAME)
    try:
        yield
    finally:
        if before != attention.NAME:
            base.set_attn_implementation(before)
