"""Reward models with adapters: peft's sequence classifiers, their gradients, files and scores."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import test_lora
from comparison import assert_equal_gradients
from make_model import make_model
from test_lora import PREFIX, TARGETS, OneLabel, load_peft, without_adapter_name
from test_reward_model import CENTERED, SCHEDULES, Run, answers_of, make_lists, make_pairs, rewards_of, set_loss, write

peft = pytest.importorskip("peft")

SEED = 43


CLASSIFIER = OneLabel(transformers.AutoModelForSequenceClassification)


def make_adapter(base, folder, **settings):
    return test_lora.make_adapter(base, folder, kind=CLASSIFIER, task="SEQ_CLS", **{"target_modules": TARGETS, **settings})


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification"])
@pytest.mark.parametrize("plan", [SCHEDULES[0], SCHEDULES[5]], ids=["dense", "phased_7_rows"])
def test_gradients_are_those_of_pefts_sequence_classifier(plan, head, espalier, tmp_path):
    base = make_model("llama3_tied", tmp_path / "base", seed=4, head=head)
    records = make_lists()
    adapter = make_adapter(base, tmp_path / "adapter")
    model = load_peft(base, adapter, CLASSIFIER)
    losses = [set_loss(rewards_of(model, record), [rank for _, rank in answers_of(record)], 0.0, 0.03) for record in records]
    torch.stack(losses).mean().backward()
    exact = without_adapter_name({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    assert PREFIX + "score.weight" in exact
    run = Run(espalier, base, write(tmp_path / "records.jsonl", records), tmp_path, adapter=adapter, **plan, **CENTERED)
    assert_equal_gradients(run.gradients, exact, SEED)


def test_peft_loads_the_written_adapter_and_gives_the_rewards_of_score(espalier, model_of, tmp_path):
    base, records = model_of("llama3_tied"), make_pairs()
    path = write(tmp_path / "records.jsonl", records)
    run = Run(espalier, base, path, tmp_path / "a", lora_rank=4, lr=0.01, epochs=2, mini_batch_size=4)
    config = peft.LoraConfig.from_pretrained(run.out)
    assert config.task_type == "SEQ_CLS" and config.modules_to_save == ["score"] and not list(run.out.glob("model*"))
    assert PREFIX + "score.bias" not in load_file(run.out / "adapter_model.safetensors")
    espalier("score", "--model", base, "--adapter", run.out, "--rollouts", path, "--out", tmp_path / "scored.jsonl", "--dtype", "float64")
    exact = torch.cat([rewards_of(load_peft(base, run.out, CLASSIFIER), record) for record in records])
    found = [json.loads(line)["reward"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert found == pytest.approx(exact.tolist(), rel=1e-9)


def test_a_merged_reward_model_gives_the_rewards_of_its_adapter(espalier, model_of, tmp_path):
    base, records = model_of("llama3_tied"), make_pairs()
    adapter, path = make_adapter(base, tmp_path / "adapter"), write(tmp_path / "records.jsonl", make_pairs())
    espalier("merge", adapter, "--model", base, "--out", tmp_path / "merged", "--save-dtype", "float64")
    espalier("score", "--model", tmp_path / "merged", "--rollouts", path, "--out", tmp_path / "scored.jsonl", "--dtype", "float64")
    exact = torch.cat([rewards_of(load_peft(base, adapter, CLASSIFIER), record) for record in records])
    found = [json.loads(line)["reward"] for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert found == pytest.approx(exact.tolist(), rel=1e-9)


def test_resuming_equals_never_having_stopped(espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_pairs())
    words = ("train", "--objective", "reward", "--rollouts", path, "--mini-batch-size", 4, "--lr", 1e-3, "--epochs", 2)
    start = ("--model", model_of("llama3_tied"), "--lora-rank", 4)
    espalier(*words, *start, "--out", tmp_path / "whole")
    espalier(*words, *start, "--out", tmp_path / "first", "--steps", 1)
    espalier(*words, "--resume", tmp_path / "first", "--out", tmp_path / "second")
    for file in ("adapter_model.safetensors", "espalier/state.safetensors", "adapter_config.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def test_verify_judges_the_adapter_of_a_reward_model(espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", make_lists())
    report = espalier("verify", "--objective", "reward", "--model", model_of("llama3_tied"), "--rollouts", path, "--dtype", "float64", "--lora-rank", 4, "--json").json
    assert report["verdict"] == "pass" and len(report["parameters"]) == 2 * 3 * 7 + 1
