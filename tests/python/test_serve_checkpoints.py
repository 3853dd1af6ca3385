"""Checkpoints of `espalier serve` that are damaged: whoever asks for one hears of it at once, with the file's name, and nothing else changes."""

import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import ByHand  # noqa: E402

DATA = [([5, 9, 2, 40], {"target_tokens": [9, 2, 40, 3]})]
ADAPTER, MOMENTS = "adapter_model.safetensors", "espalier/state.safetensors"
DAMAGE = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-8]),
    "garbled": lambda file: file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:]),
    "gone": lambda file: file.unlink(),
    "of another shape": lambda file: file.write_bytes(file.read_bytes().replace(b"q_proj.lora_A", b"k_proj.lora_Z")),
}


@pytest.fixture
def saved(server):
    """A model with its fourth request next, and a checkpoint of it: (model, path, folder)."""
    model = ByHand(server)
    model.metrics(model.forward_backward(1, DATA)[1]["request_id"])
    model.metrics(model.optim_step(2, learning_rate=1e-2)[1]["request_id"])
    path = server.result(model.save(3, "here")[1]["request_id"])[1]["path"]
    return model, path, server.state / "runs" / path.removeprefix("tinker://")


def sampler_of(model, path):
    return model.server.post("/api/v1/create_sampling_session", {"session_id": model.session, "sampling_session_seq_id": 7, "model_path": path})


def model_of(model, path, optimizer):
    return model.server.post("/api/v1/load_weights", {"session_id": model.session, "model_seq_id": 1, "path": path, "optimizer": optimizer})


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_adapter_is_found_when_it_is_asked_for(server, saved, damage):
    model, path, folder = saved
    DAMAGE[damage](folder / ADAPTER)
    before = model.metrics(model.forward_backward(4, DATA, forward_only=True)[1]["request_id"])
    for status, answer in (sampler_of(model, path), model_of(model, path, False), model_of(model, path, True),
                           server.post("/api/v1/asample", {"model_path": path, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 2}})):
        assert status == 400 and ADAPTER in answer["detail"], answer
    # As clients before tinker 0.38 ask: the request keeps its place, and the model stays what it was.
    loaded = server.post("/api/v1/load_weights", {"model_id": model.model, "seq_id": 5, "path": path, "optimizer": True})[1]
    assert ADAPTER in server.result(loaded["request_id"])[1]["error"]
    assert model.metrics(model.forward_backward(6, DATA, forward_only=True)[1]["request_id"]) == before


@pytest.mark.parametrize("damage", ["cut", "garbled", "gone"])
def test_damaged_moments_are_found_where_they_are_asked_for(server, saved, damage):
    model, path, folder = saved
    DAMAGE[damage](folder / MOMENTS)
    status, answer = model_of(model, path, True)
    assert status == 400 and "state.safetensors" in answer["detail"], answer
    assert sampler_of(model, path)[0] == 200
