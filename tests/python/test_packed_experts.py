"""gpt-oss: experts of a layer in one tensor of the files, and experts in MXFP4, against transformers' own reading."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import oracle
from comparison import Trained
from make_model import make_model, make_rollouts, write_records

SEED, EXPERTS, HIDDEN, INNER = 23, 6, 64, 32
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """(experts in MXFP4, the same numbers in bfloat16 as transformers reads them)."""
    folder = tmp_path_factory.mktemp("mxfp4")
    plain = make_model("gpt_oss_moe", folder / "plain", hidden_size=HIDDEN, intermediate_size=INNER, dtype="bfloat16")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(plain / "model.safetensors").items()}
    generator, packed = torch.Generator().manual_seed(SEED), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 127, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        del packed[name]
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert tensors[name].shape == (experts, inputs, outputs)
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    for directory, values, more in (("mxfp4", packed, {"quantization_config": MXFP4}), ("bfloat16", tensors, {})):
        (folder / directory).mkdir()
        save_file(values, folder / directory / "model.safetensors", metadata={"format": "pt"})
        (folder / directory / "config.json").write_text(json.dumps(config | more))
    return folder / "mxfp4", folder / "bfloat16"


def test_mxfp4_is_read_as_transformers_reads_it(directories, rollouts, espalier, tmp_path):
    ours, theirs = (Trained(espalier, model, rollouts, tmp_path / model.name, lr=1e-3) for model in directories)
    for name, gradient in theirs.gradients.items():
        assert torch.equal(gradient, ours.gradients[name]), name
    assert ours.logprobs == theirs.logprobs
    exact, _ = oracle.score(oracle.load_model(directories[1], torch.float64), make_rollouts(SEED))
    for found, wanted in zip(theirs.logprobs, exact):
        assert found["logprobs"] == pytest.approx(wanted, rel=0, abs=1e-10)


def test_what_is_written_is_not_quantised(directories, rollouts, espalier, tmp_path):
    """A learning rate of 0 gives the model that transformers reads, under the names and shapes of its own files."""
    espalier("train", "--model", directories[0], "--rollouts", rollouts, "--lr", 0, "--out", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", directories[1]))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("damage, word", [
    (lambda t, n: t.pop(n + "_scales"), "missing"),
    (lambda t, n: t.update({n + "_scales": t[n + "_scales"][:, :-1].contiguous()}), "missing"),
    (lambda t, n: t.update({n + "_blocks": t[n + "_blocks"].to(torch.int32)}), "missing"),
    (lambda t, n: t.pop(n + "_bias"), "missing")])
def test_damaged_blocks_are_refused_by_name(damage, word, directories, rollouts, espalier, tmp_path):
    name, model = "model.layers.1.mlp.experts.gate_up_proj", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((directories[0] / "config.json").read_text())
    tensors = load_file(directories[0] / "model.safetensors")
    damage(tensors, name)
    save_file(tensors, model / "model.safetensors")
    told = espalier("train", "--model", model, "--rollouts", rollouts, "--out", tmp_path / "out", expect=3).stderr
    assert word in told and "model.layers.1.mlp.experts." in told and not (tmp_path / "out").exists()


def test_other_quantisations_are_refused(directories, rollouts, espalier, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((directories[0] / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (model / "config.json").write_text(json.dumps(config))
    told = espalier("train", "--model", model, "--rollouts", rollouts, "--out", tmp_path / "out", expect=4).stderr
    assert "quantization_config" in told and "mxfp4" in told
