"""Counts of what a GPU would be asked to do, on tensors without memory: operations that launch work, and those that the host waits for.

`step(...)`: a phased step of a model on torch's device `meta` in a GPU's place, counted: its backward needs no driver, as that of fake CUDA tensors
does. bench/gpu_counts.py writes the table of docs/python.md from it.
"""

import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espalier import hf
from espalier.hf import attention
from espalier.rows import blocks, by_efficient, by_flash
from espalier.rows.attention import RowAttention
from espalier.rows.trunk import RowSet, Trunk
from espalier.hf.live_bytes import LiveBytes
from espalier.hf.rollouts import Rollouts
from hf_models import make


class _Making(TorchFunctionMode):
    """Tensors made of the host's values on the device, which on `meta` is no operation."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and out.is_meta and not isinstance(args[0], torch.Tensor):
            self.waits.append("_to_copy")
        return out


class Counted(TorchDispatchMode):
    """Operations that launch work on a device, and those that the host would wait for: reading a value, shapes that depend on values, and copies
    between host and device that are not queued."""
    FREE = {"view", "_unsafe_view", "reshape", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias", "empty",
            "empty_like", "new_empty", "permute", "unbind", "split", "split_with_sizes", "as_strided", "_reshape_alias", "empty_strided",
            "new_empty_strided", "lift_fresh", "unsafe_chunk", "chunk"}
    READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}

    def __init__(self):
        super().__init__()
        self.launched, self.waits = 0, []

    def __enter__(self):
        self.making = _Making(self.waits)
        self.making.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.making.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        reads = name in self.READS or name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if reads and any(x.device.type != "cpu" for x in given):
            self.waits.append(name)
        if name == "_local_scalar_dense" and given[0].is_meta:  # it has no value
            return 0.0
        if name == "_to_copy" and given[0].is_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self.waits.append(name)
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        if name == "copy_" and given[0].device.type == "cpu" and given[1].is_meta:
            self.waits += [] if kwargs.get("non_blocking", args[2:] == (True,)) else [name]
            return given[0]
        out = function(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in (*given, *made)}
        self.launched += name not in self.FREE and devices != {"cpu"}
        copied = name in ("_to_copy", "copy_") and not kwargs.get("non_blocking", args[2:] == (True,))
        if copied and len(devices) > 1:
            self.waits.append(name)
        return out


def _efficient_backward(go, q, k, v, *_):
    """On tensors without memory, for which torch 2.11 registers this operation with its arguments in another order; one operation."""
    return [torch.ops.aten.zeros_like(q), torch.empty_like(k), torch.empty_like(v)]


def _served(kernels, narrow):
    """As these kernels serve tensors of a GPU."""
    def serves(q, v=None):
        fits = v is None or q.shape[-1] == v.shape[-1] or not narrow
        return q.is_meta and fits and (not narrow or q.dtype in (torch.bfloat16, torch.float16))

    return mock.patch.object(kernels, "serves", serves)


@contextlib.contextmanager
def as_on_a_gpu(by_blocks=False):
    """Tensors of the device `meta` take a GPU's way. `by_blocks`: with torch's kernels for a block alone."""
    fused = () if by_blocks else (_served(by_flash, True), _served(by_efficient, False))
    with contextlib.ExitStack() as stack:
        for replaced in (*fused, mock.patch.object(blocks, "_kernel", lambda *_: blocks._cuda),
                         mock.patch.object(by_efficient, "_backward", _efficient_backward),
                         mock.patch.object(torch, "is_autocast_enabled", lambda *_: False),  # which this device has not
                         mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext())):
            stack.enter_context(replaced)
        yield


def rollouts(responses, prompt=300, longest=60):
    """Responses of different lengths below one prompt."""
    ids = lambda count, shift: [3 + (7 * i + shift) % 90 for i in range(count)]
    return [dict(prompt_ids=ids(prompt, 0), response_ids=[3 + i % 90, *ids(longest - 1 - i % 17, 5 * i)]) for i in range(responses)]


class Step:
    """What a step took: `launched` operations, `waits`, `waves`, `peak` bytes beside the weights."""

    def __init__(self, counted, live, executors):
        self.launched, self.waits, self.peak = counted.launched, counted.waits, live.peak
        self.waves = sum(executor.waves for executor in executors)


def step(records, family="Llama", dtype=torch.bfloat16, trunk_state="keep", wave_tokens=4096, loss=None, make=make, **changes):
    """A phased step of records."""
    loss = loss or (lambda wave: wave.logprobs.sum() + wave.entropies.sum())
    with as_on_a_gpu():
        with torch.device("meta"):
            model = make(family, dtype, **changes)
        prepared = Rollouts(records, model.config.vocab_size)
        plan = prepared.plan(model, wave_tokens=wave_tokens, trunk_state=trunk_state, gradients=True)
        with LiveBytes("meta") as live, Counted() as counted:
            executors = hf._shared(model, [(prepared, plan)], loss=loss, temperature=1.0, trunk_state=trunk_state)
            assert [executor.total for executor in executors] == [0.0]
        return Step(counted, live, executors)


def layer_operations(responses, family="Llama"):
    """A whole layer, forward and backward, of a group in one call. Of more than 90 responses some begin with the same token."""
    two, three = (step(rollouts(responses), family, wave_tokens=1 << 20, num_hidden_layers=layers).launched for layers in (2, 3))
    return three - two


def attention_operations(responses, dtype=torch.bfloat16, rule=None, heads=(8, 2), sizes=(64, 64), prompt=100, by_blocks=False):
    """Attention of one layer, forward and backward, over responses of different lengths below one trunk."""
    lengths = [20 + i for i in range(responses)]
    begins = [sum(lengths[:i]) for i in range(responses)]
    with as_on_a_gpu(by_blocks), LiveBytes("meta") as live, Counted() as counted:
        draw = lambda heads, rows, size: torch.empty(1, heads, rows, size, dtype=dtype, device="meta", requires_grad=True)
        trunk = Trunk(prompt)
        trunk.take(0, draw(heads[1], prompt, sizes[0]), draw(heads[1], prompt, sizes[1]))
        trunk.sums(0)
        runs = [(begin, length, begin + length) for begin, length in zip(begins, lengths)]
        phase = attention.Phase([RowSet(0, (trunk,), runs)], prompt + max(lengths))
        rows = [draw(count, sum(lengths), size) for count, size in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))]
        counted.launched, start = 0, live.now
        out = RowAttention.apply(*rows, None, 0.125, phase, 0, rule)
        out.backward(torch.empty_like(out))
        counted.bytes = live.peak - start
    return counted
