"""Compares a shared step with a dense one, before any reduction over data parallel ranks: each rank its own gradients, one verdict for all ranks.
Ranks that have parts of the same rows (sequence and context parallelism) compare the sums of their gradients.

Two dense runs give the floor, the second with embeddings moved by one rounding step. The rule for a parameter is that of espalier.rows.verdict. All
runs are outside of the step itself: gradients, the routers' counts and the log of their losses are put back before it.
"""

import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from espalier.rows.verdict import compared, demand, failed_elsewhere, nudged

_FUNCTIONS = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")


def regime(inners, plan_items, program, prepared):
    """The properties of a step, besides its tokens, that its arithmetic depends on: kinds of micro-batches, how deep trunks stand below each other, the
    next power of two above the longest rollout and above the number of trunks, the model's mode and what is trained."""
    depths = []
    for item in plan_items:
        depths.append(depths[item.parent] + 1 if item.parent >= 0 else 0)
    trunks = sum(item.trunk for item in plan_items)
    longest = int(prepared.lengths.max())
    windows = [getattr(inner.config, "window_size", None) for inner in inners]
    return (max(depths) if trunks else -1, trunks.bit_length(), sum(not item.trunk for item in plan_items) > 1, longest.bit_length(),
            any(one.index is None for one in program), any(window and longest > window[0] >= 0 for window in windows), inners[0].training,
            hash(tuple((p.dtype, p.requires_grad) for inner in inners for p in inner.parameters())))


def due(state, found):
    """True if a step of this regime must be compared on any rank: all ranks compare together."""
    return state.verify and told_by_any(found not in state.verified)


def told_by_any(flag):
    if not dist.is_initialized():
        return flag
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    told = torch.tensor([int(flag)], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def compare(chunks, inners, shared, plain, again):
    """Returns the table. `shared`, `plain` and `again` run the step in three ways and return its loss on this rank. Raises `Error` on all ranks if any
    rank's gradients are too far from dense."""
    held = _Held(chunks, inners)
    with held.quiet():
        dense_loss = plain()
        wanted = held.take()
        shared_loss = shared()
        found = held.take()
        embeddings = [inner.embedding.word_embeddings for inner in inners if getattr(inner, "pre_process", False)]

        def draw(number):
            with contextlib.ExitStack() as moved:
                for embedding in embeddings:
                    moved.enter_context(nudged(embedding, number))
                again()
            other = held.take()
            return [(name, found[name], wanted[name], other[name]) for name in wanted]

        table = compared(draw, shared_loss, dense_loss, agreed=lambda passed: not told_by_any(not passed))
    failed = table.verdict != "pass"
    if told_by_any(failed):
        demand(table)
        raise failed_elsewhere()
    return table


class _Held:
    """A model's gradients on this rank, and all else that a run changes."""

    def __init__(self, chunks, inners):
        self.chunks, self.inners = chunks, inners
        several = len(inners) > 1
        self.config = inners[0].config
        self.named = [(f"chunk {at}: {name}" if several else name, p) for at, inner in enumerate(inners) for name, p in inner.named_parameters()
                      if p.requires_grad]

    def _gradient(self, p):
        return p.main_grad if hasattr(p, "main_grad") else p.grad

    def _summed_over(self, name, p):
        """The groups over whose ranks a parameter's gradient is summed because they have different rows."""
        groups = []
        by_head = getattr(self.config, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name)
        if by_head or self.config.sequence_parallel and getattr(p, "sequence_parallel", False):
            groups.append(parallel_state.get_tensor_model_parallel_group())
        if parallel_state.get_context_parallel_world_size() > 1:
            of_expert = not getattr(p, "allreduce", True)
            groups.append(parallel_state.get_expert_data_parallel_group() if of_expert else parallel_state.get_context_parallel_group())
        return [group for group in groups if dist.get_world_size(group) > 1]

    def take(self):
        """The gradients by name, summed where ranks have different rows, None where there is none, and clears them."""
        out = {}
        for name, p in self.named:
            grad = self._gradient(p)
            groups = self._summed_over(name, p)
            grad = torch.zeros_like(p) if grad is None and groups else grad
            out[name] = None if grad is None else grad.clone()
            for group in groups:
                dist.all_reduce(out[name], group=group)
            if hasattr(p, "main_grad"):
                p.main_grad.zero_()
                p.grad = None
            else:
                p.grad = None
        return out

    @contextlib.contextmanager
    def quiet(self):
        """Context manager in which gradients begin at zero and stay on their rank. Afterwards they, and the routers' counts, are what they were."""
        config = self.inners[0].config
        functions = {name: getattr(config, name, None) for name in _FUNCTIONS}
        buffers = [(buffer, buffer.clone()) for inner in self.inners for buffer in inner.buffers()]
        before = [(p, self._gradient(p)) for _, p in self.named]
        before = [(p, None if grad is None else grad.clone()) for p, grad in before]
        self.take()
        added = {id(p): getattr(p, "grad_added_to_main_grad", None) for _, p in self.named}
        try:
            for name in functions:
                setattr(config, name, None)
            with contextlib.ExitStack() as unsynchronized:
                for chunk in self.chunks:
                    if hasattr(chunk, "no_sync"):
                        unsynchronized.enter_context(chunk.no_sync())
                yield
        finally:
            for name, function in functions.items():
                setattr(config, name, function)
            for buffer, value in buffers:
                buffer.copy_(value)
            for p, grad in before:
                if hasattr(p, "main_grad"):
                    p.main_grad.copy_(grad)
                else:
                    p.grad = grad
                if added[id(p)] is not None:
                    p.grad_added_to_main_grad = added[id(p)]
