"""`--objective sft` and `dpo` against plain autograd on transformers: gradients of every parameter, loss and means."""

import json
import random

import pytest
import torch
import torch.nn.functional as F

import oracle
from comparison import Trained, assert_equal_gradients
from make_model import VOCABULARY

SEED = 5
SCHEDULES = [{"schedule": "dense"}, {"schedule": "packed"}, {"schedule": "phased"}, {"schedule": "auto"},
             {"schedule": "phased", "token-budget": 1}, {"schedule": "phased", "token-budget": 7, "trunk-state": "recompute"},
             {"schedule": "packed", "token-budget": 5}]
LOSSES = [{"dpo-loss": "sigmoid"}, {"dpo-loss": "sigmoid", "label-smoothing": 0.1}, {"dpo-loss": "hinge", "dpo-beta": 0.4},
          {"dpo-loss": "ipo", "dpo-beta": 0.7}, {"dpo-loss": "robust", "label-smoothing": 0.2}, {"reference-free": True}]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_pairs(references=False):
    """Three prompts, the first with two pairs, answers of different lengths that begin alike. With references, some answers have kept sets."""
    draw = random.Random(SEED)
    ids = lambda count: [draw.randrange(3, VOCABULARY) for _ in range(count)]
    prompts = [ids(12), ids(9), ids(5)]
    pairs = []
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        begin = ids(3)
        pairs.append({"prompt_ids": prompt, "chosen_ids": begin + ids(draw.randrange(1, 6)), "rejected_ids": begin + ids(draw.randrange(1, 9))})
        if references:
            pairs[-1] |= {"ref_chosen_logps": -draw.uniform(5, 30), "ref_rejected_logps": -draw.uniform(5, 30)}
            for side in ("chosen", "rejected")[:len(pairs) % 3]:
                pairs[-1][f"{side}_kept_ids"] = [sorted({token, *draw.sample(range(VOCABULARY), 9)}) if token % 4 else None for token in pairs[-1][f"{side}_ids"]]
    return pairs


def answer_logprobs(model, pair, side):
    record = {"prompt_ids": pair["prompt_ids"], "response_ids": pair[f"{side}_ids"], "kept_ids": pair.get(f"{side}_kept_ids")}
    return oracle.response_logprobs(model, record)[0]


def references_of(model, pairs):
    with torch.no_grad():
        return [tuple(answer_logprobs(model, pair, side).sum().item() for side in ("chosen", "rejected")) for pair in pairs]


def pair_losses(model, pairs, references, options):
    """TRL's formulas, one loss a pair, and its means."""
    beta, smoothing = options.get("dpo-beta", 0.1), options.get("label-smoothing", 0.0)
    losses, rewards = [], []
    for pair, reference in zip(pairs, references):
        policy = [answer_logprobs(model, pair, side) for side in ("chosen", "rejected")]
        ratios = [p.sum() - (0.0 if options.get("reference-free") else r) for p, r in zip(policy, reference)]
        rewards.append([beta * ratio.item() for ratio in ratios])
        delta = ratios[0] - ratios[1]
        kind = options.get("dpo-loss", "sigmoid")
        if kind == "sigmoid":
            loss = -(1 - smoothing) * F.logsigmoid(beta * delta) - smoothing * F.logsigmoid(-beta * delta)
        elif kind == "hinge":
            loss = torch.relu(1 - beta * delta)
        elif kind == "ipo":
            loss = (ratios[0] / len(policy[0]) - ratios[1] / len(policy[1]) - 1 / (2 * beta)) ** 2
        else:
            loss = (-(1 - smoothing) * F.logsigmoid(beta * delta) + smoothing * F.logsigmoid(-beta * delta)) / (1 - 2 * smoothing)
        losses.append(loss)
    return torch.stack(losses).mean(), torch.tensor(rewards, dtype=torch.float64)


def dpo_gradients(model, pairs, references, options):
    model.zero_grad(set_to_none=True)
    loss, rewards = pair_losses(model, pairs, references, options)
    loss.backward()
    return loss.item(), rewards, oracle.of_files({name: p.grad.clone() for name, p in model.named_parameters()}, model)


@pytest.fixture(scope="module", params=["llama3_tied", "qwen3_moe"])
def family(request, model_of):
    return model_of(request.param), oracle.load_model(model_of(request.param), torch.float64)


@pytest.mark.parametrize("plan", SCHEDULES, ids=lambda plan: "_".join(map(str, plan.values())))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "_".join(map(str, loss.values())))
def test_dpo_has_the_gradient_of_autograd(plan, loss, family, espalier, tmp_path):
    directory, model = family
    pairs = make_pairs(references=True)
    found = Trained(espalier, directory, write(tmp_path / "pairs.jsonl", pairs), tmp_path, objective="dpo", **loss, **plan)
    references = [(pair["ref_chosen_logps"], pair["ref_rejected_logps"]) for pair in pairs]
    exact, rewards, gradients = dpo_gradients(model, pairs, references, loss)
    step = found.json["steps"][0]
    assert step["loss"] == pytest.approx(exact, rel=1e-10)
    assert step["rewards/chosen"] == pytest.approx(rewards[:, 0].mean().item(), rel=1e-9)
    assert step["rewards/rejected"] == pytest.approx(rewards[:, 1].mean().item(), rel=1e-9)
    assert step["rewards/accuracies"] == pytest.approx((rewards[:, 0] > rewards[:, 1]).double().mean().item())
    assert_equal_gradients(found.gradients, gradients, SEED)


def test_dpo_shares_prompts_and_common_beginnings(espalier, model_of, tmp_path):
    pairs = make_pairs()
    step = Trained(espalier, model_of("llama3_tied"), write(tmp_path / "p.jsonl", pairs), tmp_path, objective="dpo", schedule="phased").json["steps"][0]
    unique = {tuple((pair["prompt_ids"] + pair[side])[:depth]) for pair in pairs for side in ("chosen_ids", "rejected_ids")
              for depth in range(1, len(pair["prompt_ids"] + pair[side]))}  # an answer's last token has no row
    assert step["rows"]["logical"] == sum(2 * len(p["prompt_ids"]) + len(p["chosen_ids"]) + len(p["rejected_ids"]) for p in pairs)
    assert step["rows"]["physical"] <= len(unique) + 2 * len(pairs)


def test_the_reference_without_records_is_the_start_or_a_model(espalier, model_of, family, tmp_path):
    """At the start both are equal, and the loss is log 2; a second step still refers to the start."""
    directory, model = family
    pairs = make_pairs()
    path = write(tmp_path / "pairs.jsonl", pairs)
    two = Trained(espalier, directory, path, tmp_path / "two", objective="dpo", epochs=2, lr=1e-3).json["steps"]
    assert two[0]["loss"] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-6)
    assert two[0]["rewards/margins"] == 0 or abs(two[0]["rewards/margins"]) < 1e-12
    assert two[1]["loss"] < two[0]["loss"] and two[1]["rewards/margins"] > 0
    other = model_of("llama_untied")
    found = Trained(espalier, directory, path, tmp_path / "ref", objective="dpo", **{"ref-model": other})
    references = references_of(oracle.load_model(other, torch.float64), pairs)
    exact, _, gradients = dpo_gradients(model, pairs, references, {})
    assert found.json["steps"][0]["loss"] == pytest.approx(exact, rel=1e-10)
    assert_equal_gradients(found.gradients, gradients, SEED)


def test_trls_names_mean_those_of_pairs(espalier, model_of, tmp_path):
    pairs = write(tmp_path / "pairs.jsonl", make_pairs(references=True))
    named = Trained(espalier, model_of("llama3_tied"), pairs, tmp_path / "a", objective="dpo", beta=0.3, loss_type="hinge")
    own = Trained(espalier, model_of("llama3_tied"), pairs, tmp_path / "b", objective="dpo", dpo_beta=0.3, dpo_loss="hinge")
    assert named.json["steps"][0]["loss"] == own.json["steps"][0]["loss"]


@pytest.mark.parametrize("plan", SCHEDULES, ids=lambda plan: "_".join(map(str, plan.values())))
def test_sft_has_the_gradient_of_the_mean_over_tokens(plan, family, espalier, tmp_path):
    directory, model = family
    records = [{"prompt_ids": pair["prompt_ids"], "response_ids": pair[f"{side}_ids"]} for pair in make_pairs() for side in ("chosen", "rejected")]
    records[1]["loss_mask"] = [0] + [1] * (len(records[1]["response_ids"]) - 1)
    found = Trained(espalier, directory, write(tmp_path / "sft.jsonl", records), tmp_path, objective="sft", **plan)
    model.zero_grad(set_to_none=True)
    masks = [torch.tensor(record.get("loss_mask", [1] * len(record["response_ids"]))) for record in records]
    losses = torch.cat([-oracle.response_logprobs(model, record)[0][mask == 1] for record, mask in zip(records, masks)])
    losses.mean().backward()
    assert found.json["steps"][0]["loss"] == pytest.approx(losses.mean().item(), rel=1e-10)
    assert_equal_gradients(found.gradients, oracle.of_files({name: p.grad for name, p in model.named_parameters()}, model), SEED)


def test_dpo_continues_bit_for_bit(espalier, model_of, tmp_path):
    pairs = write(tmp_path / "pairs.jsonl", make_pairs(references=True))
    whole = Trained(espalier, model_of("llama3_tied"), pairs, tmp_path / "whole", objective="dpo", epochs=2, mini_batch_size=4)
    Trained(espalier, model_of("llama3_tied"), pairs, tmp_path / "part", objective="dpo", epochs=2, mini_batch_size=4, steps=2)
    espalier("train", "--resume", tmp_path / "part/out", "--rollouts", pairs, "--out", tmp_path / "rest", "--threads", 2, "--steps", 0)
    assert (tmp_path / "rest/model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("objective, record, expected", [
    ("dpo", {"prompt_ids": [5], "response_ids": [6]}, "chosen_ids and rejected_ids"),
    ("grpo", {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}, "--objective dpo"),
    ("dpo", {"prompt_ids": [5], "chosen_ids": [6]}, "rejected_ids"),
    ("dpo", {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": []}, "at least one token"),
    ("dpo", {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7], "reward": 1.0}, "reward"),
    ("dpo", {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7], "ref_chosen_logps": -1.0}, "ref_rejected_logps"),
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, "a tokenizer that can be read")])
def test_records_of_another_kind_are_refused_by_line(objective, record, expected, espalier, model_of, tmp_path):
    path = write(tmp_path / "records.jsonl", [record])
    outcome = espalier("train", "--model", model_of("llama3_tied"), "--rollouts", path, "--out", tmp_path / "out", "--objective", objective, expect=3)
    assert expected in outcome.stderr and ("records.jsonl" in outcome.stderr or "prompt" in record)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options, expected", [
    (["--objective", "dpo", "--kl-loss-coef", 0.1], "--kl-loss-coef"), (["--objective", "sft", "--policy-loss", "gspo"], "--policy-loss"),
    (["--objective", "dpo", "--dpo-loss", "ipo", "--label-smoothing", 0.1], "--label-smoothing"),
    (["--objective", "dpo", "--record", "trace"], "--record"), (["--objective", "dpo", "--delta", 3], "--delta")])
def test_options_without_a_meaning_are_refused(options, expected, espalier, model_of, tmp_path):
    pairs = write(tmp_path / "pairs.jsonl", make_pairs())
    outcome = espalier("train", "--model", model_of("llama3_tied"), "--rollouts", pairs, "--out", tmp_path / "out", *options, expect=2)
    assert expected in outcome.stderr


def test_verify_and_plan_take_pairs(espalier, model_of, tmp_path):
    pairs = write(tmp_path / "pairs.jsonl", make_pairs())
    for dtype in ("float32", "float64"):
        verdict = espalier("verify", "--model", model_of("llama3_tied"), "--rollouts", pairs, "--objective", "dpo", "--dtype", dtype, "--json").json
        assert verdict["verdict"] == "pass" and verdict["gradient_norm"] > 0 and verdict["logprob"]["other_bits"] == 0
    planned = espalier("plan", "--model", model_of("llama3_tied"), "--rollouts", pairs, "--objective", "dpo", "--json").json
    assert planned["rows"]["logical"] == 129
