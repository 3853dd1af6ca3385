"""phased_step gives the gradients of the plain dense step, float64 to 1e-10, around unmodified models of nine families, under every
way of cutting the step; and the log-probs alone too."""

import itertools

import pytest
import torch

from hf_models import FAMILIES, all_float64, batch, checkpointed, dense_step, gradients, loss_of, make, shared_step, worst

hf = pytest.importorskip("espalier.hf")
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)


def both(model, **how):
    with all_float64():
        wanted_loss = dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        result = shared_step(model, ROLLOUTS, LOSS, **how)
        found = gradients(model)
    return result, abs(result.loss - wanted_loss) / abs(wanted_loss), worst(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_the_dense_step(family, tied):
    model = make(family, tie_word_embeddings=tied)
    for wave_tokens, trunk_state in ((16, "keep"), (60, "recompute"), (4096, "keep")):
        result, loss_error, (error, name) = both(model, wave_tokens=wave_tokens, trunk_state=trunk_state)
        assert loss_error <= 1e-10 and error <= 1e-10, (wave_tokens, trunk_state, name)
        assert result.rows < result.rows_without_sharing == sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in ROLLOUTS)


@pytest.mark.parametrize("wave_tokens,trunk_state", itertools.product([3, 8, 30, 100], ["keep", "recompute"]))
def test_every_cut_of_a_deep_tree(wave_tokens, trunk_state):
    model = make("Qwen3")
    result, loss_error, (error, name) = both(model, wave_tokens=wave_tokens, trunk_state=trunk_state)
    assert loss_error <= 1e-10 and error <= 1e-10, name


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
def test_checkpointing_without_reentry(family, trunk_state):
    _, loss_error, (error, name) = both(checkpointed(make(family)), wave_tokens=30, trunk_state=trunk_state)
    assert loss_error <= 1e-10 and error <= 1e-10, name


@pytest.mark.parametrize("seed", range(4))
def test_trees_of_any_depth_over_several_groups(seed):
    """Random walks that leave each other anywhere, in prompts and in responses, and some that are beginnings of others."""
    import random
    draw = random.Random(seed)
    walks = [[draw.randrange(3, 97) for _ in range(40)]]
    for _ in range(14):
        stem = draw.choice(walks)
        walks.append(stem[:draw.randrange(1, len(stem) + 1)] + [draw.randrange(3, 97) for _ in range(draw.randrange(0, 12))])
    cut = [draw.randrange(1, len(walk) + 1) for walk in walks]
    rollouts = [dict(prompt_ids=walk[:at], response_ids=walk[at:]) for walk, at in zip(walks, cut)]
    loss, model = loss_of(rollouts), make("Qwen3")
    with all_float64():
        dense_step(model, rollouts, loss)
        wanted = gradients(model)
        for wave_tokens, trunk_state in ((7, "keep"), (25, "recompute"), (4096, "keep")):
            result = shared_step(model, rollouts, loss, wave_tokens=wave_tokens, trunk_state=trunk_state)
            assert worst(gradients(model), wanted)[0] <= 1e-10, (seed, wave_tokens)
            assert result.rows < result.rows_without_sharing / 1.3


def test_a_step_reports_rows_time_and_memory():
    result = shared_step(make("Qwen3", torch.float32), ROLLOUTS, LOSS)
    assert result.rows < result.rows_without_sharing and result.seconds > 0 and result.peak_bytes > 2**20
    assert str(result).startswith(f"{result.rows} rows run instead of {result.rows_without_sharing} (")


def test_temperature_divides_the_logits():
    model = make("Llama")
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS, temperature=.7)
        wanted = gradients(model)
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, temperature=.7)
        assert worst(gradients(model), wanted)[0] <= 1e-10


def test_gradients_are_added_to_what_is_there():
    model = make("Llama")
    with all_float64():
        shared_step(model, ROLLOUTS, LOSS)
        once = {name: p.grad.clone() for name, p in model.named_parameters()}
        shared_step(model, ROLLOUTS, LOSS)
    assert worst(gradients(model), {name: 2 * g for name, g in once.items()})[0] <= 1e-12


@pytest.mark.parametrize("wave_tokens", [16, 4096])
def test_logprobs_without_gradients(wave_tokens):
    model = make("Qwen3").eval()
    with all_float64(), torch.no_grad():
        found = hf.logprobs(model, ROLLOUTS, wave_tokens=wave_tokens, temperature=1.3)
        for record, values in zip(ROLLOUTS, found):
            prompt, response = record["prompt_ids"], record["response_ids"]
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1] / 1.3
            wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]
            assert values.shape == wanted.shape and not values.requires_grad
            assert len(wanted) == 0 or float((values - wanted).abs().max()) <= 1e-10
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wave_tokens", [8, 4096])
def test_a_wave_holds_whole_responses_in_order(wave_tokens):
    seen = []

    def loss(wave):
        assert wave.rollouts == sorted(set(wave.rollouts))
        wanted = [(i, t) for i in wave.rollouts for t in range(len(ROLLOUTS[i]["response_ids"]))]
        assert list(zip(wave.rollout.tolist(), wave.position.tolist())) == wanted and len(wave) == len(wanted)
        seen.extend(wave.rollouts)
        return LOSS(wave)

    shared_step(make("Qwen2", torch.float32), ROLLOUTS, loss, wave_tokens=wave_tokens)
    assert sorted(seen) == [i for i, r in enumerate(ROLLOUTS) if r["response_ids"]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_verification_finds_rounding_only(dtype):
    model = make("Qwen3", dtype)
    result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, verify=True)
    assert result.verification.verdict == "pass" and "pass: " in str(result.verification)
    assert shared_step(model, ROLLOUTS, LOSS, verify=True).verification is None, "only a model's first step"


def test_verification_catches_a_wrong_gradient(monkeypatch):
    """A trunk whose gradients are lost: the prompt's part is missing."""
    import espalier
    from espalier.hf.attention import Trunk
    model = make("Qwen3", torch.float32)
    add = Trunk.add
    monkeypatch.setattr(Trunk, "add", lambda self, layer, dk, dv: add(self, layer, dk * 1.01, dv))
    with pytest.raises(espalier.Error) as caught:
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, verify=True)
    assert caught.value.kind == "verification" and caught.value.exit_code == 6
    assert all(p.grad is not None for p in model.parameters())


def test_few_rollouts_without_a_shared_prompt_cost_no_row_more():
    apart = batch(groups=((20, (5,)), (11, (9,)), (30, (4,))), stem=0)
    result = shared_step(make("Llama", torch.float32), apart, loss_of(apart))
    assert result.rows <= result.rows_without_sharing and result.waves == 1
