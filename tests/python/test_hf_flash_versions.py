"""`torch.nn.attention.activate_flash_attention_impl("FA3" or "FA4")`: torch's own wrappers of these kernels, registered for tensors of a CPU and with
plain products in the kernels' place, are what a step's attention then calls, with arguments that they take."""

import types

import pytest
import torch

import hf_layers
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, worst
from test_hf_flash import as_on_a_gpu, plain_backward, plain_forward

hf = pytest.importorskip("espalier.hf")
_fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="this torch has one FlashAttention")
_fa4 = pytest.importorskip("torch.nn.attention._fa4", reason="this torch has no FlashAttention 4")
from torch.nn import attention as torch_s  # noqa: E402
from torch.nn.attention import _registry  # noqa: E402

from espalier.rows import by_blocks, by_flash, by_gather  # noqa: E402
from espalier.rows.visibility import Rule  # noqa: E402

_OWN_FORWARD, _OWN_BACKWARD = by_flash._forward, by_flash._backward


def longest(ends):
    return None if ends is None else int(ends.diff().max())


def third(seen):
    """FlashAttention 3's two operations, by the places of their arguments in torch 2.11's calls."""
    def forward(q, k, v, *rest):
        seen.append("FA3 forward")
        ends_q, ends_k, longest_q, longest_k, scale, causal, left, right = (rest[i] for i in (4, 5, 9, 10, 20, 21, 22, 23))
        out, lse = plain_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, causal, scale, left, right)
        return out, lse, None, None

    def backward(go, q, k, v, out, lse, dq, dk, dv, ends_q, ends_k, _, __, longest_q, longest_k, scale, causal, left, right, *___):
        seen.append("FA3 backward")
        for into, grad in zip((dq, dk, dv), plain_backward(go, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, causal, scale, left, right)):
            into.copy_(grad)

    return forward, backward


def fourth(seen):
    def without_more(newer):
        """Arguments that torch 2.13 has and 2.11 has not: the longest sequences, and what a step does not ask for."""
        assert all(value is None or (name, value) == ("num_splits", 1) for name, value in newer.items() if not name.startswith("max_seqlen"))

    def forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, return_lse, cu_seqlens_q, cu_seqlens_k, seqused_k, **newer):
        seen.append("FA4 forward")
        without_more(newer)
        assert window_size_left is window_size_right is seqused_k is None and return_lse
        lengths = (longest(cu_seqlens_q), longest(cu_seqlens_k)) if cu_seqlens_q is not None else (q.shape[1], k.shape[1])
        return plain_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, causal, softmax_scale)

    def backward(q, k, v, out, go, lse, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, deterministic, **newer):
        seen.append("FA4 backward")
        without_more(newer)
        lengths = (longest(cu_seqlens_q), longest(cu_seqlens_k))
        return plain_backward(go, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *lengths, causal, softmax_scale)

    return types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


class Handle:
    def __init__(self, forward, backward):
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", forward, "CPU")
        self.library.impl("_flash_attention_backward", backward, "CPU")

    def remove(self):
        self.library._destroy()


@pytest.fixture
def activated(monkeypatch):
    """activated(name) -> the calls of the kernels, from then on."""
    seen = []
    as_on_a_gpu(monkeypatch, "flash")
    monkeypatch.setattr(by_flash, "_forward", _OWN_FORWARD)
    monkeypatch.setattr(by_flash, "_backward", _OWN_BACKWARD)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", third(seen)[0])
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", third(seen)[1])
    for module in (_fa3, _fa4):  # what wants a GPU and its types, under the names that this torch has
        for name in [name for name in vars(module) if name.endswith("_support_error")]:
            monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(_fa4, "_get_device_major", lambda device: 9, raising=False)
    monkeypatch.setattr(_fa4, "_fa4_import_module", lambda path: fourth(seen))
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", "plain products")
    kernels = {"FA3": (_fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl),
               "FA4": (_fa4._fa4_flash_attention_forward_impl, _fa4._fa4_flash_attention_backward_impl)}

    def activate(name):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda: Handle(*kernels[name]))
        torch_s.activate_flash_attention_impl(name)
        return seen

    yield activate
    torch_s.restore_flash_attention_impl(_raise_warn=False)


def test_this_torch_offers_both():
    assert {"FA3", "FA4"} <= set(torch_s.list_flash_attention_impls()) and torch_s.current_flash_attention_impl() is None


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_a_step_s_attention_is_the_activated_one(name, activated):
    seen = activated(name)
    model, rollouts = make("Qwen3"), batch()
    loss = loss_of(rollouts)
    with all_float64():
        dense_step(model, rollouts, loss)
        wanted = gradients(model)
        hf.phased_step(model, rollouts, loss, schedule="shared", wave_tokens=40)
    assert worst(gradients(model), wanted)[0] <= 1e-10
    assert set(seen) == {f"{name} forward", f"{name} backward"}


def test_windows_go_through_flash_attention_3(activated):
    seen = activated("FA3")
    assert hf_layers.errors("Mistral", "trees of depth 3")[0] <= 1e-10
    assert set(seen) == {"FA3 forward", "FA3 backward"}


def test_windows_run_block_by_block_beside_flash_attention_4(activated, monkeypatch):
    """Its backward refuses a window; chunks have none."""
    seen, blocks = activated("FA4"), []
    plain = by_blocks.backward
    monkeypatch.setattr(by_blocks, "backward", lambda *given: blocks.append(1) or plain(*given))
    q = torch.empty(1, 4, 3, 16)
    assert not by_gather.serves(q, q, Rule(window=8)) and by_gather.serves(q, q, Rule(chunk=8))
    assert hf_layers.errors("Gemma 3", "phased")[0] <= 1e-10
    assert blocks and set(seen) == {"FA4 forward", "FA4 backward"}


def test_without_an_activated_one_there_is_none_for_a_cpu(activated):
    """The registrations above are what answers."""
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(NotImplementedError):
        _OWN_FORWARD(q, q, q, None, None, 4, 4, False, 1.0)


@pytest.fixture
def small(monkeypatch):
    from espalier.hf import flash_choice
    for name, value in dict(RUNS=2, RUN=5, PROMPT=7).items():
        monkeypatch.setattr(flash_choice, name, value)
    for name, own, plainly in (("_forward", _OWN_FORWARD, plain_forward), ("_backward", _OWN_BACKWARD, plain_backward)):  # torch's own has none for a CPU
        monkeypatch.setattr(by_flash, name, lambda *operands, own=own, plainly=plainly, **window: (
            plainly if torch_s.current_flash_attention_impl() is None else own)(*operands, **window))
    return flash_choice


def measured(seen, seconds):
    """A clock that knows which kernels a call ran."""
    def seconds_of(call):
        seen.clear()
        call()
        return seconds[seen[0].split()[0] if seen else "torch"]
    return seconds_of


def registered(activated, monkeypatch, **without):
    """Both versions can be activated; `without`: the errors of those that cannot. Returns the calls of the kernels."""
    seen = activated("FA4")
    for name in ("FA3", "FA4"):
        if name in without:
            def fail(name=name):
                raise without[name]
            monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, fail)
        else:
            activated(name)
        torch_s.restore_flash_attention_impl(_raise_warn=False)
    return seen


@pytest.mark.parametrize("fastest, seconds", [("FA3", dict(torch=3, FA3=1, FA4=2)), ("FA4", dict(torch=3, FA3=2, FA4=1)),
                                              ("torch", dict(torch=1, FA3=2, FA4=3))])
def test_the_fastest_version_is_activated(fastest, seconds, activated, small, monkeypatch):
    seen = registered(activated, monkeypatch)
    found = small.choose(make("Qwen3"), seconds_of=measured(seen, seconds))
    assert found.name == fastest and found.seconds == seconds and not found.refused
    assert torch_s.current_flash_attention_impl() == (None if fastest == "torch" else fastest)


def test_versions_that_are_missing_or_wrong_are_refused_with_the_reason(activated, small, monkeypatch):
    seen = registered(activated, monkeypatch, FA4=ModuleNotFoundError("No module named 'flash_attn.cute'"))
    right = by_flash._forward

    def wrong(*arguments, **more):
        out, lse = right(*arguments, **more)
        return (1.1 * out if torch_s.current_flash_attention_impl() == "FA3" else out), lse

    monkeypatch.setattr(by_flash, "_forward", wrong)
    found = small.choose(make("Qwen3"), seconds_of=measured(seen, dict(torch=3, FA3=1, FA4=1)))
    assert found.name == "torch" and set(found.seconds) == {"torch"}
    assert found.refused["FA4"] == "ModuleNotFoundError: No module named 'flash_attn.cute'"
    assert found.refused["FA3"].startswith("out differs from torch's own by 1.0e-01")
    assert torch_s.current_flash_attention_impl() is None


def test_processors_have_nothing_to_choose():
    found = hf.choose_flash_attention(make("Qwen3"))
    assert found.name == "torch" and not found.seconds
