"""On-policy distillation (--opd-kl-coef): gradients against plain autograd on the formula of docs/objectives.md in every plan, and the way of
teacher_logprobs through score, metrics and errors."""

import functools
import json

import pytest
import torch

import oracle
from comparison import FLOAT64_RELATIVE, Trained, relative_errors
from make_model import make_rollouts, write_records
from rule_cases import PLANS, case_with

SEED, COEFFICIENT, CLIP = 71, .7, .4
LOSSES = ("vanilla", "reinforce", "dppo_tv", "icepop")


@pytest.fixture(scope="module")
def case_of(model_of, tmp_path_factory):
    """Returns (model directory, oracle's model, records, their file), with kept sets or without."""
    return functools.cache(lambda kept: case_with(fill, SEED, kept, model_of("qwen3_tied"), tmp_path_factory.mktemp("distillation")))


def fill(draw, i, record, logprobs):
    if i % 3:  # others have nothing but the teacher
        record["advantage"] = [draw.gauss(0, 1) for _ in logprobs]
    record["old_logprobs"] = [x + draw.gauss(0, .1) for x in logprobs]
    record["rollout_logprobs"] = [x + draw.gauss(0, .1) for x in logprobs]
    record["teacher_logprobs"] = [x + draw.gauss(0, .5) for x in logprobs]


def plain_loss(loss, lp, old, advantage):
    ratio = (lp - old).exp()
    if loss == "reinforce":
        return -advantage * lp
    if loss == "icepop":
        return -advantage * ratio * ((ratio >= .2) & (ratio <= 5)).detach()
    if loss == "dppo_tv":
        moved = (lp.exp() - old.exp()).detach()
        valid = torch.where(advantage > 0, moved <= .2, moved >= -.2)
        return -advantage * ratio.detach().clamp(max=3) * lp * valid
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(.8, 1.2))
    return torch.where(advantage < 0, torch.minimum(clipped, -3 * advantage), clipped)


def plain(model, records, loss, clip):
    """The gradient of the formula, and the mean of old - teacher."""
    model.zero_grad(set_to_none=True)
    terms, gaps = [], []
    for record in records:
        lp = oracle.response_logprobs(model, record)[0]
        tensor = lambda name: torch.tensor(record[name], dtype=torch.float64)
        mask, old = tensor("loss_mask"), tensor("rollout_logprobs" if loss == "icepop" else "old_logprobs")
        gap = old - tensor("teacher_logprobs")
        advantage = (tensor("advantage") if "advantage" in record else torch.zeros_like(mask)) - COEFFICIENT * gap.clamp(max=clip)
        terms.append((plain_loss(loss, lp, old, advantage) * mask).sum())
        gaps.append(gap[mask == 1])
    (sum(terms) / sum(map(len, gaps))).backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return oracle.of_files(found, model), float(torch.cat(gaps).mean())


def metrics_of(run):
    return json.loads((run.out / "espalier/metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("loss, plan", [(LOSSES[i % len(LOSSES)], i % len(PLANS)) for i in range(8)])
def test_gradients_are_those_of_the_formula_in_every_plan(loss, plan, espalier, case_of, tmp_path):
    turn = LOSSES.index(loss) + plan
    directory, model, records, path = case_of(turn % 2 == 1)
    clip = CLIP if turn % 3 else float("inf")
    exact, gap = plain(model, records, loss, clip)
    run = Trained(espalier, directory, path, tmp_path, policy_loss=loss, opd_kl_coef=COEFFICIENT, opd_kl_clip=clip,
                  rollout_metrics=tmp_path / "each.csv", **PLANS[plan])
    errors = relative_errors(run.gradients, exact)
    assert max(errors.values()) <= FLOAT64_RELATIVE, f"seed {SEED}: {max(errors, key=errors.get)} is off by {max(errors.values()):.2e}"
    assert metrics_of(run)["teacher_kl"] == pytest.approx(gap, rel=FLOAT64_RELATIVE)
    head, *rows = [line.split(",") for line in (tmp_path / "each.csv").read_text().splitlines()]
    shares = [[row[head.index(name)] for name in ("teacher_kl", "loss_tokens")] for row in rows]
    tokens = sum(int(count) for _, count in shares)
    assert sum(float(mean) * int(count) for mean, count in shares if int(count)) / tokens == pytest.approx(gap, rel=FLOAT64_RELATIVE)


def test_the_teacher_changes_the_gradient(case_of):
    """So a run that ignored the options would not pass."""
    _, model, records, _ = case_of(False)
    bounded, free = (plain(model, records, "vanilla", clip)[0] for clip in (CLIP, float("inf")))
    assert max(relative_errors(bounded, free).values()) > 1e-3


def test_a_model_that_scored_the_records_is_a_teacher(espalier, model_of, tmp_path):
    """Without rewards, advantages and old log-probs."""
    student, teacher = model_of("qwen3_tied"), model_of("llama3_tied")
    records = make_rollouts(SEED)
    for record in records:
        del record["reward"]
    path, scored = write_records(records, tmp_path / "records.jsonl"), tmp_path / "scored.jsonl"
    espalier("score", "--model", teacher, "--rollouts", path, "--out", scored, "--as", "teacher_logprobs", "--dtype", "float64")
    exact = oracle.load_model(student, torch.float64)
    records = [json.loads(line) for line in scored.read_text().splitlines()]
    for record, logprobs in zip(records, oracle.score(exact, records)[0]):
        record.setdefault("loss_mask", [1] * len(logprobs))
        record["old_logprobs"] = logprobs
    found = Trained(espalier, student, scored, tmp_path / "other", opd_kl_coef=COEFFICIENT)
    assert max(relative_errors(found.gradients, plain(exact, records, "reinforce", float("inf"))[0]).values()) <= FLOAT64_RELATIVE
    espalier("score", "--model", student, "--rollouts", path, "--out", scored, "--as", "teacher_logprobs", "--dtype", "float64", "--overwrite")
    own = Trained(espalier, student, scored, tmp_path / "own", opd_kl_coef=COEFFICIENT)
    assert metrics_of(own)["teacher_kl"] == 0 and not any(gradient.any() for gradient in own.gradients.values())


def test_records_without_the_teacher_are_named_before_the_first_step(espalier, case_of, tmp_path):
    directory, _, records, _ = case_of(False)
    bare = [{name: value for name, value in record.items() if name != "teacher_logprobs" or i != 5} for i, record in enumerate(records)]
    path = write_records(bare, tmp_path / "records.jsonl")
    outcome = espalier("train", "--model", directory, "--rollouts", path, "--out", tmp_path / "out", "--opd-kl-coef", "1", expect=3)
    assert "records.jsonl:6" in outcome.stderr
    assert "teacher_logprobs, for --opd-kl-coef 1" in outcome.stderr and "--as teacher_logprobs" in outcome.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_other_objectives_have_no_teacher(objective, espalier, case_of, tmp_path):
    directory, _, _, path = case_of(False)
    outcome = espalier("train", "--model", directory, "--rollouts", path, "--out", tmp_path / "out", "--opd-kl-coef", "1", "--objective", objective, expect=2)
    assert "--opd-kl-coef" in outcome.stderr
