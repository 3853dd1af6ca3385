"""Bytes that a step holds: what trunk_state saves, counted on a CPU and on tensors without memory, and the estimate before the first step."""

import types

import pytest
import torch

from hf_counts import Counted, as_on_a_gpu, rollouts, step
from hf_models import adapted, all_float64, batch, dense_step, gradients, loss_of, make, shared_step, worst

hf = pytest.importorskip("espalier.hf")
from espalier.errors import Error  # noqa: E402
from espalier.hf import memory_estimate, probe, ranks, trunk_state as states  # noqa: E402
from espalier.hf.live_bytes import LiveBytes  # noqa: E402

DEEP = dict(num_hidden_layers=8, max_position_embeddings=4096)


def peak(model, records, **how):
    """Bytes beside weights that a step on a CPU has at most; gradients included."""
    model.zero_grad(set_to_none=True)
    with LiveBytes("cpu") as live:
        shared_step(model, records, lambda wave: wave.logprobs.sum(), **how)
    return live.peak


# ---- the counter ----

def test_bytes_of_tensors_that_exist_are_counted():
    given = torch.ones(1000)
    with LiveBytes("cpu") as live:
        a = given * 2
        b = a[:10].clone()
        given.add_(1)
        assert live.now == 4040
        del a
        assert live.now == 40 and live.peak == 4040
        c = b.view(2, 5)
        del b
        assert live.now == 40
        del c
    assert live.now == 0


# ---- recompute ----

@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_recomputed_layer_by_layer_a_trunk_takes_less(family):
    """Below a trunk of 999 rows waves are small. One of eight layers exists at a time, with as many bytes of gradients at most, and of the others
    their inputs, keys and values, which are less than a quarter of what a layer saves: 1/8 + 1/8 + 1/4."""
    model, records = make(family, torch.float32, **DEEP), rollouts(2, prompt=1000, longest=20)
    kept, recomputed = (peak(model, records, trunk_state=state, wave_tokens=1000) for state in ("keep", "recompute"))
    assert recomputed <= kept / 2


def test_run_again_whole_it_takes_as_much(monkeypatch):
    """The counter counts: what "recompute" was without checkpoints."""
    model, records = make("Llama", torch.float32, **DEEP), rollouts(2, prompt=1000, longest=20)
    monkeypatch.setattr(states, "by_layers", lambda model: False)
    kept, again = (peak(model, records, trunk_state=state, wave_tokens=1000) for state in ("keep", "recompute"))
    assert again >= .9 * kept


def test_on_a_gpu_it_takes_less_too():
    records = rollouts(4, prompt=1000, longest=20)
    kept, recomputed, offloaded = (step(records, trunk_state=state, wave_tokens=1000, **DEEP).peak for state in ("keep", "recompute", "offload"))
    assert recomputed <= kept / 2 and offloaded <= kept / 2


@pytest.mark.parametrize("how", ["as it is", "LoRA", "windows"])
def test_its_gradients_are_those_of_the_dense_step(how, monkeypatch):
    model = adapted("Qwen3") if how == "LoRA" else make("Mistral", sliding_window=8) if how == "windows" else make("Qwen3")
    records, seen = batch(), []
    contexts = states._contexts
    monkeypatch.setattr(states, "_contexts", lambda: seen.append(1) or contexts())
    loss = loss_of(records)
    with all_float64():
        dense_step(model, records, loss)
        wanted = gradients(model)
        shared_step(model, records, loss, wave_tokens=40, trunk_state="recompute")
    assert worst(gradients(model), wanted)[0] <= 1e-10
    assert len(seen) >= 3  # each layer of at least one trunk


def test_layers_are_as_they_were_afterwards():
    model, records = make("Qwen3"), batch()
    shared_step(model, records, loss_of(records), wave_tokens=40, trunk_state="recompute")
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_cannot_run_layer_by_layer_runs_again_whole():
    model = make("Qwen3")
    assert states.by_layers(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert not states.by_layers(model)


# ---- offload ----

@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_offloaded_trunks_give_the_gradients_of_kept_ones(family, monkeypatch):
    """On a CPU, where the copies are copies, too: bit for bit."""
    monkeypatch.setattr(states, "check_offload", lambda model: None)
    offloads, plain = [], states.Offload.__init__
    monkeypatch.setattr(states.Offload, "__init__", lambda self, *given: offloads.append(self) or plain(self, *given))
    model, records = make(family), batch()
    monkeypatch.setattr(states, "_SMALL", 0)
    found = [(shared_step(model, records, loss_of(records), wave_tokens=40, trunk_state=state), gradients(model))[1] for state in ("keep", "offload")]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert sum(offload.bytes for offload in offloads) > 0


def test_a_copy_that_is_another_tensor_s_is_noticed(monkeypatch):
    monkeypatch.setattr(states, "check_offload", lambda model: None)
    monkeypatch.setattr(states, "_SMALL", 0)
    model, records = make("Qwen3"), batch()
    wanted = (shared_step(model, records, loss_of(records), wave_tokens=40), gradients(model))[1]
    on_device = states._Copy.on_device
    monkeypatch.setattr(states._Copy, "on_device", lambda copy: on_device(copy).flip(0))
    shared_step(model, records, loss_of(records), wave_tokens=40, trunk_state="offload")
    assert worst(gradients(model), wanted)[0] > 1e-3


def test_copies_to_the_host_are_queued(monkeypatch):
    """Weights, and keys and values that waves read anyway, stay; what several operations save is one copy."""
    buffers, copies, buffer = [], [], states._host_buffer
    monkeypatch.setattr(states, "_host_buffer", lambda x: buffers.append(x.shape) or buffer(x))
    plain = states.Offload._pack

    def pack(self, x):
        packed = plain(self, x)
        if isinstance(packed, states._Copy):
            copies.append(packed)
        return packed

    monkeypatch.setattr(states.Offload, "_pack", pack)
    found = step(rollouts(4), trunk_state="offload", wave_tokens=64)
    assert found.waits == ["_to_copy"]
    assert len({id(copy) for copy in copies}) == len(buffers) < len(copies)


def test_a_buffer_of_the_host_is_pinned_where_there_is_a_gpu(monkeypatch):
    made = []
    cuda = types.SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(states, "torch", types.SimpleNamespace(empty=lambda shape, **how: made.append(how), cuda=cuda))
    for device in ("meta", "cpu"):
        states._host_buffer(torch.zeros(3, device=device, dtype=torch.bfloat16))
    assert [(how["device"], how["dtype"], how["pin_memory"]) for how in made] == [("cpu", torch.bfloat16, True), ("cpu", torch.bfloat16, False)]


def test_offload_is_refused_where_there_is_no_other_memory():
    model, records = make("Qwen3"), batch()
    with pytest.raises(Error, match="trunk_state='recompute' saves memory"):
        hf.phased_step(model, records, loss_of(records), trunk_state="offload")


# ---- the estimate ----

@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
@pytest.mark.parametrize("family,changes", [
    ("Llama", dict(num_hidden_layers=4)), ("Qwen3", dict(num_hidden_layers=2, vocab_size=3001)), ("Gemma", dict(tie_word_embeddings=True)),
    ("Qwen3Moe", dict(num_hidden_layers=2))])
def test_the_estimate_is_within_a_tenth_of_the_bytes_counted(family, changes, trunk_state):
    model = make(family, torch.float32, max_position_embeddings=4096, **changes)
    records = rollouts(6, prompt=700, longest=90)
    expected = hf.estimate(model, records, wave_tokens=750)
    assert not any(p.grad is not None for p in model.parameters())
    counted = peak(model, records, trunk_state=trunk_state, wave_tokens=750)
    assert expected.trunk_rows == 699 and 400 < expected.wave_rows <= 750
    assert abs(expected.step[trunk_state] - counted) <= .1 * counted
    assert expected.weights == sum(p.numel() * 4 for p in model.parameters()) + sum(b.numel() * b.element_size() for b in model.buffers())


def test_the_estimate_of_an_adapter_has_no_gradients_of_the_base():
    model = adapted("Qwen3").float()
    records = rollouts(6, longest=90)
    expected, counted = hf.estimate(model, records, wave_tokens=750), peak(model, records, wave_tokens=750)
    assert abs(expected.step["keep"] - counted) <= .1 * counted


def test_gradients_are_as_they_were():
    model, records = make("Qwen3"), batch()
    shared_step(model, records, loss_of(records))
    before = [p.grad.clone() for p in model.parameters()]
    hf.estimate(model, records)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before))


def test_a_step_that_will_not_fit_is_noted_with_what_fits(monkeypatch, caplog):
    model, records = make("Llama", torch.float32, **DEEP), rollouts(4, prompt=1000, longest=20)
    sizes = hf.estimate(model, records, wave_tokens=1000).step
    monkeypatch.setattr(ranks, "device_of", lambda model: torch.device("cpu"))
    monkeypatch.setattr(memory_estimate, "_notes", lambda model: True)
    for free, text in ((sizes["keep"] + 1, None), (sizes["keep"] - 1, "trunk_state='recompute' fits"), (1000, "smaller wave_tokens than ")):
        memory_estimate._noted.clear()
        monkeypatch.setattr(memory_estimate, "_free", lambda device: free)
        caplog.clear()
        with caplog.at_level("WARNING", "espalier"):
            shared_step(model, records, lambda wave: wave.logprobs.sum(), wave_tokens=1000)
            shared_step(model, records, lambda wave: wave.logprobs.sum(), wave_tokens=1000)
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == (text is not None) and all(text in message for message in messages), (free, messages)


def test_a_step_does_not_depend_on_its_estimate(monkeypatch, caplog):
    model, records = make("Qwen3"), batch()
    monkeypatch.setattr(memory_estimate, "_notes", lambda model: True)
    monkeypatch.setattr(memory_estimate, "_timeline", lambda *given: {}["no such model"])
    with caplog.at_level("WARNING", "espalier"):
        assert shared_step(model, records, loss_of(records)).rows
    assert "could not be estimated: KeyError" in caplog.text


@pytest.mark.parametrize("family,changes", [("Llama", {}), ("Mistral", dict(sliding_window=64))])
def test_the_estimate_of_a_gpu_s_operations(family, changes, monkeypatch):
    """Within a tenth of what a step on tensors without memory counts."""
    monkeypatch.setattr(probe, "quiet", lambda model: __import__("contextlib").nullcontext())
    monkeypatch.setattr(hf, "check", lambda *given, **how: None)
    monkeypatch.setattr(hf.arguments, "model", lambda given: None)
    records = rollouts(16, prompt=900, longest=90)
    for state in ("keep", "recompute", "offload"):
        counted = step(records, family, trunk_state=state, wave_tokens=1000, loss=lambda wave: wave.logprobs.sum(), **changes).peak
        with as_on_a_gpu():
            with torch.device("meta"):
                model = make(family, torch.bfloat16, **changes)
            with Counted():
                expected = hf.estimate(model, records, wave_tokens=1000).step[state]
        assert abs(expected - counted) <= .1 * counted, state
