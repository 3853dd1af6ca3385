"""What `train --out` leaves: a directory that transformers loads, the right dtype, exact resume, the same bits twice."""

import filecmp
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import oracle
from comparison import Trained
from make_model import FAMILIES, make_rollouts, write_records

SEED = 31
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


def weights(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def load(directory, dtype="auto"):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    for parameter in model.parameters():  # products may round otherwise where a file's bytes are aligned otherwise
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_learning_rate_of_zero_gives_the_same_model_back(family, espalier, model_of, rollouts, tmp_path):
    out = tmp_path / "out"
    espalier("train", "--model", model_of(family), "--rollouts", rollouts, "--out", out, "--lr", 0)
    before, after = load(model_of(family)), load(out)
    assert after.config.architectures == before.config.architectures
    assert after.config.tie_word_embeddings == before.config.tie_word_embeddings
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert new.dtype == torch.float32 and torch.equal(old, new), name
    ids = torch.tensor([[5, 17, 40, 3, 8]])
    assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)


def test_fused_experts_are_the_same_model(espalier, model_of, rollouts, tmp_path):
    """Recent transformers may save all experts of a layer as one tensor: read as the same weights, and gradients have the form of the files."""
    fused = tmp_path / "fused"
    fused.mkdir()
    stacked = {name: p.detach().contiguous() for name, p in load(model_of("qwen3_moe")).named_parameters()}
    assert any(name.endswith(".experts.gate_up_proj") for name in stacked)
    save_file(stacked, fused / "model.safetensors")
    (fused / "config.json").write_text((model_of("qwen3_moe") / "config.json").read_text())
    runs = [Trained(espalier, directory, rollouts, tmp_path / name)
            for name, directory in (("a", model_of("qwen3_moe")), ("b", fused))]
    assert set(runs[1].gradients) == set(stacked)
    apart = oracle.of_files(runs[1].gradients, load(model_of("qwen3_moe")))
    for name, gradient in runs[0].gradients.items():
        assert torch.equal(gradient, apart[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_save_dtype_decides_the_dtype_of_the_weights(dtype, espalier, model_of, rollouts, tmp_path):
    out = tmp_path / "out"
    espalier("train", "--model", model_of("qwen2_untied"), "--rollouts", rollouts, "--out", out, "--save-dtype", dtype, "--lr", 1e-3)
    saved = weights(out)
    assert saved and all(tensor.dtype == DTYPES[dtype] for tensor in saved.values())
    assert load(out).dtype == DTYPES[dtype], "config.json and the weights disagree"


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_save_dtype_source_follows_the_tensors_and_not_config_json(stored, espalier, model_of, rollouts, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    config = json.loads((model_of("qwen2_untied") / "config.json").read_text())
    config["dtype"] = "bfloat16" if stored == "float32" else "float32"
    (model / "config.json").write_text(json.dumps(config))
    # Norms of another dtype, as mixed checkpoints have them: most numbers decide.
    kept = {name: tensor if "norm" in name else tensor.to(DTYPES[stored]) for name, tensor in weights(model_of("qwen2_untied")).items()}
    save_file(kept, model / "model.safetensors")
    espalier("train", "--model", model, "--rollouts", rollouts, "--out", out, "--lr", 0)
    assert all(tensor.dtype == DTYPES[stored] for tensor in weights(out).values())
    assert load(out).dtype == DTYPES[stored], "config.json and the weights disagree"


def test_training_moves_the_weights(espalier, model_of, rollouts, tmp_path):
    out = tmp_path / "out"
    espalier("train", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--out", out, "--lr", 1e-3)
    before, after = load(model_of("qwen3_tied")), load(out)
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert not torch.equal(old, new), name


def test_other_files_of_the_model_are_copied(espalier, stories, tmp_path):
    lines = (stories / "rollouts.jsonl").read_text().splitlines(keepends=True)[:2]
    (tmp_path / "two.jsonl").write_text("".join(lines))
    espalier("train", "--model", stories / "hf", "--rollouts", tmp_path / "two.jsonl", "--out", tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert filecmp.cmp(stories / "hf" / name, tmp_path / "out" / name, shallow=False)
    assert (tmp_path / "out/espalier").is_dir()
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    load(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resumed_training_gives_the_same_bits_as_uninterrupted(dtype, espalier, model_of, rollouts, tmp_path):
    common = ["--rollouts", rollouts, "--dtype", dtype, "--mini-batch-size", 5, "--epochs", 2, "--lr", 1e-3, "--warmup-steps", 3,
              "--threads", 2, "--json"]
    whole = espalier("train", "--model", model_of("qwen3_sharded"), *common, "--out", tmp_path / "whole").json
    assert len(whole["steps"]) >= 4
    first = espalier("train", "--model", model_of("qwen3_sharded"), *common, "--out", tmp_path / "first", "--steps", 2).json
    rest = espalier("train", "--resume", tmp_path / "first", *common, "--out", tmp_path / "second").json
    assert [s["step"] for s in first["steps"] + rest["steps"]] == [s["step"] for s in whole["steps"]]
    assert [s["loss"] for s in first["steps"] + rest["steps"]] == [s["loss"] for s in whole["steps"]]
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "second")
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_two_runs_of_one_command_give_the_same_bits(espalier, model_of, rollouts, tmp_path):
    runs = [Trained(espalier, model_of("llama3_tied"), rollouts, tmp_path / name, dtype="float32", schedule="phased")
            for name in ("a", "b")]
    for name, gradient in runs[0].gradients.items():
        assert torch.equal(gradient, runs[1].gradients[name]), name
    assert runs[0].logprobs == runs[1].logprobs
    one, two = weights(runs[0].out), weights(runs[1].out)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_gradients_of_a_tied_head_stand_once(espalier, model_of, rollouts, tmp_path):
    run = Trained(espalier, model_of("qwen3_tied"), rollouts, tmp_path)
    assert "model.embed_tokens.weight" in run.gradients and "lm_head.weight" not in run.gradients
    assert json.loads((run.out / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_layer_behind_the_others_that_predicts_further_tokens_does_not_run_and_stays(espalier, model_of, rollouts, tmp_path):
    """GLM-4.5 and DeepSeek-V3 store it as one layer more than num_hidden_layers; transformers reads the file without it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text((model_of("glm4_moe") / "config.json").read_text())
    stored = weights(model_of("glm4_moe"))
    further = {name.replace(".layers.2.", ".layers.3."): tensor.clone() for name, tensor in stored.items() if ".layers.2." in name}
    further["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    save_file({**stored, **further}, directory / "model.safetensors")
    runs = [Trained(espalier, model, rollouts, tmp_path / name) for name, model in (("a", model_of("glm4_moe")), ("b", directory))]
    for name, gradient in runs[0].gradients.items():
        assert torch.equal(gradient, runs[1].gradients[name]), name
    written = weights(tmp_path / "b" / "out")
    assert {name for name in written if ".layers.3." in name} == set(further)
    assert all(torch.equal(written[name], tensor) for name, tensor in further.items())


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2_moe"])
def test_correction_biases_keep_their_digits_in_bfloat16(family, espalier, model_of, rollouts, tmp_path):
    """Of two experts whose scores differ by less than bfloat16 tells apart, the bias decides: it is held as the file has it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text((model_of(family) / "config.json").read_text())
    stored = weights(model_of(family))
    for name, tensor in stored.items():
        if name.endswith("correction_bias"):  # experts that only the last digits of a float32 tell apart
            stored[name] = 8 + torch.linspace(0, 1e-3, len(tensor))
        elif name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
            stored[name] = torch.zeros_like(tensor)
    save_file(stored, directory / "model.safetensors")
    words = ["train", "--model", directory, "--rollouts", rollouts, "--dtype", "bfloat16", "--save-dtype", "bfloat16", "--lr", 1e-3]
    outcome = espalier(*words, "--out", tmp_path / "out", "--json").json
    loads = [load for load in outcome["steps"][0]["router"]["load"] if load is not None]
    assert loads and all(load[0] == 0 and load[-1] > 0 for load in loads), loads
    after = weights(tmp_path / "out")
    for name, tensor in stored.items():
        if name.endswith("correction_bias"):
            assert after[name].dtype == torch.float32 and torch.equal(after[name], tensor), name
