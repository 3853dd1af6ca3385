"""`espalier serve` with the real SDK: losses, gradients and steps against a dense computation in float64, order, retries, errors."""

import time

import numpy as np
import pytest
from make_model import VOCABULARY

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import NAME, RANK, ByHand, Dense, dense_loss, draw_group, ready  # noqa: E402

CLOSE = dict(rtol=1e-6, atol=1e-6)  # the wire rounds log-probs and inputs to float32


def test_answers_what_clients_ask_first(service, server):
    models = service.get_server_capabilities().supported_models
    assert [(m.model_name, m.max_context_length) for m in models] == [(NAME, 512), ("tiny/llama", 512)]
    training = ready(service.create_lora_training_client(base_model=NAME, rank=RANK))
    info = training.get_info()
    assert info.model_data.model_name == NAME and info.lora_rank == RANK
    assert server.get("/api/v1/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_losses_and_logprobs_of_the_base_model(service, model_of, loss):
    # B is zero at first: the adapter changes nothing, and log-probs are the base model's.
    training = ready(service.create_lora_training_client(base_model=NAME, rank=RANK, seed=3))
    data = draw_group(5, loss)
    dense = Dense(model_of("qwen3_tied"))
    answer = training.forward_backward(data, loss).result()
    forward = training.forward(data, loss).result()
    expected = [dense.logprobs(datum).detach() for datum in data]
    for got, again, want in zip(answer.loss_fn_outputs, forward.loss_fn_outputs, expected):
        np.testing.assert_allclose(got["logprobs"].to_numpy(), want.numpy(), **CLOSE)
        assert got["logprobs"].data == again["logprobs"].data
    total = sum(dense_loss(loss, datum, want) for datum, want in zip(data, expected)).item()
    assert abs(answer.metrics["loss:sum"] - total) < 1e-10 * abs(total)
    sent = sum(datum.model_input.length for datum in data)
    assert answer.metrics["tokens_computed:sum"] + answer.metrics["tokens_shared:sum"] == sent
    assert answer.metrics["tokens_shared:sum"] >= 2 * 8  # the prompt, but for the row at the fork


def loss_of(training, data):
    return training.forward(data, "cross_entropy").result().metrics["loss:sum"]


SMALL_STEP = dict(learning_rate=1e2, beta1=0.0, beta2=0.0, eps=1e9)  # the change is 1e-7 of the gradient


def test_a_step_follows_the_gradient_of_all_calls_since_the_last(service):
    whole, parts = (ready(service.create_lora_training_client(base_model=NAME, rank=RANK, seed=7)) for _ in range(2))
    data = draw_group(6, "cross_entropy", n=4)
    for training in (whole, parts):  # away from B = 0, where A has no gradient
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    before = loss_of(whole, data)
    assert loss_of(parts, data) == before
    whole.forward_backward(data, "cross_entropy").result()
    for part in (data[:1], data[1:]):
        parts.forward_backward(part, "cross_entropy").result()
    norms = [training.optim_step(tinker.AdamParams(**SMALL_STEP)).result().metrics["grad_norm:mean"] for training in (whole, parts)]
    assert abs(norms[0] - norms[1]) < 1e-10 * norms[0]
    after = [loss_of(training, data) for training in (whole, parts)]
    assert abs(after[0] - after[1]) < 1e-12 * abs(before)
    assert after[0] - before == pytest.approx(-1e-7 * norms[0] ** 2, rel=1e-4)
    # A step without a gradient changes nothing: it was used up.
    whole.optim_step(tinker.AdamParams(**SMALL_STEP)).result()
    assert loss_of(whole, data) == after[0]


# ---- by hand: what the SDK would not send ---------------------------------------------------------------------------------------------


DATA = [([5, 9, 2, 40], {"target_tokens": [9, 2, 40, 3]}), ([5, 9, 2, 41, 6], {"target_tokens": [9, 2, 41, 6, 8]})]


def test_requests_run_in_the_order_of_their_numbers(server):
    early, ordered = ByHand(server), ByHand(server)

    def requests(model):
        return {1: lambda: model.forward_backward(1, DATA[:1]), 2: lambda: model.optim_step(2, learning_rate=1e-2), 3: lambda: model.forward_backward(3, DATA[1:]),
                4: lambda: model.optim_step(4, learning_rate=3e-2), 5: lambda: model.forward_backward(5, DATA, forward_only=True)}

    # No two gradients follow each other, so that none are joined: every bit is that of the order.
    futures = {number: requests(early)[number]()[1]["request_id"] for number in (4, 3, 5, 2, 1)}
    for number, send in requests(ordered).items():
        assert ordered.metrics(send()[1]["request_id"]) == early.metrics(futures[number])


def test_a_retry_is_the_same_request(server):
    once, twice = ByHand(server), ByHand(server)
    for model, repeats in ((once, 1), (twice, 3)):
        futures = {model.forward_backward(1, DATA)[1]["request_id"] for _ in range(repeats)}
        assert len(futures) == 1
        model.metrics(futures.pop())
        futures = {model.optim_step(2, learning_rate=1e-2)[1]["request_id"] for _ in range(repeats)}
        assert len(futures) == 1
        model.metrics(futures.pop())
    futures = [model.forward_backward(3, DATA, forward_only=True)[1]["request_id"] for model in (once, twice)]
    assert once.metrics(futures[0]) == twice.metrics(futures[1])


WRONG = {  # what is wrong -> (data, more arguments, words of the error)
    "no data": ([], {}, ["data", "at least one"]),
    "no tokens": ([([], {"target_tokens": []})], {}, ["datum 0: model_input", "none"]),
    "an id beyond the vocabulary": ([DATA[0], ([1, VOCABULARY], {"target_tokens": [1, 2]})], {}, ["datum 1: model_input", str(VOCABULARY)]),
    "a target beyond the vocabulary": ([([1, 2], {"target_tokens": [1, -1]})], {}, ["datum 0: target_tokens", "-1"]),
    "too long": ([([1] * 513, {"target_tokens": [1] * 513})], {}, ["datum 0: model_input", "512", "513"]),
    "no targets": ([([1, 2], {"weights": [1.0, 1.0]})], {}, ["datum 0", "target_tokens"]),
    "an unknown input": ([([1, 2], {"target_tokens": [1, 2], "mask": [1.0, 1.0]})], {}, ["datum 0", "mask"]),
    "another length": ([([1, 2], {"target_tokens": [1, 2], "weights": [1.0]})], {}, ["datum 0: weights", "2", "1"]),
    "targets that are no whole numbers": ([([1, 2], {"target_tokens": [1.0, 2.0]})], {}, ["datum 0: target_tokens", "int64"]),
    "a weight that is not finite": ([([1, 2], {"target_tokens": [1, 2], "weights": [1.0, float("nan")]})], {}, ["datum 0: weights[1]", "nan"]),
    "an unknown loss": (DATA, {"loss": "best_of_all"}, ["loss_fn", "best_of_all", "cross_entropy"]),
    "stable_reinforce": (DATA, {"loss": "stable_reinforce"}, ["stable_reinforce", "importance_sampling"]),
    "an unknown setting": (DATA, {"config": {"beta": 0.1}}, ["loss_fn_config", "beta"]),
    "no advantages": (DATA, {"loss": "importance_sampling"}, ["datum 0", "logprobs"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_fails_alone_and_takes_its_turn(server, what):
    data, more, words = WRONG[what]
    model = ByHand(server)
    good = model.metrics(model.forward_backward(1, DATA)[1]["request_id"])
    begin = time.monotonic()
    status, promise = model.forward_backward(2, data, **more)
    assert status == 200
    status, answer = server.result(promise["request_id"])
    assert status == 200 and answer["category"] == "user" and time.monotonic() - begin < 1
    for word in words:
        assert word in answer["error"]
    # The gradient is not whole: the next step says so, and the one after begins anew.
    status, refused = server.result(model.optim_step(3, learning_rate=1e-2)[1]["request_id"])
    assert words[0].split(":")[0] in refused["error"] and "no step was taken" in refused["error"]
    assert model.metrics(model.forward_backward(4, DATA)[1]["request_id"]) == good
    model.metrics(model.optim_step(5, learning_rate=1e-2)[1]["request_id"])


@pytest.mark.parametrize("path, body, status", [
    ("/api/v1/create_session", b"{", 400), ("/api/v1/create_session", b"[" * 100_000, 400), ("/api/v1/get_info", {"model_id": "nobody"}, 404),
    ("/api/v1/get_info", {}, 400), ("/api/v1/nothing", {}, 501), ("/nothing", {}, 404), ("/api/v1/healthz", {}, 405),
    ("/api/v1/retrieve_future", {"request_id": "nothing"}, 410), ("/api/v1/create_model", {"session_id": "nobody", "model_seq_id": 0}, 404)])
def test_other_mistakes_get_a_status_and_a_sentence(server, path, body, status):
    got, answer = server.post(path, body)
    assert got == status and len(answer["detail"]) > 10


def test_damaged_protobuf_is_refused(server):
    model = ByHand(server)
    whole = model.message(1, DATA)
    assert model.post_bytes(b"\xff" * 50)[0] == 400
    assert server.post("/api/v1/forward_backward", {"model_id": model.model})[0] == 415
    for end in range(1, len(whole), 7):  # cut anywhere: refused at once, or a future that fails, never a hang
        status, answer = model.post_bytes(whole[:end])
        assert status in (400, 404) or (status == 200 and "request_id" in answer)
    assert model.post_bytes(b"", **{"Content-Encoding": "br"})[0] == 400
    assert server.get("/api/v1/healthz")[0] == 200


def test_sizes_are_bounded_before_and_after_decompression(server):
    zstandard = pytest.importorskip("zstandard")
    model = ByHand(server)
    packed = zstandard.ZstdCompressor().compress(model.message(1, DATA))
    assert model.metrics(model.post_bytes(packed, **{"Content-Encoding": "zstd"})[1]["request_id"])["loss:sum"] > 0
    assert model.post_bytes(packed[:-3], **{"Content-Encoding": "zstd"})[0] == 400
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30) + b"1")
    status, answer = model.post_bytes(bomb, **{"Content-Encoding": "zstd"})
    assert status == 400 and "1.00 GiB" in answer["detail"]


# ---- calls that wait ------------------------------------------------------------------------------------------------------------------

PROMPT = [7, 3, 50, 12, 12, 33, 9, 80, 41, 2, 5, 6]


def answers(seed):
    """Data of one prompt, as a loop sends them in calls of their own."""
    generator = np.random.default_rng(seed)
    out = []
    for length in (3, 5, 2, 4):
        answer = [int(t) for t in generator.integers(0, VOCABULARY, length)]
        tokens = [*PROMPT, *answer]
        out.append((tokens[:-1], {"target_tokens": tokens[1:], "weights": generator.normal(size=len(tokens) - 1)}))
    return out


def test_calls_that_wait_run_as_one_and_share_their_prompts(server):
    data = answers(3)
    apart, whole = ByHand(server), ByHand(server)
    # The first one comes last, and with it all of them may run.
    futures = {n: apart.forward_backward(n, [data[n - 1]])[1]["request_id"] for n in (2, 4, 3, 1)}
    metrics = [apart.metrics(futures[n]) for n in sorted(futures)]
    together = whole.metrics(whole.forward_backward(1, data)[1]["request_id"])
    for name in ("loss:sum", "tokens_computed:sum", "tokens_shared:sum"):
        assert sum(m[name] for m in metrics) == pytest.approx(together[name], rel=1e-12)
    assert together["tokens_shared:sum"] >= 3 * (len(PROMPT) - 1)
    for model, number in ((apart, 5), (whole, 2)):
        model.metrics(model.optim_step(number, learning_rate=1e-2)[1]["request_id"])
    ends = [model.metrics(model.forward_backward(number, data, forward_only=True)[1]["request_id"])["loss:sum"] for model, number in ((apart, 6), (whole, 3))]
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_a_call_that_fails_in_a_joined_run_leaves_the_others_whole(server):
    model, alone = ByHand(server), ByHand(server)
    sent = [([5, 9, 2], {"target_tokens": [9, 2, 40], "logprobs": [-1.0, -2.0, value], "advantages": [1.0, -1.0, 0.5]}) for value in (-2.0, -3e38, -4.0)]
    futures = {n: model.forward_backward(n, [sent[n - 1]], loss="importance_sampling")[1]["request_id"] for n in (3, 2, 1)}
    assert "finite loss" in server.result(futures[2])[1]["error"]
    for number, n in ((1, 1), (2, 3)):
        one = alone.metrics(alone.forward_backward(number, [sent[n - 1]], loss="importance_sampling")[1]["request_id"])
        assert model.metrics(futures[n])["loss:sum"] == one["loss:sum"]
    assert "no step was taken" in server.result(model.optim_step(4, learning_rate=1e-2)[1]["request_id"])[1]["error"]


def test_garbage_on_the_socket_ends_one_connection(server):
    import random
    import socket
    draw = random.Random(3)
    host, port = server.url[len("http://"):].split(":")
    good = b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    for round in range(60):
        sent = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            sent[draw.randrange(len(sent))] = draw.randrange(256)
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(bytes(sent) if round % 3 else draw.randbytes(200))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert server.get("/api/v1/healthz")[0] == 200


def test_pages(server):
    status, page = server.get("/")
    assert status == 200 and b"<title>espalier serve</title>" in page
    status, text = server.get("/metrics")
    numbers = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    assert status == 200 and float(numbers["espalier_rows_shared_total"]) > 0 and float(numbers["espalier_steps_total"]) > 0
    assert all(line.startswith(("# HELP espalier_", "# TYPE espalier_", "espalier_")) for line in text.decode().splitlines())
    status, facts = server.get("/api/v1/espalier/status")
    assert status == 200 and facts["models"] == [NAME, "tiny/llama"] and any(run["loss"] for run in facts["runs"])
