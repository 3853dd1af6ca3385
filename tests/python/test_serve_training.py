"""Gradients and optimizer steps of `espalier serve` against the same adapter computed densely in float64; checkpoints."""

import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import NAME, RANK, Dense, dense_loss, draw_group, external_weights, ready, takes  # noqa: E402

# With these a weight moves by lr g / (|g| + eps), about 1e-3 g, from which g follows.
SMALL_STEP = dict(learning_rate=1e6, beta1=0.0, beta2=0.0, eps=1e9)
EXACT = 1e-10  # relative: float64 on both sides, some hundred operations
CONFIGS = {"ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}, "cispo": {"clip_high_threshold": 2.5}, "dro": {"beta": 0.1}, "gspo": None}


@pytest.fixture
def training(service):
    """A model whose B is not zero, so that A has a gradient."""
    made = ready(service.create_lora_training_client(base_model=NAME, rank=RANK, seed=5))
    made.forward_backward(draw_group(1, "cross_entropy"), "cross_entropy").result()
    made.optim_step(tinker.AdamParams(learning_rate=2e-2)).result()
    return made


def relative_error(found, wanted):
    difference = torch.sqrt(sum(((found[name] - wanted[name]) ** 2).sum() for name in wanted))
    return (difference / torch.sqrt(sum((values ** 2).sum() for values in wanted.values()))).item()


def gradient_of(server, training, call):
    """What the calls added to the gradient, seen in the weights after a small step."""
    before = external_weights(server, training, "before")
    answers = call()
    training.optim_step(tinker.AdamParams(**SMALL_STEP)).result()
    after = external_weights(server, training, "after")
    # Weights below 1 are rounded to 1e-16, so g to 1e-13: far below EXACT of gradients whose norm is above 1.
    moves = {name: before[name] - after[name] for name in before}
    return before, {name: move * SMALL_STEP["eps"] / (SMALL_STEP["learning_rate"] - move.abs()) for name, move in moves.items()}, answers


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", *CONFIGS])
def test_gradients_are_those_of_a_dense_computation(server, training, model_of, loss):
    data, config = draw_group(3, loss, n=4), CONFIGS.get(loss)
    before, found, answer = gradient_of(server, training, lambda: training.forward_backward(data, loss, config).result())
    total, wanted = Dense(model_of("qwen3_tied"), before).gradients(data, loss, config)
    assert abs(answer.metrics["loss:sum"] - total) < EXACT * abs(total)
    assert relative_error(found, wanted) < EXACT
    if loss in ("ppo", "cispo", "gspo"):
        assert 0 < answer.metrics["clip_fraction:mean"] < 1


def test_bounds_may_be_given_for_each_target(server, training, model_of):
    data = draw_group(4, "ppo")
    generator = np.random.default_rng(2)
    for datum in data:
        for key, low in (("clip_low_threshold", 0.1), ("clip_high_threshold", 1.0)):
            numbers = low + 0.8 * generator.random(datum.model_input.length)
            datum.loss_fn_inputs[key] = tinker.TensorData.from_numpy(numbers.astype(np.float32))
    before, found, answer = gradient_of(server, training, lambda: training.forward_backward(data, "ppo").result())
    total, wanted = Dense(model_of("qwen3_tied"), before).gradients(data, "ppo")
    assert abs(answer.metrics["loss:sum"] - total) < EXACT * abs(total)
    assert relative_error(found, wanted) < EXACT


def test_rows_may_have_several_targets_dense_and_sparse(server, training, model_of):
    data = draw_group(6, "cross_entropy", columns=8) + draw_group(6, "cross_entropy")
    assert any(datum.loss_fn_inputs["weights"].sparse_crow_indices is not None for datum in data)
    before, found, answer = gradient_of(server, training, lambda: training.forward_backward(data, "cross_entropy").result())
    dense = Dense(model_of("qwen3_tied"), before)
    total, wanted = dense.gradients(data, "cross_entropy")
    assert abs(answer.metrics["loss:sum"] - total) < EXACT * abs(total)
    assert relative_error(found, wanted) < EXACT
    for datum, output in zip(data, answer.loss_fn_outputs):
        logprobs = output["logprobs"].to_torch()
        assert logprobs.shape == dense.logprobs(datum).shape
        torch.testing.assert_close(logprobs.double(), dense.logprobs(datum).detach(), rtol=1e-6, atol=1e-6)


def test_custom_losses_take_two_passes(server, training, model_of):
    data = draw_group(7, "cross_entropy")

    def loss(data, logprobs):
        return (logprobs[0].sum() - logprobs[1].sum()) ** 2 / 50 - torch.logsumexp(logprobs[2], 0), {"first": logprobs[0][0].item()}

    before, found, answer = gradient_of(server, training, lambda: training.forward_backward_custom(data, loss).result())
    dense = Dense(model_of("qwen3_tied"), before)
    total, _ = loss(data, [dense.logprobs(datum) for datum in data])
    wanted = dict(zip(dense.parameters, torch.autograd.grad(total, list(dense.parameters.values()))))
    assert relative_error(found, wanted) < 1e-6  # the client's derivatives come back in float32
    assert answer.metrics["first"] == pytest.approx(dense.logprobs(data[0])[0].item(), abs=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", *CONFIGS])
def test_three_steps_of_each_loss_are_those_of_a_dense_computation(server, service, training, model_of, loss):
    """Losses, log-probs and weights, with torch's AdamW, whose settings differ from step to step."""
    dense = Dense(model_of("qwen3_tied"), external_weights(server, training, "start"))
    # The first step of the fixture is in the server's moments, so they begin anew from a checkpoint.
    training = ready(service.create_training_client_from_state(training.save_state("start").result().path))
    parameters, config = list(dense.parameters.values()), CONFIGS.get(loss)
    optimizer = torch.optim.AdamW(parameters, lr=1)
    for step, (lr, betas, eps, decay, clip) in enumerate([(1e-2, (0.9, 0.95), 1e-12, 0, 0), (3e-3, (0.8, 0.99), 1e-8, 0.1, 1.0), (2e-2, (0.5, 0.9), 1e-6, 0.3, 1e3)]):
        data = draw_group(20 + step, loss)
        answers = [training.forward_backward(part, loss, config).result() for part in (data[:1], data[1:])]
        norm = training.optim_step(tinker.AdamParams(learning_rate=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=decay, grad_clip_norm=clip)).result().metrics["grad_norm:mean"]
        optimizer.zero_grad()
        logprobs = [dense.logprobs(datum) for datum in data]
        total = sum(dense_loss(loss, datum, lp, config) for datum, lp in zip(data, logprobs))
        total.backward()
        assert sum(answer.metrics["loss:sum"] for answer in answers) == pytest.approx(total.item(), rel=EXACT)
        for wanted, found in zip(logprobs, (output for answer in answers for output in answer.loss_fn_outputs)):
            difference = (found["logprobs"].to_torch().double() - wanted.detach()).abs()
            assert (difference <= 2 ** -24 * wanted.detach().abs() * (1 + EXACT) + EXACT).all()  # rounded to float32 on the wire
        found = torch.nn.utils.clip_grad_norm_(parameters, clip if clip > 0 else float("inf"))
        assert norm == pytest.approx(found.item(), rel=1e-9)
        optimizer.param_groups[0].update(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        optimizer.step()
    end = external_weights(server, training, "end")
    assert relative_error(end, {name: p.detach() for name, p in dense.parameters.items()}) < EXACT


def test_a_checkpoint_continues_with_and_without_its_optimizer(service, training):
    more = dict(user_metadata={"a": "b"}) if takes(training.save_state, "user_metadata") else {}
    path = training.save_state("here", **more).result().path
    data = draw_group(8, "cross_entropy")

    def go_on(client):
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        return client.forward(data, "cross_entropy").result().metrics["loss:sum"]

    with_moments = ready(service.create_training_client_from_state_with_optimizer(path))
    without = ready(service.create_training_client_from_state(path))
    assert with_moments.get_info().lora_rank == RANK
    ends = [go_on(client) for client in (training, with_moments, without)]
    assert ends[0] == ends[1] != ends[2]
    rest = service.create_rest_client()
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == RANK
    with pytest.raises(Exception, match="overwrite"):
        training.save_state("here").result()
    assert training.save_state("here", overwrite=True).result().path == path
    assert path in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(Exception, match="no checkpoint"):
        ready(service.create_training_client_from_state(path))


def test_ranks_above_a_side_of_a_matrix_train(server, service, model_of):
    training = ready(service.create_lora_training_client(base_model=NAME, rank=64, seed=2))
    data = draw_group(9, "cross_entropy")
    for _ in range(2):
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    dense = Dense(model_of("qwen3_tied"), external_weights(server, training), rank=64)
    total, _ = dense.gradients(data, "cross_entropy")
    assert abs(training.forward(data, "cross_entropy").result().metrics["loss:sum"] - total) < EXACT * abs(total)


def test_clients_of_all_ranks_have_the_bits_of_their_runs_alone(server, service):
    """Sixteen adapters over one model, each of which samples, too. A step is one call, so that none are joined."""
    ranks = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64]

    def run(together):
        clients = {rank: ready(service.create_lora_training_client(base_model=NAME, rank=rank, seed=rank)) for rank in together}
        samples = {rank: [] for rank in together}
        for step in range(3):
            futures = {rank: (client.forward_backward(draw_group(rank + step, "cross_entropy"), "cross_entropy"), client.optim_step(tinker.AdamParams(learning_rate=1e-2)))
                       for rank, client in clients.items()}
            samplers = {rank: ready(client.save_weights_and_get_sampling_client()) for rank, client in clients.items() if step < 2}
            drawn = {rank: sampler.sample(tinker.ModelInput.from_ints([5, 9, rank]), 2, tinker.SamplingParams(max_tokens=6, seed=step)) for rank, sampler in samplers.items()}
            for both in futures.values():
                for future in both:
                    future.result()
            for rank, future in drawn.items():
                samples[rank] += [(one.tokens, one.logprobs) for one in future.result().sequences]
        return {rank: (external_weights(server, client, "end"), samples[rank]) for rank, client in clients.items()}

    interleaved = run(ranks)
    for rank in ranks:
        weights, samples = run([rank])[rank]
        assert samples == interleaved[rank][1]
        assert all(torch.equal(values, interleaved[rank][0][name]) for name, values in weights.items()), rank
