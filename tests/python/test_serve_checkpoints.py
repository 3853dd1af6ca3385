"""Checkpoints of `espalier serve`: a damaged one is found at once, by its file's name, and nothing else changes; lists of what there is, and what there is not."""

import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import RANK, ByHand  # noqa: E402

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


def test_rest_lists_what_there_is(server, service, saved):
    model, path, _ = saved
    rest = service.create_rest_client()
    first = rest.list_training_runs(limit=1).result()
    assert len(first.training_runs) == 1 < first.cursor.total_count
    runs = {run.training_run_id: run for run in rest.list_training_runs(limit=100).result().training_runs}
    assert runs[model.model].lora_rank == rest.get_training_run(model.model).result().lora_rank == RANK
    assert runs[model.model].last_checkpoint.tinker_path == path
    assert [one.tinker_path for one in rest.list_checkpoints(model.model).result().checkpoints] == [path]
    assert model.session in rest.list_sessions(limit=100).result().sessions
    assert rest.get_session(model.session).result().training_run_ids == [model.model]
    sampler = sampler_of(model, path)[1]["sampling_session_id"]
    assert server.get(f"/api/v1/samplers/{sampler}")[1]["model_path"] == path
    assert sampler in rest.get_session(model.session).result().sampler_ids
    for query in ("limit=x", "offset=-1"):
        assert server.get(f"/api/v1/training_runs?{query}")[0] == 400
    assert server.get("/api/v1/training_runs/nobody")[0] == 404
    least = server.post(f"/api/v1/training_runs/{path.removeprefix('tinker://').split('/')[0]}/checkpoints/weights/here/ttl", {"ttl_seconds": 5}, method="PUT")
    assert least[0] == 400 and "3600" in least[1]["detail"]


@pytest.mark.parametrize("path", ["auth/token", "create_custom_loss", "copy_weights", "sessions/search", "billing/usage/events", "audit"])
def test_what_the_server_does_not_have_is_said_in_a_sentence(server, path):
    status, answer = server.post(f"/api/v1/{path}", {})
    assert status == 501 and "docs/serve.md" in answer["detail"] and path in answer["detail"]
