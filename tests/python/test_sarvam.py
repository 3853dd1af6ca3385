"""Sarvam-105B, as published: DeepSeek-V3 under other names. transformers reads the config so from 5.24 on; before, the test translates it by the
same rules. Other Sarvam and Qwen3.8 files are refused by name, or are those of families that other tests open."""

import json

import pytest
import torch
import transformers

import objective
import oracle
from comparison import Trained, assert_equal_gradients, assert_equal_series
from make_model import make_rollouts, randomised, write_records
from test_train_parity import LOGPROB_FLOAT64

SEED = 45
# The members of the published file with sizes of a test.
SARVAM_105B = dict(
    architectures=["SarvamMLAForCausalLM"], model_type="sarvam_mla", vocab_size=97, hidden_size=48, intermediate_size=80, moe_intermediate_size=24,
    num_hidden_layers=3, num_attention_heads=4, num_experts=8, num_shared_experts=1, num_experts_per_tok=3, kv_lora_rank=24, q_lora_rank=None,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, head_dim=32, q_head_dim=20, first_k_dense_replace=1, n_group=1, topk_group=1,
    routed_scaling_factor=2.5, norm_topk_prob=True, score_function="sigmoid", hidden_act="silu", max_position_embeddings=512, rms_norm_eps=1e-6,
    rope_theta=10000.0, rope_scaling=dict(type="deepseek_yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                                          original_max_position_embeddings=16),
    initializer_range=0.02, tie_word_embeddings=False, attention_dropout=0.0, use_cache=True, torch_dtype="float32")


def as_transformers_reads(config, folder):
    """The config of transformers' class for the file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    own = getattr(transformers, "SarvamMLAConfig", None)
    if own is not None:
        return own.from_pretrained(folder)
    members = {name: value for name, value in config.items() if name not in ("architectures", "model_type", "head_dim", "q_head_dim", "score_function")}
    for named, read in (("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts")):
        if named in members:
            members[read] = members.pop(named)
    members = dict(n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None, num_key_value_heads=config["num_attention_heads"]) | members
    if (members.get("rope_scaling") or {}).get("type") == "deepseek_yarn":
        members["rope_scaling"] = {**members["rope_scaling"], "type": "yarn"}
    return transformers.DeepseekV3Config(**members)


CASES = {
    "as published": {},
    "with groups, low-rank queries and no scaling": dict(n_group=4, topk_group=2, q_lora_rank=16, rope_scaling=None, num_shared_experts=2),
    "members left out": {name: None for name in ("n_group", "topk_group", "q_lora_rank", "first_k_dense_replace", "norm_topk_prob", "score_function")},
}


@pytest.mark.parametrize("case", CASES)
def test_its_step_is_that_of_transformers(case, espalier, tmp_path):
    config = SARVAM_105B | CASES[case]
    if case == "members left out":
        config = {name: value for name, value in config.items() if name not in CASES[case]}
    kind = transformers.DeepseekV3ForCausalLM
    read = as_transformers_reads(config, tmp_path / "read")
    model = randomised(kind(read).float(), SEED)
    reference, published = tmp_path / "reference", tmp_path / "model"
    deepseek = transformers.DeepseekV3Config(**{name: value for name, value in read.to_dict().items() if name not in ("architectures", "model_type")})
    model.config = deepseek
    model.save_pretrained(reference)
    published.mkdir()
    (published / "config.json").write_text(json.dumps(config))
    (published / "model.safetensors").symlink_to(reference / "model.safetensors")
    records = [r for r in make_rollouts(SEED) if r["response_ids"]]
    file = write_records(records, tmp_path / "rollouts.jsonl")
    run = Trained(espalier, published, file, tmp_path / "run", schedule="phased")
    resolved = objective.resolve({})
    _, _, exact, logprobs, _ = oracle.gradients(oracle.load_model(reference, torch.float64, kind), records, objective.advantages(records, resolved), resolved)
    assert_equal_gradients(run.gradients, exact, SEED)
    assert_equal_series(run.logprobs, "logprobs", logprobs, LOGPROB_FLOAT64)
    assert json.loads((run.out / "config.json").read_text()) == config  # carried through


@pytest.mark.parametrize("change, word", [
    (dict(score_function="softmax"), "score_function"),
    (dict(architectures=["SarvamMoEForCausalLM"], model_type="sarvam_moe"), "SarvamMoEForCausalLM"),
    (dict(architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp"), "Qwen4ExpForConditionalGeneration")])
def test_others_are_refused_by_name(change, word, espalier, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SARVAM_105B | change))
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    assert word in espalier("plan", "--model", tmp_path, "--rollouts", file, expect=4).stderr
