"""Sarvam-105B and Sarvam-30B, as published: DeepSeek-V3 and GLM-4.5 under other names. transformers reads their configs so from 5.24 on; before, the
tests translate them by the same rules. Qwen3.8's other model is refused by name."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

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


# The published file of Sarvam-30B, likewise.
SARVAM_30B = dict(
    architectures=["SarvamMoEForCausalLM"], model_type="sarvam_moe", vocab_size=97, hidden_size=48, intermediate_size=80, moe_intermediate_size=24,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_shared_experts=1, num_experts_per_tok=3,
    first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, score_function="sigmoid", hidden_act="silu",
    max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=8000000.0, rope_scaling=None, use_bias=False, use_qkv_bias=False, use_qk_norm=True,
    moe_router_enable_expert_bias=True, initializer_range=0.02, tie_word_embeddings=False, attention_dropout=0.0, embedding_dropout=0.0,
    output_dropout=0.0, pad_token_id=0, eos_token_id=1, max_window_layers=3, use_cache=True, torch_dtype="float32")


def as_transformers_reads(config, folder, own="SarvamMLAConfig"):
    """The config of transformers' class for the file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    own = getattr(transformers, own, None)
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


def named_as_published(model):
    """{name in Sarvam-30B's files: tensor} of transformers' model, whose names and matrices are GLM-4.5's."""
    out, of_model = {}, model.state_dict()
    for name, tensor in of_model.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if name.endswith("q_proj.weight"):
            tensor = torch.cat([of_model[name.replace("q_proj", other)] for other in ("q_proj", "k_proj", "v_proj")])
        for found, published in (("embed_tokens", "word_embeddings"), ("self_attn.q_proj", "attention.query_key_value"), ("self_attn.o_proj", "attention.dense"),
                                 ("self_attn.q_norm", "attention.query_layernorm"), ("self_attn.k_norm", "attention.key_layernorm"),
                                 ("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias")):
            name = name.replace(found, published)
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                for part, value in (("gate_proj", gate), ("up_proj", up)):
                    out[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = value.clone()
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{expert}.down_proj.weight"): matrix.clone() for expert, matrix in enumerate(tensor)}
        else:
            out[name] = tensor.clone()
    return out


def named_gradients(model, exact):
    """Gradients by transformers' names, by those of Sarvam-30B's files."""
    copy = type(model)(model.config).to(torch.float64)
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(exact[name])
    return {name: tensor for name, tensor in named_as_published(copy).items() if not name.endswith("expert_bias")}


CASES_30B = {
    "as published": {},
    "with groups, without norms of heads": dict(n_group=4, topk_group=2, use_qk_norm=False, num_shared_experts=2),
    "members left out": {name: None for name in ("n_group", "topk_group", "first_k_dense_replace", "norm_topk_prob", "score_function", "use_qk_norm",
                                                 "pad_token_id", "rope_theta", "num_shared_experts", "use_bias", "use_qkv_bias")},
}


@pytest.mark.parametrize("case", CASES_30B)
def test_sarvam_30b_has_the_step_of_transformers(case, espalier, tmp_path):
    config = SARVAM_30B | CASES_30B[case]
    if case == "members left out":
        config = {name: value for name, value in config.items() if name not in CASES_30B[case]}
    kind = transformers.Glm4MoeForCausalLM
    read = as_transformers_reads(config, tmp_path / "read", "SarvamMoEConfig")
    members = {name: value for name, value in read.to_dict().items() if name not in ("architectures", "model_type")}
    glm = transformers.Glm4MoeConfig(**members)
    model = randomised(kind(glm).float(), SEED)
    reference, published = tmp_path / "reference", tmp_path / "model"
    model.save_pretrained(reference)
    published.mkdir()
    (published / "config.json").write_text(json.dumps(config))
    save_file(named_as_published(model), published / "model.safetensors", {"format": "pt"})
    records = [r for r in make_rollouts(SEED) if r["response_ids"]]
    file = write_records(records, tmp_path / "rollouts.jsonl")
    run = Trained(espalier, published, file, tmp_path / "run", schedule="phased", lr=1e-2)
    resolved = objective.resolve({})
    exact_model = oracle.load_model(reference, torch.float64, kind)
    exact_model.zero_grad(set_to_none=True)
    pairs = [oracle.response_logprobs(exact_model, record) for record in records]
    loss, _ = objective.loss(records, [p[0] for p in pairs], [p[1] for p in pairs], objective.advantages(records, resolved), resolved)
    loss.backward()
    exact = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in exact_model.named_parameters()}
    assert_equal_gradients(run.gradients, named_gradients(exact_model, exact), SEED)
    assert_equal_series(run.logprobs, "logprobs", [p[0].detach().tolist() for p in pairs], LOGPROB_FLOAT64)
    assert json.loads((run.out / "config.json").read_text()) == config  # carried through
    before, after = load_file(published / "model.safetensors"), load_file(run.out / "model.safetensors")
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    assert not torch.equal(before["model.layers.0.attention.query_key_value.weight"], after["model.layers.0.attention.query_key_value.weight"].float())


def test_a_directory_that_transformers_saved_is_the_same_model(espalier, tmp_path):
    """It names the class that runs it in `architectures`, and the files are as published."""
    if not hasattr(transformers, "SarvamMoEConfig"):
        pytest.skip("transformers before 5.24")
    read = as_transformers_reads(SARVAM_30B, tmp_path / "read", "SarvamMoEConfig")
    model = randomised(transformers.AutoModelForCausalLM.from_config(read).float(), SEED)
    model.save_pretrained(tmp_path / "saved")
    assert "model.word_embeddings.weight" in load_file(tmp_path / "saved/model.safetensors")
    records = [r for r in make_rollouts(SEED) if r["response_ids"]]
    espalier("score", "--model", tmp_path / "saved", "--rollouts", write_records(records, tmp_path / "rollouts.jsonl"), "--out", tmp_path / "scored.jsonl",
             "--dtype", "float64")
    wanted, _ = oracle.score(oracle.load_model(tmp_path / "saved", torch.float64), records)
    for found, expected in zip((tmp_path / "scored.jsonl").read_text().splitlines(), wanted, strict=True):
        assert json.loads(found)["logprobs"] == pytest.approx(expected, abs=1e-9, rel=0)


@pytest.mark.parametrize("change, word", [
    (dict(score_function="softmax"), "score_function"),
    (dict(SARVAM_30B, use_qkv_bias=True), "use_qkv_bias"),
    (dict(SARVAM_30B, moe_router_enable_expert_bias=False), "moe_router_enable_expert_bias"),
    (dict(architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp"), "Qwen4ExpForConditionalGeneration")])
def test_others_are_refused_by_name(change, word, espalier, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SARVAM_105B | change))
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    assert word in espalier("plan", "--model", tmp_path, "--rollouts", file, expect=4).stderr
