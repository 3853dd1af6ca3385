"""Dense or shared: phased_step takes what the plan predicts to be faster, and what runs is the dense step either way."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import espalier
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, worst

hf = pytest.importorskip("espalier.hf")
from espalier.hf import choice, dense  # noqa: E402
from espalier.rows import by_blocks, by_flash, by_kernel  # noqa: E402
from espalier.hf.rollouts import Rollouts  # noqa: E402

LARGE = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, vocab_size=150000)
MIDDLE = dict(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=8192)
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97)


def chosen(size, rollouts, kernels, wave_tokens=4096):
    """The schedule that "auto" becomes; no model of this size is made."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=size["hidden_size"] // size["num_attention_heads"], intermediate_size=3 * size["hidden_size"],
                                             **size))
    prepared = Rollouts(rollouts, size["vocab_size"])
    plan = prepared.plan(model, wave_tokens=wave_tokens, trunk_state="keep", gradients=True)
    return choice.schedule("auto", plan, prepared, size["num_hidden_layers"], wave_tokens, kernels)


def group(prompt, response, n):
    return batch(groups=((prompt, (response,) * n),), stem=0)


@pytest.mark.parametrize("kernels", [by_kernel, by_flash, by_blocks])
@pytest.mark.parametrize("size,rollouts,schedules", [
    (LARGE, group(512, 512, 8), ("phased", "packed")), (LARGE, group(40, 8, 2), ("packed",)),
    (MIDDLE, group(1707, 341, 8), ("phased", "packed")), (MIDDLE, group(4096, 128, 16), ("phased",)),
    (MIDDLE, group(341, 1707, 4), ("phased", "packed")),
    (SMALL, group(400, 40, 16), ("phased", "packed")), (SMALL, group(8, 4, 2), ("dense",)),
    (SMALL, batch(groups=((20, (5,)), (22, (3,)), (21, (4,))), stem=0), ("dense",)),
    (LARGE, batch(groups=((20, (5,)), (300, (200,)), (90, (400,))), stem=0), ("packed",))])
def test_the_plan_s_prediction_decides(size, rollouts, schedules, kernels):
    """Nothing shared and rollouts of like length: one padded call is cheaper than blocks. Of very different lengths it is not."""
    assert chosen(size, rollouts, kernels) in schedules


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_the_fallback_is_the_dense_step(family):
    model, rollouts = make(family), group(9, 4, 2) + [dict(prompt_ids=list(range(5, 18)), response_ids=[])]
    loss = loss_of(rollouts)
    with all_float64():
        dense_step(model, rollouts, loss)
        wanted = gradients(model)
        result = hf.phased_step(model, rollouts, loss)
        assert worst(gradients(model), wanted)[0] <= 1e-10
    assert (result.schedule, result.rows, result.rows_without_sharing, result.waves) == ("dense", 39, 39, 1)
    assert "dense" in str(result)


def test_what_is_asked_for_runs():
    rollouts = batch()
    loss, model, found = loss_of(rollouts), make("Llama"), {}
    with all_float64():
        for schedule, wave_tokens in (("dense", 4096), ("dense", 100), ("shared", 4096), ("shared", 20)):
            result = hf.phased_step(model, rollouts, loss, schedule=schedule, wave_tokens=wave_tokens)
            found[result.schedule, result.waves > 1] = gradients(model)
    assert set(found) == {("dense", False), ("dense", True), ("packed", False), ("phased", True)}
    assert all(worst(other, found["dense", False])[0] <= 1e-10 for other in found.values())
    with pytest.raises(espalier.Error, match="auto, shared, dense") as caught:
        hf.phased_step(model, rollouts, loss, schedule="fast")
    assert caught.value.exit_code == 2


def test_batches_hold_what_fits_with_its_padding():
    assert dense.batches_of([5, 90, 6, 100, 7], 100) == [[0, 2, 4], [1], [3]]
    assert dense.batches_of([5, 5, 5], 10) == [[0, 1], [2]]
