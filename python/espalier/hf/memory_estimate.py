"""Bytes of a step before it runs, from a few rows of the same model on the same device.

A small step of one prompt and two responses runs four times: as it is, with more prompt rows, with more response rows, and with more scored rows.
The bytes after each operation are linear in these three numbers. The estimate is the largest of them at the numbers of the real step. It covers
whatever the model does (LoRA, autocast, checkpointing) and gradients that do not exist yet. It does not cover rounding by the allocator, memory
inside an operation, or what `loss` holds.
"""

import logging
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from espalier import native
from espalier.errors import Error
from espalier.hf import probe, ranks
from espalier.rows import head
from espalier.hf.model_parts import unwrapped
from espalier.hf.live_bytes import LiveBytes
from espalier.hf.rollouts import Rollouts

_PROMPT, _LEAST = 192, 96  # rows of the small steps' prompt, and the fewest scored rows: plain products have bands of 128 rows
_GIB = 2**30

_log = logging.getLogger("espalier")
_noted: weakref.WeakSet = weakref.WeakSet()  # models whose first step was estimated


@dataclass(frozen=True)
class Estimate:
    """`weights`: bytes of parameters and buffers on the device. `step`: bytes that a step adds at most, by trunk_state. `trunk_rows`, `wave_rows`:
    the largest path and the largest wave, where it has them. `free`: bytes that the device still has for the step, or None."""
    weights: int
    step: dict[str, int]
    trunk_rows: int
    wave_rows: int
    free: int | None = None

    def fits(self, trunk_state: str) -> bool:
        return self.free is None or self.step[trunk_state] <= self.free

    def __str__(self) -> str:
        lines = [f"weights {self.weights / _GIB:.2f} GiB; a step with {self.trunk_rows:,} rows of prompts and waves of {self.wave_rows:,} rows adds"]
        lines += [f"  {size / _GIB:.2f} GiB with trunk_state={state!r}" for state, size in self.step.items()]
        return "\n".join(lines + ([f"  {self.free / _GIB:.2f} GiB are free"] if self.free is not None else []))


def estimate(model, parts, run, trunk_states, entropies=False):
    """`parts`: (rollouts, plan) of the step; `run(parts, loss=..., trunk_state=...)`: runs a step."""
    if ranks.sharded(model):
        raise Error("input", "estimate", "a model whose parameters are whole on every rank", "one that FSDP shards", "", 2)
    device = ranks.device_of(model)
    kept = [x for x in (*unwrapped(model).parameters(), *unwrapped(model).buffers()) if x.device.type == device.type]
    weights = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in kept}.values())
    sizes = [(item.path_rows, item.rows, len(np.unique(plan.edges(i)[:, 0]))) for _, plan in parts for i, item in enumerate(plan.items) if not item.trunk]
    vocabulary = unwrapped(model).get_output_embeddings().weight.shape[0]
    wave_rows, outputs = max(rows for _, rows, _ in sizes), max(scored for *_, scored in sizes)
    chunks = max(1, -(-outputs // head.chunk_rows(torch.empty(0, vocabulary, device=device))))
    step = {state: int(max(_bytes(model, run, state, chunks, entropies, device, sizes))) for state in trunk_states}
    return Estimate(weights, step, max(path for path, *_ in sizes), wave_rows, _free(device))


def note_if_too_large(model, parts, run, trunk_state):
    """Called before every step; acts on a model's first step on a GPU: logs one line, with the setting that helps, if the step will not fit."""
    if model in _noted or not _notes(model):
        return
    _noted.add(model)
    others = [state for state in ("recompute", "offload") if state != trunk_state and (state == "recompute" or ranks.device_of(model).type == "cuda")]
    try:
        found = estimate(model, parts, run, (trunk_state,))
        if not found.fits(trunk_state):
            _log.warning("this step may not fit: %s\n%s", found, advice(estimate(model, parts, run, others)))
    except Exception as problem:  # a failed estimate must not fail the step
        _log.warning("the bytes of this step could not be estimated: %s: %s", type(problem).__name__, problem)


def _notes(model):
    """True for a model on a GPU that FSDP does not shard."""
    return ranks.device_of(model).type == "cuda" and torch.cuda.is_available() and not ranks.sharded(model)


def advice(others):
    """Names a trunk state that would make the step fit; if none does, advises smaller waves. `others`: an Estimate of the other states."""
    better = [state for state, size in others.step.items() if others.fits(state)]
    if better:
        return f"trunk_state={better[0]!r} fits"
    return f"give phased_step a smaller wave_tokens than {others.wave_rows}, with trunk_state='recompute' or 'offload'\n{others}"


def _free(device):
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _bytes(model, run, trunk_state, chunks, entropies, device, sizes):
    """The peak in bytes for each of `sizes`: (rows of open trunks, rows of a wave, scored rows)."""
    scored = max(_LEAST, chunks)
    base = np.array([_PROMPT, 2 * scored, scored])
    lines = [_timeline(model, run, trunk_state, at, chunks, entropies, device)
             for at in (base, base + [_PROMPT, 0, 0], base + [0, 2 * scored, 0], base + [0, 0, scored])]
    if len({len(line) for line in lines}) > 1:  # a mixture chose other experts: operations do not correspond
        lines = [line.max(keepdims=True) for line in lines]
    slopes = [(more - lines[0]) / step for more, step in zip(lines[1:], (_PROMPT, 2 * scored, scored))]
    for size in sizes:
        yield (lines[0] + sum(slope * (of - own) for slope, of, own in zip(slopes, size, base))).max()


def _timeline(model, run, trunk_state, sizes, chunks, entropies, device):
    """Bytes after each operation of a small step. Restores earlier gradients."""
    path, rows, scored = (int(size) for size in sizes)
    few = _Few(path, rows, scored, trunk_state == "recompute")
    loss = lambda wave: wave.logprobs.sum() + wave.entropies.sum() if entropies else wave.logprobs.sum()
    parameters = list(unwrapped(model).parameters())
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        with probe.quiet(model), head.in_chunks(-(-scored // chunks)), LiveBytes(device.type) as live:
            run([(few.rollouts, few)], loss=loss, trunk_state=trunk_state)
    finally:
        for p, grad in zip(parameters, before):
            p.grad = grad
    return np.array(live.timeline)


class _Few:
    """A plan of one prompt and two responses below it, of which the last rows are scored."""

    def __init__(self, path, rows, scored, recompute):
        ids = lambda count: (3 + np.arange(count) % 7).tolist()
        each = rows // 2
        self.rollouts = Rollouts([dict(prompt_ids=ids(path + 1), response_ids=ids(each)) for _ in range(2)], 1 << 30)
        both, none = np.arange(2, dtype=np.int32), np.zeros(0, np.int32)
        trunk = native.Item(True, recompute, -1, 0, path, np.array([[0, 0, path, 0, path, 2, 0, 2]]), [(0, path, path)], both, none)
        runs = [(0, each, each), (each, each, 2 * each)]
        below = np.array([[i, path, path + each, i * each, (i + 1) * each, 1, i, i + 1] for i in range(2)])
        self.items = [trunk, native.Item(False, False, 0, path, 2 * each, below, runs, both, both)]
        first = each - scored // 2
        self._edges = np.array([[i * each + t, self.rollouts.responses[i][t], i, t] for i in range(2) for t in range(first, each)])

    def program(self):
        return [(True, 0), (True, 1), (False, 1), (False, 0)]

    def edges(self, item):
        return self._edges if item else self._edges[:0]
