"""Samples of `espalier serve`: the bits of compute_logprobs and of the trainer, seeds, stops, filters, snapshots, sharing."""

import math

import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import NAME, RANK, Dense, draw_group, external_weights, ready, takes  # noqa: E402

PROMPT = [5, 17, 40, 2, 9, 9, 31]
TEXT = tinker.ModelInput.from_ints(PROMPT)


@pytest.fixture(scope="module")
def training(service):
    made = ready(service.create_lora_training_client(base_model=NAME, rank=RANK, seed=6))
    step(made)
    return made


def step(training, seed=1):
    training.forward_backward(draw_group(seed, "cross_entropy"), "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=2e-2)).result()


@pytest.fixture(scope="module")
def sampling(training):
    return ready(training.save_weights_and_get_sampling_client())


def sample(client, n=1, text=TEXT, more=None, **params):
    return client.sample(text, n, tinker.SamplingParams(**{"max_tokens": 12, "seed": 1, "stop": [], **params}), **(more or {})).result()


def extended(tokens):
    return tinker.ModelInput.from_ints([*PROMPT, *tokens])


def test_sampled_logprobs_have_the_bits_of_compute_logprobs_and_of_the_trainer(training, sampling):
    for one in sample(sampling, 5).sequences:
        scored = sampling.compute_logprobs(extended(one.tokens)).result()
        assert scored[len(PROMPT):] == one.logprobs
        whole = [*PROMPT, *one.tokens]
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": np.array(whole[1:])})
        assert training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == scored[1:]


def test_a_sample_is_a_function_of_its_request(sampling):
    alone = [sample(sampling, 4).sequences for _ in range(2)]
    assert [s.tokens for s in alone[0]] == [s.tokens for s in alone[1]]
    assert len({tuple(s.tokens) for s in alone[0]}) > 1
    futures = [sampling.sample(tinker.ModelInput.from_ints(PROMPT[:k]), 3, tinker.SamplingParams(max_tokens=9, seed=k, temperature=0.5 + k / 7, top_k=k + 2)) for k in range(2, 7)]
    together = sample(sampling, 4).sequences
    assert [s.tokens for s in together] == [s.tokens for s in alone[0]] and [s.logprobs for s in together] == [s.logprobs for s in alone[0]]
    assert all(len(future.result().sequences) == 3 for future in futures)
    assert [s.tokens for s in sample(sampling, 4, seed=2).sequences] != [s.tokens for s in together]


def test_distributions_are_those_of_a_dense_computation(server, training, sampling, model_of):
    dense = Dense(model_of("qwen3_tied"), external_weights(server, training))
    rows = dense.rows(PROMPT).detach()
    # Frequencies of a first token in 1024 draws. Bernstein's inequality: a count is further from its mean than this with a probability of 1e-7.
    n, unlikely = 1024, math.log(2e7)
    for params, kept in (({}, None), ({"top_k": 3}, 3), ({"temperature": 2.0}, None), ({"top_p": 0.5}, "p")):
        probabilities = torch.softmax(rows[-1] / params.get("temperature", 1.0), -1)
        if kept == 3:
            probabilities = torch.where(probabilities >= probabilities.topk(3).values[-1], probabilities, 0)
        if kept == "p":
            order = probabilities.argsort(descending=True)
            before = probabilities[order].cumsum(0) - probabilities[order]
            probabilities = probabilities.index_fill(0, order[before >= 0.5], 0)
        probabilities = probabilities / probabilities.sum()
        counts = np.bincount([s.tokens[0] for s in sample(sampling, n, max_tokens=1, **params).sequences], minlength=len(probabilities))
        wanted = probabilities.numpy() * n
        bound = unlikely / 3 + np.sqrt(unlikely ** 2 / 9 + 2 * unlikely * wanted * (1 - wanted / n))
        assert (np.abs(counts - wanted) <= bound).all() and (counts[wanted == 0] == 0).all(), params
    greedy = sample(sampling, temperature=0.0).sequences[0]
    tokens = list(PROMPT)
    for token in greedy.tokens:
        assert token == dense.rows(tokens)[-1].argmax().item()
        tokens.append(token)
    scored = sampling.compute_logprobs(TEXT).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], [rows[i, t].item() for i, t in enumerate(PROMPT[1:])], atol=1e-6)


def test_scaled_logprobs_are_those_of_the_distribution_that_was_drawn_from(server, training, sampling, model_of):
    dense = Dense(model_of("qwen3_tied"), external_weights(server, training))
    one = sample(sampling, temperature=0.6).sequences[0]
    rows = dense.model(input_ids=torch.tensor([[*PROMPT, *one.tokens]]), use_cache=False).logits[0].detach()
    wanted = torch.log_softmax(rows[len(PROMPT) - 1:-1] / 0.6, -1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(one.logprobs, wanted.numpy(), atol=1e-6)


def test_stops(sampling, service):
    long = sample(sampling, seed=3, max_tokens=40).sequences[0]
    assert long.stop_reason == "length" and len(long.tokens) == 40
    stop = long.tokens[7]
    first = long.tokens.index(stop)
    cut = sample(sampling, seed=3, max_tokens=40, stop=[stop]).sequences[0]
    ends = [i for i, t in enumerate(long.tokens[:first + 1]) if t in (2, stop)]  # 2 is the model's own end
    assert cut.tokens == long.tokens[:ends[0] + 1] and cut.stop_reason == "stop"
    assert sample(sampling, seed=3, max_tokens=40, stop=None).sequences[0].tokens == (long.tokens[:long.tokens.index(2) + 1] if 2 in long.tokens else long.tokens)


@pytest.mark.skipif(not takes(tinker.SamplingClient.sample, "topk_sample_logprobs"), reason="this version of the SDK cannot ask for it")
def test_what_is_read_of_a_prompt(server, training, sampling, model_of):
    rows = Dense(model_of("qwen3_tied"), external_weights(server, training)).rows(PROMPT).detach()
    ids = torch.full((len(PROMPT) - 1, 2), -1, dtype=torch.int64)
    ids[0, 1], ids[-1, 0], ids[-1, 1] = 42, 7, 8
    for targets in (tinker.TensorData.from_torch_sparse(ids, pad_value=-1), tinker.TensorData.from_torch(ids)):
        answer = sample(sampling, max_tokens=1, more=dict(include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2, target_prompt_logprobs=targets, prompt_alt_tokens_k=2))
        found = answer.target_prompt_logprobs.to_torch()
        found = found.to_dense() if found.layout != torch.strided else found
        assert found[0, 1].item() == pytest.approx(rows[0, 42].item(), abs=1e-6) and found[-1, 1].item() == pytest.approx(rows[-2, 8].item(), abs=1e-6)
        assert found[2, 0].item() == 0
        for i, likely in enumerate(answer.topk_prompt_logprobs):
            if i == 0:
                assert likely is None
                continue
            values, order = rows[i - 1].topk(3)
            assert [t for t, _ in likely] == order.tolist()
            np.testing.assert_allclose([p for _, p in likely], values.numpy(), atol=1e-6)
        token, logprob = answer.sequences[0].tokens[0], answer.sequences[0].logprobs[0]
        likely = dict(answer.sequences[0].topk_logprobs[0])
        assert list(likely) == rows[-1].topk(2).indices.tolist() and likely.get(token, logprob) == logprob
        drawn, logprobs = answer.prompt_alt_tokens.tokens.to_torch(), answer.prompt_alt_tokens.logprobs.to_torch()
        assert drawn.shape == (len(PROMPT) - 1, 2)
        np.testing.assert_allclose(logprobs.numpy(), rows[:-1].gather(1, drawn.long()).numpy(), atol=1e-6)
    last = sampling.compute_logprobs(TEXT, prompt_logprobs_last_n=2).result()
    assert [p is None or math.isnan(p) for p in last] == [True] * (len(PROMPT) - 2) + [False] * 2
    assert last[-2:] == sampling.compute_logprobs(TEXT).result()[-2:]


def test_a_snapshot_keeps_its_weights_while_training_goes_on(service, training):
    path = training.save_weights_for_sampler("kept").result().path
    snapshot, named = ready(training.save_weights_and_get_sampling_client()), ready(service.create_sampling_client(model_path=path))
    before = snapshot.compute_logprobs(TEXT).result()
    assert named.compute_logprobs(TEXT).result() == before
    step(training, seed=9)
    assert snapshot.compute_logprobs(TEXT).result() == before == named.compute_logprobs(TEXT).result()
    assert ready(training.save_weights_and_get_sampling_client()).compute_logprobs(TEXT).result() != before
    base = ready(service.create_sampling_client(base_model=NAME))
    assert base.compute_logprobs(TEXT).result() != before


def test_requests_share_their_prompts(server, sampling):
    text = tinker.ModelInput.from_ints([int(t) for t in np.random.default_rng(3).integers(0, 90, 200)])
    first = sample(sampling, text=text)
    again = [sample(sampling, text=text, seed=k) for k in range(3)]
    assert first.prompt_cache_hit_tokens == 0 and all(a.prompt_cache_hit_tokens >= 199 for a in again)
    # The next turn of a conversation begins with the prompt.
    longer = tinker.ModelInput.from_ints([*text.to_ints(), *first.sequences[0].tokens, 7, 8, 9])
    assert sample(sampling, text=longer).prompt_cache_hit_tokens >= 200
    fresh = sampling.compute_logprobs(longer).result()
    assert fresh[200:200 + len(first.sequences[0].tokens)] == first.sequences[0].logprobs


@pytest.mark.parametrize("change, words", [
    ({"max_tokens": 600}, "context"), ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_k": 0}, "top_k"), ({"stop": [9999]}, "stop"), ({"stop": [""]}, "stop")])
def test_wrong_samples_fail_alone(sampling, change, words):
    with pytest.raises(tinker.RequestFailedError, match=words):
        sample(sampling, **change)
    assert sample(sampling).sequences
