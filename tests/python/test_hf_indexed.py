"""Layers that choose their keys by an indexer (DeepSeek-V3.2, GLM-5): the gradients of the unmodified model, over prompts inside prompts."""

import pytest
import torch

import hf_every_model as tiny
from hf_models import all_float64, batch, dense_step, gradients, loss_of, shared_step

espalier = pytest.importorskip("espalier")
hf = pytest.importorskip("espalier.hf")
from espalier.hf import attention, indexed  # noqa: E402
from espalier.rows.trunk import trunks_of  # noqa: E402

FAMILIES = ["deepseek_v32", "glm_moe_dsa"]
_FIRST = batch(groups=((14, (7, 6)),), stem=0)
# Three prompts, each the beginning of the next: trunks in trunks.
ROLLOUTS = _FIRST + [dict(prompt_ids=_FIRST[0]["prompt_ids"] + more, response_ids=response) for more in ([31, 5, 47, 8, 90, 12], [31, 5, 47, 8, 90, 12, 77, 3, 60])
                     for response in ([9, 41, 16, 23, 7], [52, 19, 88, 35])]
LOSS = loss_of(ROLLOUTS)


def error(name, wave_tokens=8, **changes):
    model = tiny.build(name, **changes)
    with all_float64():
        result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=wave_tokens)
        found = gradients(model)
        dense_step(model, ROLLOUTS, LOSS)
    return tiny.distance(found, gradients(model)), result


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_unmodified_model(name):
    found, result = error(name)
    assert found <= tiny.BOUND and result.schedule == "phased" and result.rows < result.rows_without_sharing


@pytest.mark.parametrize("name", FAMILIES)
def test_the_choice_is_a_choice(name):
    """With more keys than there are, other log-probs: the tests see which keys a row chooses."""
    few, all_keys = (hf.logprobs(tiny.build(name, index_topk=k), ROLLOUTS) for k in (8, 512))
    assert max(float((a - b).abs().max()) for a, b in zip(few, all_keys)) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_the_trunks_left_out_are_seen(name, monkeypatch):
    plain = indexed._Keys.update_indexer

    def without(keys, k, layer):
        whole = plain(keys, k, layer)
        whole[:, :whole.shape[1] - k.shape[1]] = 0
        return whole

    monkeypatch.setattr(indexed._Keys, "update_indexer", without)
    with pytest.raises(espalier.Unsupported, match="logits of shared rows that differ"):  # by the model's first calls, before any gradient
        error(name)


def test_rows_of_siblings_are_seen(monkeypatch):
    """A mask of all earlier rows of a call."""
    plain = attention.visible
    monkeypatch.setattr(attention, "visible", lambda sets, device: plain(sets, device).fill_(True).tril_(sum(t.rows for t in trunks_of(sets))))
    assert error("glm_moe_dsa", wave_tokens=24)[0] > 1e-3


def test_checkpointed_layers_are_refused():
    model = tiny.build("glm_moe_dsa").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(espalier.Unsupported, match="gradient_checkpointing_disable"):
        hf.check(model)


def test_without_a_phase_the_model_is_as_it_was():
    model, ids = tiny.build("glm_moe_dsa"), torch.arange(3, 43)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        hf.logprobs(model, ROLLOUTS)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    assert not indexed._configs and attention.current() is None


@pytest.mark.parametrize("name,kind", [("deepseek_v4", "compressed"), ("minimax_m3_vl_text", "minimax_m3_sparse"), ("qwen4_exp", "indexed")])
def test_other_choices_are_refused_before_anything_runs(name, kind):
    """Whatever the lengths: beyond a block of compressed keys the probe's short calls would not reach them."""
    wide = dict(deepseek_v4=dict(compress_rates=dict(compressed_sparse_attention=128, heavily_compressed_attention=128)),
                minimax_m3_vl_text=dict(index_block_size=128), qwen4_exp={})[name]
    with pytest.raises(espalier.Unsupported, match=f"{kind}.*chooses or compresses"):
        hf.check(tiny.build(name, **wide), longest=0)
