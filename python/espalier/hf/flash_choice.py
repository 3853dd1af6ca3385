"""The FlashAttention of this GPU, chosen by measurement: torch's own, or FlashAttention 3 or 4 where their packages are installed.

torch registers the names of other implementations (`torch.nn.attention.list_flash_attention_impls`). Activating one opens its package, and fails where
that is missing or does not take the GPU. Each that can be activated runs attention as a step has it, forward and backward: the rows of a wave against a
prompt, and causal runs. Its results must agree with torch's own within the rounding of both, and the fastest stays active.
"""

import math
import time
from typing import NamedTuple

import torch

from espalier.hf.model_parts import decoder_config, unwrapped
from espalier.rows import by_calls, by_flash

OWN = "torch"
RUNS, RUN, PROMPT = 4, 1024, 4096  # rows of a wave, and of the prompt above it
WARM, TIMED = 2, 5


class Choice(NamedTuple):
    """`name`: the implementation that is active now. `seconds`: of each that was measured. `refused`: why others were not, by name."""
    name: str
    seconds: dict
    refused: dict


def choose(model, *, seconds_of=None):
    """Measures on the model's device, with its heads and its dtype. `seconds_of(call)`: how long a call takes; default: on CUDA, the least of a few."""
    config, weight = decoder_config(unwrapped(model)), next(iter(unwrapped(model).parameters()))
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dtype = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    problem = _Problem(weight.device, dtype, heads, kv_heads, size)
    if not by_flash.serves(problem.q, problem.k):
        return Choice(OWN, {}, {name: "FlashAttention does not run on this device" for name in _names()})
    return _fastest(problem, seconds_of or _seconds_on_cuda)


def _fastest(problem, seconds_of):
    module = torch.nn.attention
    before = module.current_flash_attention_impl() if _names() else None
    if before is not None:
        module.restore_flash_attention_impl()
    expected, refused = problem.run(), {}
    seconds = {OWN: seconds_of(problem.run)}
    for name in _names():
        try:
            module.activate_flash_attention_impl(name)
            wrong = problem.difference(expected, problem.run())
            if wrong:
                refused[name] = wrong
            else:
                seconds[name] = seconds_of(problem.run)
        except Exception as error:  # a package that is missing, another GPU, another version: torch's own serves
            refused[name] = f"{type(error).__name__}: {error}"
        finally:
            if module.current_flash_attention_impl() is not None:
                module.restore_flash_attention_impl()
    name = min(seconds, key=seconds.get)
    if name != OWN:
        module.activate_flash_attention_impl(name)
    return Choice(name, seconds, refused)


def _names():
    return tuple(getattr(torch.nn.attention, "list_flash_attention_impls", tuple)())


def _seconds_on_cuda(call):
    least = math.inf
    for turn in range(WARM + TIMED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if turn >= WARM:
            least = min(least, time.perf_counter() - begin)
    return least


class _Problem:
    """The rows of a wave in causal runs, below a prompt."""

    def __init__(self, device, dtype, heads, kv_heads, size):
        draw = torch.Generator().manual_seed(0)

        def rows(count, of):
            return torch.randn(count, of, size, generator=draw).to(device, dtype)

        self.q, self.go = (rows(RUNS * RUN, heads) for _ in range(2))
        self.k, self.v = (rows(RUNS * RUN, kv_heads) for _ in range(2))
        self.above = [rows(PROMPT, kv_heads) for _ in range(2)]
        self.runs, self.scale = by_calls.runs_of(device, [RUN] * RUNS), size ** -0.5

    def run(self):
        """out, lse, dq, dk and dv of the wave's own rows, then of the prompt's."""
        results = []
        for k, v, runs in ((self.k, self.v, self.runs), (*self.above, None)):
            out, lse = by_flash.attend(self.q, k, v, runs, self.scale)
            results += [out, lse, *by_flash.attend_backward(self.go, self.q, k, v, out, lse, runs, self.scale)]
        return results

    def difference(self, expected, found):
        """Why the results are not torch's own; empty where each differs by no more than the rounding of both. Outputs and gradients are rounded to
        `dtype` at the end, and so are the probabilities and slopes that their products read: two roundings each side, of sums of either sign."""
        allowed = 4 * torch.finfo(self.q.dtype).eps
        for name, want, got in zip(("out", "lse", "dq", "dk", "dv") * 2, expected, found):
            error = float((got.double() - want.double()).norm() / want.double().norm())
            if not error <= allowed:
                return f"{name} differs from torch's own by {error:.1e}, {allowed:.1e} is allowed"
        return ""
