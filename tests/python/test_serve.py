"""`espalier serve` with the real SDK: losses, gradients and steps against a dense computation in float64, order, retries, errors."""

import os
import time

import numpy as np
import pytest
import torch

import oracle
from make_model import VOCABULARY
from serve_process import Server, without_proxies

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
peft = pytest.importorskip("peft")

NAME = "tiny/qwen3"
RANK, ALPHA = 4, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
CLOSE = dict(rtol=1e-6, atol=1e-6)  # the wire rounds log-probs and inputs to float32


@pytest.fixture(scope="module")
def server(program, model_of):
    without_proxies()
    os.environ["TINKER_API_KEY"] = "tml-local"
    made = Server(program, {NAME: model_of("qwen3_tied"), "tiny/llama": model_of("llama_untied")}, "--dtype", "float64")
    yield made
    made.end()


@pytest.fixture(scope="module")
def service(server):
    return tinker.ServiceClient(base_url=server.url)


def draw_datum(generator, prompt, length, loss):
    """One datum as recipes send it: 0 as target on the prompt's positions."""
    answer = generator.integers(0, VOCABULARY, length)
    tokens, before = [*prompt, *answer[:-1]], len(prompt) - 1
    inputs = {"target_tokens": np.array([0] * before + list(answer), np.int64)}
    if loss == "cross_entropy":
        inputs["weights"] = np.concatenate([np.zeros(before), generator.normal(size=length)]).astype(np.float32)
    else:
        inputs["logprobs"] = np.concatenate([np.zeros(before), -4.5 + generator.normal(size=length)]).astype(np.float32)
        inputs["advantages"] = np.concatenate([np.zeros(before), generator.normal(size=length)]).astype(np.float32)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([int(t) for t in tokens]), loss_fn_inputs=inputs)


def draw_group(seed, loss, n=3):
    generator = np.random.default_rng(seed)
    prompt = [int(t) for t in generator.integers(0, VOCABULARY, 9)]
    return [draw_datum(generator, prompt, int(generator.integers(3, 8)), loss) for _ in range(n)]


class Dense:
    """The same adapter on transformers' model in float64, one datum a forward."""

    def __init__(self, folder, weights=None):
        self.base = oracle.load_model(folder, torch.float64)
        torch.manual_seed(0)
        self.model = peft.get_peft_model(self.base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS), autocast_adapter_dtype=False).double()

    def parameters(self):
        return {name.replace(".default.", "."): p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, datum):
        tokens = torch.tensor([list(datum.model_input.to_ints())])
        rows = torch.log_softmax(self.model(input_ids=tokens, use_cache=False).logits[0], -1)
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        return rows.gather(1, targets.reshape(len(rows), -1)).reshape(targets.shape)


def series(datum, name):
    return datum.loss_fn_inputs[name].to_torch().double()


def dense_loss(name, datum, logprobs):
    if name == "cross_entropy":
        return -(series(datum, "weights") * logprobs).sum()
    return -(torch.exp(logprobs - series(datum, "logprobs")) * series(datum, "advantages")).sum()


def test_answers_what_clients_ask_first(service, server):
    models = service.get_server_capabilities().supported_models
    assert [(m.model_name, m.max_context_length) for m in models] == [(NAME, 512), ("tiny/llama", 512)]
    training = service.create_lora_training_client(base_model=NAME, rank=RANK).result()
    info = training.get_info()
    assert info.model_data.model_name == NAME and info.lora_rank == RANK
    assert server.get("/api/v1/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_losses_and_logprobs_of_the_base_model(service, model_of, loss):
    # B is zero at first: the adapter changes nothing, and log-probs are the base model's.
    training = service.create_lora_training_client(base_model=NAME, rank=RANK, seed=3).result()
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
    whole, parts = (service.create_lora_training_client(base_model=NAME, rank=RANK, seed=7).result() for _ in range(2))
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


class ByHand:
    """A session and a model of its own, and requests as bytes."""

    def __init__(self, server, rank=RANK):
        self.server = server
        self.session = server.post("/api/v1/create_session", {"tags": [], "sdk_version": "by hand"})[1]["session_id"]
        made = server.post("/api/v1/create_model", {"session_id": self.session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": rank, "seed": 1}})[1]
        self.model = made["model_id"]
        assert server.result(made["request_id"])[1]["model_id"] == self.model

    def message(self, number, data, loss="cross_entropy", forward_only=False, config=()):
        from tinker.proto import tinker_public_pb2 as pb
        message = pb.ForwardBackwardRequest(model_id=self.model, seq_id=number, loss_fn=loss, forward_only=forward_only)
        for name, value in dict(config).items():
            message.loss_fn_config[name] = value
        for tokens, inputs in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
            for name, values in inputs.items():
                tensor = datum.loss_fn_inputs[name]
                values = np.array(values)
                tensor.dtype = pb.DTYPE_INT64 if values.dtype.kind == "i" else pb.DTYPE_FLOAT32
                tensor.shape.extend(values.shape)
                tensor.dense = values.astype(np.int64 if values.dtype.kind == "i" else np.float32).tobytes()
        return message.SerializeToString()

    def forward_backward(self, number, data, **more):
        return self.post_bytes(self.message(number, data, **more))

    def post_bytes(self, body, **headers):
        return self.server.post("/api/v1/forward_backward", body, kind="application/x-protobuf", headers=headers)

    def optim_step(self, number, **adam):
        return self.server.post("/api/v1/optim_step", {"model_id": self.model, "seq_id": number, "adam_params": adam})

    def metrics(self, future):
        from tinker.proto import tinker_public_pb2 as pb
        status, answer = self.server.result(future)
        assert status == 200, answer
        if isinstance(answer, dict):
            assert "error" not in answer, answer
            return answer["metrics"]
        out = pb.ForwardBackwardOutput()
        out.ParseFromString(answer)
        return dict(out.metrics)


DATA = [([5, 9, 2, 40], {"target_tokens": [9, 2, 40, 3]}), ([5, 9, 2, 41, 6], {"target_tokens": [9, 2, 41, 6, 8]})]


def test_requests_run_in_the_order_of_their_numbers(server):
    early, ordered = ByHand(server), ByHand(server)
    # The step and the second gradient arrive before the first gradient.
    futures = [early.optim_step(3, learning_rate=1e-2), early.forward_backward(2, DATA[1:]), early.forward_backward(4, DATA, forward_only=True)]
    futures.append(early.forward_backward(1, DATA[:1]))
    for step in (ordered.forward_backward(1, DATA[:1]), ordered.forward_backward(2, DATA[1:]), ordered.optim_step(3, learning_rate=1e-2)):
        ordered.metrics(step[1]["request_id"])
    last = ordered.forward_backward(4, DATA, forward_only=True)
    assert early.metrics(futures[2][1]["request_id"]) == ordered.metrics(last[1]["request_id"])


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
