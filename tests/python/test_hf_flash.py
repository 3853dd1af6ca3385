"""Attention on a GPU (rows_by_flash.py): the rows, runs and merges in float64 with the kernels' documented meaning written plainly, and on
tensors without memory the number of operations, whatever the number of responses, and that the host waits for none of them."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, worst

hf = pytest.importorskip("espalier.hf")
from espalier.hf import attention, blocks, rows_by_flash, rows_by_kernel  # noqa: E402


def sequences(q, k, ends_q, ends_k):
    """Rows of the queries and of the keys of every sequence."""
    if ends_q is None:
        return [(slice(0, len(q)), slice(0, len(k)))]
    ends_q, ends_k = ends_q.tolist(), ends_k.tolist()
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(zip(ends_q, ends_q[1:]), zip(ends_k, ends_k[1:]))]


def plain(q, k, v, causal, scale):
    """One sequence: out [T, H, D], lse [H, T]; J heads of keys and values for H of queries."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def plain_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, causal, scale):
    batched = ends_q is None
    if batched:
        q, k, v = q[0], k[0], v[0]
    parts = [plain(q[rows], k[keys], v[keys], causal, scale) for rows, keys in sequences(q, k, ends_q, ends_k)]
    assert (longest_q, longest_k) == tuple(max(s.stop - s.start for s in side) for side in zip(*sequences(q, k, ends_q, ends_k)))
    out, lse = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)
    return (out[None], lse[None]) if batched else (out, lse)


def plain_backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, causal, scale):
    """By the formula at the top of blocks.py: out and lse are those of the merged softmax."""
    batched = ends_q is None
    if batched:
        go, q, k, v, out, lse = (x[0] for x in (go, q, k, v, out, lse))
    assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
    dq, dk, dv, shared = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1] // k.shape[1]
    for rows, keys in sequences(q, k, ends_q, ends_k):
        kk, vv = (x[keys].repeat_interleave(shared, 1) for x in (k, v))
        p = (torch.einsum("thd,shd->hts", q[rows], kk) * scale - lse[:, rows, None]).exp()
        if causal:
            p = p.tril()
        ds = p * (torch.einsum("thd,shd->hts", go[rows], vv) - (go[rows] * out[rows]).sum(-1).T[..., None]) * scale
        dq[rows] += torch.einsum("hts,shd->thd", ds, kk)
        dk[keys] += torch.einsum("hts,thd->shd", ds, q[rows]).unflatten(1, (-1, shared)).sum(2)
        dv[keys] += torch.einsum("hts,thd->shd", p, go[rows]).unflatten(1, (-1, shared)).sum(2)
    return [x[None] for x in (dq, dk, dv)] if batched else [dq, dk, dv]


@pytest.fixture
def calls(monkeypatch):
    """Runs attention as on a GPU, in plain products; the calls of its kernels."""
    seen = []

    def counted(plain):
        return lambda *operands: seen.append(plain.__name__) or plain(*operands)

    monkeypatch.setattr(rows_by_kernel, "serves", lambda q, v=None: False)
    monkeypatch.setattr(rows_by_flash, "serves", lambda q, v=None: True)
    monkeypatch.setattr(rows_by_flash, "_forward", counted(plain_forward))
    monkeypatch.setattr(rows_by_flash, "_backward", counted(plain_backward))
    return seen


@pytest.mark.parametrize("family,trunk_state,wave_tokens", [("Llama", "keep", 7), ("Qwen3", "recompute", 40), ("Qwen3Moe", "keep", 4096)])
def test_the_gradient_is_that_of_the_dense_step(family, trunk_state, wave_tokens, calls):
    model, rollouts = make(family), batch()
    loss = loss_of(rollouts)
    with all_float64():
        dense_step(model, rollouts, loss)
        wanted = gradients(model)
        hf.phased_step(model, rollouts, loss, schedule="shared", wave_tokens=wave_tokens, trunk_state=trunk_state)
        assert worst(gradients(model), wanted)[0] <= 1e-10
    assert {"plain_forward", "plain_backward"} == set(calls)


def test_a_merge_left_out_is_noticed(calls, monkeypatch):
    """By the comparison with the model's own logits that comes before a model's first step."""
    rollouts = batch()
    monkeypatch.setattr(rows_by_flash, "_merge", lambda *operands: None)
    with pytest.raises(hf.Unsupported, match="logits of shared rows that differ"):
        hf.phased_step(make("Qwen3"), rollouts, loss_of(rollouts), schedule="shared")


class Counted(TorchDispatchMode):
    """Operations that launch work on a device, and those that the host would wait for."""
    FREE = {"view", "_unsafe_view", "reshape", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias", "empty",
            "empty_like", "new_empty", "permute", "unbind", "split", "as_strided", "_reshape_alias", "empty_strided", "new_empty_strided"}

    def __init__(self):
        super().__init__()
        self.launched, self.waits = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        self.launched += name not in self.FREE
        copied = name in ("_to_copy", "copy_") and not kwargs.get("non_blocking", args[2:] == (True,))
        out = function(*args, **kwargs)
        devices = {x.device.type for x in (*args, out) if isinstance(x, torch.Tensor)}
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal") or copied and len(devices) > 1:
            self.waits.append(name)
        return out


def operations(responses):
    """Attention of one layer, forward and backward, over responses of different lengths below one trunk, on a device without memory."""
    lengths = [20 + i for i in range(responses)]
    begins = [sum(lengths[:i]) for i in range(responses)]
    draw = lambda heads, rows: torch.empty(1, heads, rows, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)  # noqa: E731
    trunk = attention.Trunk(100)
    trunk.take(0, draw(2, 100), draw(2, 100))
    trunk.sums(0)
    phase = attention.Phase([attention.RowSet(0, (trunk,), [(begin, length, begin + length) for begin, length in zip(begins, lengths)])], 200)
    rows = [draw(heads, sum(lengths)) for heads in (8, 2, 2)]
    with Counted() as counted:
        out = attention._RowAttention.apply(*rows, None, 0.125, phase, 0)
        out.backward(torch.empty_like(out))
    return counted


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(rows_by_kernel, "serves", lambda q, v=None: False)
    monkeypatch.setattr(rows_by_flash, "serves", lambda q, v=None: True)
    monkeypatch.setattr(blocks, "_kernel", lambda *operands: blocks._cuda)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which a device without memory has not
    monkeypatch.setattr(torch, "autocast", lambda *device, **how: contextlib.nullcontext())


def test_attention_takes_as_many_operations_whatever_the_number_of_responses(as_on_a_gpu):
    """Two calls of a kernel each way, about ten operations that merge their results, and as many around gradients and their sums."""
    one, *more = (operations(responses) for responses in (1, 8, 32))
    assert [counted.launched for counted in more] == [one.launched] * 2
    assert one.launched <= 30
    assert not any(counted.waits for counted in (one, *more))


def test_block_by_block_it_takes_more(as_on_a_gpu, monkeypatch):
    """The counter counts: a block for each length of a run."""
    monkeypatch.setattr(rows_by_flash, "serves", lambda q, v=None: False)
    assert operations(32).launched > 10 * operations(1).launched


def test_a_copy_that_the_host_waits_for_is_noticed():
    with Counted() as counted:
        torch.ones(2).to("meta", non_blocking=True)
        assert not counted.waits
        torch.ones(2).to("meta")
    assert counted.waits == ["_to_copy"]
