"""config.json as publishers write it, of every family: it opens, and the update is exact; or the message says which field is in the way
and what to do."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import objective
import oracle
from comparison import Trained, assert_equal_gradients, assert_equal_series
from make_model import make_rollouts, randomised, write_records
from published_configs import IN_FP8, PUBLISHED, REFUSED
from test_train_parity import LOGPROB_FLOAT64

SEED = 41


def write_published(config, directory):
    """Random weights with this config.json, byte for byte what was given."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    kind = getattr(transformers, config["architectures"][0])
    model = randomised(kind(kind.config_class.from_pretrained(directory)).float(), SEED)
    model.save_pretrained(directory, safe_serialization=True)
    (directory / "config.json").write_text(json.dumps(config))
    return kind


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    records = [r for r in make_rollouts(SEED) if r["response_ids"]]
    return records, write_records(records, tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


def exact_step(kind, directory, records):
    resolved = objective.resolve({})
    return oracle.gradients(oracle.load_model(directory, torch.float64, kind), records, objective.advantages(records, resolved), resolved)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_opens_and_its_step_is_exact(name, espalier, rollouts, tmp_path):
    records, path = rollouts
    kind = write_published(PUBLISHED[name], tmp_path / "model")
    run = Trained(espalier, tmp_path / "model", path, tmp_path / "run", schedule="phased")
    _, _, exact, logprobs, _ = exact_step(kind, tmp_path / "model", records)
    assert_equal_gradients(run.gradients, exact, SEED)
    assert_equal_series(run.logprobs, "logprobs", logprobs, LOGPROB_FLOAT64)
    espalier("plan", "--model", tmp_path / "model", "--rollouts", path)
    if "rope_scaling" in PUBLISHED[name]:  # the file is carried through
        assert json.loads((run.out / "config.json").read_text())["rope_scaling"] == PUBLISHED[name]["rope_scaling"]


@pytest.mark.parametrize("name", IN_FP8)
def test_a_config_of_weights_in_fp8_is_planned(name, espalier, rollouts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(IN_FP8[name]))
    words = ("plan", "--model", tmp_path, "--rollouts", rollouts[1])
    espalier(*words)
    assert json.loads(espalier(*words, "--lora-rank", 2, "--lora-target", "o_proj", "--weights", "fp8", "--json").stdout)["fp8_bytes"] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_that_cannot_be_trained_is_refused_with_its_field(name, espalier, rollouts, tmp_path):
    config, words = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = espalier("plan", "--model", tmp_path, "--rollouts", rollouts[1], expect=4).stderr
    assert all(word in told for word in words), told


# Layers behind the others that predict further tokens, as GLM-4.5 and DeepSeek-V3 store them; as Qwen3-Next does.
FURTHER = {
    "glm_4_5": lambda hidden: {f"model.layers.3.{part}.weight": torch.randn(hidden) if "norm" in part else torch.randn(hidden, 2 * hidden) for part in
                               ("enorm", "hnorm", "eh_proj", "input_layernorm", "self_attn.q_proj", "shared_head.norm", "shared_head.head")},
    "qwen3_next": lambda hidden: {f"mtp.{part}.weight": torch.randn(hidden) for part in ("fc", "layers.0.input_layernorm", "norm")},
}


@pytest.mark.parametrize("name", FURTHER)
def test_layers_that_predict_further_tokens_are_passed_over_and_kept(name, espalier, rollouts, tmp_path):
    _, path = rollouts
    write_published(PUBLISHED[name], tmp_path / "model")
    plain = Trained(espalier, tmp_path / "model", path, tmp_path / "plain")
    tensors, further = load_file(tmp_path / "model/model.safetensors"), FURTHER[name](48)
    save_file({**tensors, **further}, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    told = espalier("train", "--model", tmp_path / "model", "--rollouts", path, "--out", tmp_path / "told").stderr
    assert f"{len(further)} tensors of layers that predict further tokens" in told
    run = Trained(espalier, tmp_path / "model", path, tmp_path / "with")
    assert all(torch.equal(run.gradients[parameter], gradient) for parameter, gradient in plain.gradients.items())
    written, alone = load_file(run.out / "model.safetensors"), load_file(plain.out / "model.safetensors")
    assert set(written) == set(alone) | set(further)
    assert all(torch.equal(written[tensor], value) for tensor, value in {**alone, **further}.items())


# -- routers whose logits are float32 in bfloat16 models --------------------------------------------------------------

@pytest.mark.rounding
@pytest.mark.parametrize("name", ["glm_4_5", "deepseek_v2_lite", "deepseek_v3_in_bfloat16", "kimi_k2_in_bfloat16"])
def test_a_router_in_float32_chooses_as_transformers_does_in_bfloat16(name, espalier, rollouts, tmp_path):
    """All logits get a common part near -8 (sigmoids; of a softmax nothing comes of it), where neighbouring bfloat16 numbers are 1/16
    apart and those of float32 2^-20: rounded logits tie, and other experts are chosen. Twice the error of transformers' bfloat16."""
    records, path = rollouts
    kind = write_published({**PUBLISHED[name], "torch_dtype": "bfloat16"}, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 0] = 30.0  # so that the first of 48 channels is near sqrt(48) in every normalised row
    for tensor in list(tensors):
        if tensor.endswith("mlp.gate.weight"):
            tensors[tensor.replace("mlp.gate", "post_attention_layernorm")][0] = 1.0
            tensors[tensor][:, 0] = -8.0 / 48 ** 0.5
    save_file({k: v if k.endswith("correction_bias") else v.bfloat16() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    exact = oracle.score(oracle.load_model(tmp_path / "model", torch.float64, kind), records)[0]
    theirs = oracle.score(oracle.load_model(tmp_path / "model", torch.bfloat16, kind), records)[0]
    out = tmp_path / "scored.jsonl"
    espalier("score", "--model", tmp_path / "model", "--rollouts", path, "--out", out, "--dtype", "bfloat16")
    ours = [json.loads(line)["logprobs"] for line in out.read_text().splitlines()]
    error = lambda found: sum((a - b) ** 2 for x, y in zip(found, exact, strict=True) for a, b in zip(x, y, strict=True)) ** 0.5
    assert error(ours) <= 2 * error(theirs), (error(ours), error(theirs))
