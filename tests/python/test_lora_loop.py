"""LoRA where the program samples: the closed loop with adapters, and `generate --adapter`."""

import json
import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import oracle
from make_model import write_records
from test_generate import make_prompts, read
from test_grpo import metrics, tiny, without_times
from test_lora import TARGETS, make_adapter

peft = pytest.importorskip("peft")

LORA = ("--lora-rank", 4, "--lora-alpha", 8, "--lr", "1e-2", "--steps", 8, "--kl-loss-coef", 0.05)
EQUAL_FLOAT64 = 1e-10


@pytest.fixture(scope="module")
def base(espalier, tmp_path_factory):
    """A small model with the words of the built-in tasks."""
    run = tmp_path_factory.mktemp("lora_loop") / "base"
    espalier("grpo", "--out", run, *tiny("--steps", 1, "--test-freq", 0, "--epochs", 1))
    return run / "model"


@pytest.fixture(scope="module")
def finished(base, espalier, tmp_path_factory):
    run = tmp_path_factory.mktemp("lora_loop") / "run"
    espalier("grpo", "--model", base, "--out", run, "--dtype", "float64", *tiny(*LORA))
    return run


def steps_of(run):
    return [line for line in metrics(run) if line["kind"] == "step"]


def test_the_loop_trains_adapters_and_writes_no_weights_of_the_model(finished, base):
    steps = steps_of(finished)
    assert len(steps) == 8 and all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
    for folder in (finished / "model", *(finished / "checkpoints").iterdir()):
        assert (folder / "adapter_config.json").is_file() and not list(folder.glob("model*.safetensors")), folder
    config = peft.LoraConfig.from_pretrained(finished / "model")
    assert (config.r, config.lora_alpha, sorted(config.target_modules)) == (4, 8, sorted(TARGETS))
    tensors = load_file(finished / "model/adapter_model.safetensors")
    assert all(values.any() for values in tensors.values())  # B is 0 before the first step
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), finished / "model")
    assert {name.replace(".default.", ".") for name, _ in model.named_parameters() if "lora_" in name} == tensors.keys()


def test_the_reference_of_the_loop_is_the_model_without_its_adapters(finished, base):
    """The recorded ref_logprobs are those of the base, of every batch, and the policy's are others once B has moved."""
    records = read(finished / "last_rollouts.jsonl")
    wanted = oracle.score(oracle.load_model(base, torch.float64), records)[0]
    moved = 0
    for record, exact in zip(records, wanted, strict=True):
        assert record["ref_logprobs"] == pytest.approx(exact, abs=EQUAL_FLOAT64, rel=0)
        moved = max(moved, *(abs(x - y) for x, y in zip(record["old_logprobs"], exact)))
    assert moved > 1e-4


@pytest.mark.parametrize("more", [(), ("--train", "norms")], ids=["adapters_alone", "norms_beside"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_with_adapters_continues_to_the_same_bits(dtype, more, base, espalier, tmp_path):
    espalier("grpo", "--model", base, "--out", tmp_path / "whole", "--dtype", dtype, *more, *tiny(*LORA))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for name in ("model", "checkpoints/step-000008"):
        shutil.rmtree(tmp_path / "parts" / name)
    espalier("grpo", "--resume", tmp_path / "parts", "--threads", 2)
    assert without_times(metrics(tmp_path / "parts")) == without_times(metrics(tmp_path / "whole"))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "parts/model" / file).read_bytes() == (tmp_path / "whole/model" / file).read_bytes(), file


def test_a_loop_starts_from_the_adapter_that_is_given(finished, base, espalier, tmp_path):
    espalier("grpo", "--model", base, "--adapter", finished / "model", "--out", tmp_path / "run", "--dtype", "float64",
             *tiny("--lr", "1e-2", "--steps", 2, "--kl-loss-coef", 0.05))
    first, given = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "run/checkpoints/step-000000", finished / "model"))
    assert first.keys() == given.keys() and all(torch.equal(first[name], values) for name, values in given.items())
    assert json.loads((tmp_path / "run/model/adapter_config.json").read_text())["r"] == 4


def test_a_fresh_model_has_no_adapters(espalier, tmp_path):
    error = espalier("grpo", "--out", tmp_path / "run", *tiny("--lora-rank", 4), expect=2).stderr
    assert "--lora-rank" in error and "--model" in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["llama_untied", "qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_sampled_logprobs_of_an_adapter_are_those_of_score_bit_for_bit(family, dtype, espalier, model_of, tmp_path):
    model = model_of(family)
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=TARGETS[:4] if "moe" in family else TARGETS)
    words = ("--model", model, "--adapter", adapter, "--dtype", dtype, "--products", "own")
    prompts = write_records(make_prompts(), tmp_path / "prompts.jsonl")
    espalier("generate", *words, "--prompts", prompts, "--out", tmp_path / "sampled.jsonl", "--n", 3, "--max-response-length", 12)
    espalier("score", *words, "--rollouts", tmp_path / "sampled.jsonl", "--as", "logprobs", "--out", tmp_path / "scored.jsonl")
    sampled, scored = read(tmp_path / "sampled.jsonl"), read(tmp_path / "scored.jsonl")
    assert [record["rollout_logprobs"] for record in sampled] == [record["logprobs"] for record in scored]
    espalier("score", "--model", model, "--dtype", dtype, "--rollouts", tmp_path / "sampled.jsonl", "--as", "logprobs", "--out", tmp_path / "plain.jsonl")
    assert [record["logprobs"] for record in read(tmp_path / "plain.jsonl")] != [record["logprobs"] for record in scored]
