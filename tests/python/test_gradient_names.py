"""Files for users have the names, shapes and layouts of the model's own files: `--gradients` against transformers' autograd without any
renaming in between, and in every form that files of a family have. The sweep of all families is in test_train_parity.py."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import objective
import oracle
from comparison import FLOAT64_RELATIVE, Trained, assert_equal_gradients, relative_errors
from make_model import make_model, make_rollouts, write_records
from test_packed_experts import MXFP4

SEED = 17


@pytest.fixture(scope="module")
def records():
    return make_rollouts(SEED)


@pytest.fixture(scope="module")
def rollouts(records, tmp_path_factory):
    return write_records(records, tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


def tensors(directory):
    return {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def autograd(directory, records):
    """{name: gradient} as model.named_parameters() has the names."""
    model, options = oracle.load_model(directory, torch.float64), objective.resolve({})
    pairs = [oracle.response_logprobs(model, record) for record in records]
    advantages = objective.advantages(records, options)
    objective.loss(records, [p[0] for p in pairs], [p[1] for p in pairs], advantages, options)[0].backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def with_own_modules(directory, out):
    """The same model in files whose tensors are the modules of transformers: experts stacked, Nemotron-H below "model."."""
    model = oracle.load_model(directory, torch.float64)
    out.mkdir()
    held = {name: b for name, b in model.named_buffers() if name.endswith("correction_bias")}
    save_file({name: p.detach().float().contiguous() for name, p in [*model.named_parameters(), *held.items()]}, out / "model.safetensors")
    shutil.copy(directory / "config.json", out)
    return out


@pytest.mark.parametrize("family", ["phi3", "glm4", "gpt_oss_moe", "qwen3_tied", "qwen3_sharded", "qwen3_next", "granite_hybrid"])
def test_gradients_have_the_names_and_shapes_of_parameters(family, espalier, model_of, records, rollouts, tmp_path):
    exact = autograd(model_of(family), records)
    run = Trained(espalier, model_of(family), rollouts, tmp_path)
    assert set(run.gradients) <= set(tensors(model_of(family)))
    assert_equal_gradients(run.gradients, exact, SEED)


@pytest.mark.parametrize("family", ["nemotron_h", "nemotron_h_moe", "qwen3_moe", "deepseek_v3_moe"])
def test_gradients_of_files_with_the_names_of_modules(family, espalier, model_of, records, rollouts, tmp_path):
    """What is written has the form of the files that were read; the numbers do not depend on it."""
    directory = with_own_modules(model_of(family), tmp_path / "model")
    exact = autograd(model_of(family), records)
    run = Trained(espalier, directory, rollouts, tmp_path / "run")
    assert set(run.gradients) <= set(tensors(directory))
    assert_equal_gradients(run.gradients, exact, SEED)
    assert {name: t.shape for name, t in tensors(run.out).items()} == {name: t.shape for name, t in tensors(directory).items()}
    transformers.AutoModelForCausalLM.from_pretrained(run.out)
    again = Trained(espalier, model_of(family), rollouts, tmp_path / "again")
    assert set(again.gradients) <= set(tensors(model_of(family)))


@pytest.mark.parametrize("family", ["nemotron_h", "mixtral_moe", "kimi_linear_moe", "granite_moe_shared"])
def test_a_file_of_gradients_loads_as_the_models_file_does(family, espalier, model_of, records, rollouts, tmp_path):
    """transformers reads it in the place of model.safetensors: the parameters are then the gradients of autograd."""
    exact = autograd(model_of(family), records)
    run = Trained(espalier, model_of(family), rollouts, tmp_path)
    (tmp_path / "as_model").mkdir()
    shutil.copy(model_of(family) / "config.json", tmp_path / "as_model")
    held = {name: t.double() for name, t in tensors(model_of(family)).items() if name.endswith("correction_bias")}
    save_file({**run.gradients, **held}, tmp_path / "as_model/model.safetensors", metadata={"format": "pt"})
    with oracle.Wide():
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "as_model", dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    assert_equal_gradients({name: p.detach() for name, p in loaded.named_parameters()}, exact, SEED)


def test_dense_layers_of_kimi_linear_as_published(espalier, model_of, rollouts, tmp_path):
    """The published files have them below "mlp."; those that transformers writes, below the module of experts."""
    directory = tmp_path / "model"
    directory.mkdir()
    moved = {f"block_sparse_moe.{kind}_proj.weight": f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    stored = {}
    for name, tensor in tensors(model_of("kimi_linear_moe")).items():
        head, _, rest = name.partition("model.layers.0.")
        stored[head + "model.layers.0." + moved.get(rest, rest) if rest else name] = tensor
    save_file(stored, directory / "model.safetensors")
    shutil.copy(model_of("kimi_linear_moe") / "config.json", directory)
    ours, theirs = (Trained(espalier, model, rollouts, tmp_path / name) for name, model in (("a", directory), ("b", model_of("kimi_linear_moe"))))
    assert set(ours.gradients) < set(stored) and "model.layers.0.mlp.up_proj.weight" in ours.gradients
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in theirs.gradients
    assert torch.equal(ours.gradients["model.layers.0.mlp.up_proj.weight"], theirs.gradients["model.layers.0.block_sparse_moe.up_proj.weight"])
    assert set(tensors(ours.out)) == set(stored)


@pytest.mark.parametrize("family, words, names", [
    ("phi3", "qkv_proj", ["self_attn.qkv_proj.weight"]), ("phi3", "norms", ["input_layernorm.weight", "post_attention_layernorm.weight"]),
    ("glm4", r"model\.layers\.\d\.mlp\.gate_up_proj\.weight", ["mlp.gate_up_proj.weight"]),
    ("gpt_oss_moe", "experts", [f"mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")]),
    ("gpt_oss_moe", "sinks", ["self_attn.sinks"])])
def test_a_part_of_a_model(family, words, names, espalier, model_of, records, rollouts, tmp_path):
    exact = autograd(model_of(family), records)
    run = Trained(espalier, model_of(family), rollouts, tmp_path, train=words)
    wanted = {f"model.layers.{layer}.{name}" for layer in range(3) for name in names} | ({"model.norm.weight"} if words == "norms" else set())
    assert set(run.gradients) == wanted
    total = torch.stack([g.norm() for g in exact.values()]).norm()
    for name, gradient in run.gradients.items():
        assert (gradient - exact[name]).norm() <= FLOAT64_RELATIVE * max(exact[name].norm(), 1e-6 * total), name


def test_a_part_of_a_tensor_is_zero_where_nothing_trains(espalier, model_of, records, rollouts, tmp_path):
    exact, run = autograd(model_of("phi3"), records), Trained(espalier, model_of("phi3"), rollouts, tmp_path, train="q_proj")
    assert len(run.gradients) == 3
    for name, gradient in run.gradients.items():
        assert gradient.shape == exact[name].shape and not gradient[48:].any()
        assert (gradient[:48] - exact[name][:48]).norm() <= FLOAT64_RELATIVE * exact[name].norm()


def test_layers_of_nemotron_h_are_numbered_as_in_its_files(espalier, model_of, rollouts, tmp_path):
    run = Trained(espalier, model_of("nemotron_h"), rollouts, tmp_path, train=r"backbone\.layers\.2\..*")
    stored = {name for name in tensors(model_of("nemotron_h")) if name.startswith("backbone.layers.2.")}
    assert stored and set(run.gradients) == stored
    told = espalier("train", "--model", model_of("nemotron_h"), "--rollouts", rollouts, "--gradients", tmp_path / "g", "--train",
                    r"model\.layers\.2\..*", expect=2).stderr
    assert "matches no parameter" in told


def test_experts_in_mxfp4_have_the_names_of_their_matrices(espalier, rollouts, tmp_path):
    """Where biases, routers and attention train beside them, all tensors are those of the model in bfloat16."""
    plain = make_model("gpt_oss_moe", tmp_path / "plain", hidden_size=64, intermediate_size=32, dtype="bfloat16")
    stored, packed = tensors(plain), {}
    for name, tensor in stored.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            packed[name + "_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            packed[name + "_scales"] = torch.full((experts, outputs, inputs // 32), 124, dtype=torch.uint8)
        else:
            packed[name] = tensor.to(torch.bfloat16)
    (tmp_path / "mxfp4").mkdir()
    save_file(packed, tmp_path / "mxfp4/model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": MXFP4}
    (tmp_path / "mxfp4/config.json").write_text(json.dumps(config))
    whole = Trained(espalier, tmp_path / "mxfp4", rollouts, tmp_path / "whole")
    assert {name: t.shape for name, t in whole.gradients.items()} == {name: t.shape for name, t in stored.items()}
    part = Trained(espalier, tmp_path / "mxfp4", rollouts, tmp_path / "part", train="attention")
    assert part.gradients and all(torch.equal(g, whole.gradients[name]) and ".self_attn." in name for name, g in part.gradients.items())


@pytest.mark.parametrize("family", ["phi3", "nemotron_h", "gpt_oss_moe"])
@pytest.mark.parametrize("words", ["all", "attention"])
def test_a_trace_holds_the_tensors_of_files(family, words, espalier, model_of, rollouts, tmp_path):
    espalier("train", "--model", model_of(family), "--rollouts", rollouts, "--dtype", "float64", "--lr", 1e-3, "--train", words,
             "--record", tmp_path / "trace", "--record-every", 1)
    checkpoint = load_file(next((tmp_path / "trace/checkpoints").iterdir()))
    assert checkpoint and set(checkpoint) <= set(tensors(model_of(family)))
    found, = espalier("replay", tmp_path / "trace", "--json").json["checkpoints"]
    assert found["max_abs"] == 0


def test_a_checkpoint_of_another_trainer_is_compared_by_the_names_of_files(espalier, model_of, rollouts, tmp_path):
    """transformers saved it: the same weights under its own names."""
    espalier("train", "--model", model_of("glm4"), "--rollouts", rollouts, "--dtype", "float64", "--lr", 1e-3, "--record", tmp_path / "trace",
             "--record-every", 1, "--out", tmp_path / "out", "--save-dtype", "float64")
    checkpoint = next((tmp_path / "trace/checkpoints").iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, checkpoint)
    found, = espalier("replay", tmp_path / "trace", "--json").json["checkpoints"]
    assert found["max_abs"] == 0


def test_parameters_beside_adapters(espalier, model_of, rollouts, tmp_path):
    """modules_to_save of a fused matrix: written in the tensor of the model's files, and read again."""
    words = ["train", "--model", model_of("phi3"), "--rollouts", rollouts, "--dtype", "float64"]
    espalier(*words, "--lr", 1e-2, "--lora-rank", 2, "--lora-target", "qkv_proj", "--train", "gate_up_proj", "--out", tmp_path / "adapter",
             "--gradients", tmp_path / "g.safetensors")
    for path in (tmp_path / "adapter/adapter_model.safetensors", tmp_path / "g.safetensors"):
        stored = load_file(path)
        assert stored["base_model.model.model.layers.0.mlp.gate_up_proj.weight"].shape == (160, 48)
        assert stored["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"].shape == (96, 2)
    listed = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["modules_to_save"]
    assert listed == [f"model.layers.{layer}.mlp.gate_up_proj" for layer in range(3)]
    espalier("merge", "--model", model_of("phi3"), "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged", "--save-dtype", "float64")
    merged, before = tensors(tmp_path / "merged"), tensors(model_of("phi3"))
    name = "model.layers.1.mlp.gate_up_proj.weight"
    trained = load_file(tmp_path / "adapter/adapter_model.safetensors")["base_model.model." + name]
    assert torch.equal(merged[name], trained) and (trained - before[name]).abs().max() > 1e-3
    espalier(*words, "--adapter", tmp_path / "adapter", "--lr", 0, "--out", tmp_path / "again")
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in load_file(tmp_path / "adapter/adapter_model.safetensors").items())


def test_relative_errors_notice_another_layout(espalier, model_of, records, rollouts, tmp_path):
    """Gate and up of gpt-oss stand in turn: halves behind each other have the same shape and are another gradient."""
    exact, run = autograd(model_of("gpt_oss_moe"), records), Trained(espalier, model_of("gpt_oss_moe"), rollouts, tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    other = torch.cat((run.gradients[name][..., ::2], run.gradients[name][..., 1::2]), -1)
    assert other.shape == exact[name].shape and relative_errors({**run.gradients, name: other}, exact)[name] > 0.1
