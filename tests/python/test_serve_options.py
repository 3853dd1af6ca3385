"""Options of `espalier serve` that change what clients get: weights in few bits, log-probs of samples, checks without sharing; and polls for all samples at once."""

import os
import threading
import time

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from make_model import make_model  # noqa: E402
from serve_client import NAME, ByHand, group_data, ready  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402


PROMPT = [5, 9, 2, 40, 3, 17]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose matrices have whole blocks of NF4."""
    return make_model("qwen3_tied", tmp_path_factory.mktemp("wide"), hidden_size=128, intermediate_size=128, num_hidden_layers=2)


@pytest.fixture
def start(program, wide, tmp_path):
    without_proxies()
    os.environ["TINKER_API_KEY"] = "tml-local"
    made = []

    def begin(*options):
        made.append(Server(program, {NAME: wide}, "--state", tmp_path / f"state{len(made)}", *options))
        return made[-1]

    yield begin
    for server in made:
        server.kill()


def train(model, steps=2):
    for step in range(steps):
        data = group_data(np.random.default_rng(step), 2, 3, 12, 5)
        yield model.metrics(model.forward_backward(2 * step + 1, data, loss="importance_sampling")[1]["request_id"])
        model.metrics(model.optim_step(2 * step + 2, learning_rate=1e-2)[1]["request_id"])


def draw(server, **params):
    """(log-probs of a sample, the same tokens' log-probs as the trainer gives them) of one trained client of the SDK."""
    service = tinker.ServiceClient(base_url=server.url)
    training = ready(service.create_lora_training_client(base_model=NAME, rank=4, seed=1))
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs={"target_tokens": np.array(PROMPT[1:])})
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    sampling = ready(training.save_weights_and_get_sampling_client())
    drawn = sampling.sample(tinker.ModelInput.from_ints(PROMPT), 1, tinker.SamplingParams(max_tokens=8, seed=5, stop=[], **params)).result().sequences[0]
    whole = [*PROMPT, *drawn.tokens]
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": np.array(whole[1:])})
    trained = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    return np.array(drawn.logprobs, np.float32), trained[len(PROMPT) - 1:].astype(np.float32)


def test_weights_in_four_bits_train_and_sample_alike(start):
    server = start("--weights", "nf4")
    assert list(train(ByHand(server))) != list(train(ByHand(start())))  # rounded weights are others
    sampled, trained = draw(server)
    np.testing.assert_array_equal(sampled, trained)


def test_raw_logprobs_of_samples_are_those_of_the_trainer_at_any_temperature(start):
    sampled, trained = draw(start("--sampled-logprobs", "raw"), temperature=0.6)
    np.testing.assert_array_equal(sampled, trained)
    scaled, trained = draw(start(), temperature=0.6)
    assert np.abs(scaled - trained).max() > 1e-3


def test_calls_are_checked_without_sharing(start):
    metrics = list(train(ByHand(start("--check-every", 2, "--dtype", "float64")), 4))
    assert ["check_gradient_error:max" in one for one in metrics] == [False, True, False, True]
    assert all(one.get("check_gradient_error:max", 0) < 1e-12 for one in metrics)


def test_one_poll_hears_of_all_samples_that_have_ended(start):
    server = start()
    model = ByHand(server)
    sampler = server.post("/api/v1/create_sampling_session", {"session_id": model.session, "sampling_session_seq_id": 0, "base_model": NAME})[1]["sampling_session_id"]

    def ask(number):
        return server.post("/api/v1/asample", {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "sampling_params": {"max_tokens": 4, "seed": number},
                                               "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}})[1]["request_id"]

    def poll(cursor, seconds=20, fetched=()):
        return server.post("/api/v1/retrieve_futures", {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor, "timeout": seconds, "retrieved_request_ids": list(fetched)})[1]

    begin = time.monotonic()
    assert poll(0, seconds=0.2)["completions"] == [] and time.monotonic() - begin >= 0.2
    late = threading.Timer(0.3, ask, [1])
    late.start()
    heard = poll(0)  # waits for it
    late.join()
    assert [one["state"] for one in heard["completions"]] == ["finished"]
    wanted, cursor, ended = {ask(number) for number in range(2, 8)}, heard["cursor"], set()
    while ended < wanted:
        heard = poll(cursor)
        assert heard["cursor"] > cursor and heard["completions"]
        cursor, ended = heard["cursor"], ended | {one["request_id"] for one in heard["completions"]}
    assert ended == wanted
    assert all(server.result(future)[0] == 200 for future in wanted)
    poll(cursor, 0, wanted)
    assert all(server.result(future)[0] == 410 for future in wanted)  # they were fetched, and are forgotten
