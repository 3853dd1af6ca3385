"""On-policy distillation in the closed loop (--teacher-model, --opd-kl-coef): the teacher's log-probs are those of `score`, the policy comes nearer to
it, a run continues with the same bits, and errors name what is missing."""

import json
import statistics

import pytest

from make_model import make_model
from test_grpo import metrics, tiny

LOOP = ("--kl-loss-coef", 0, "--rollout-is", "none", "--epochs", 1, "--mini-batch-size", 0)


@pytest.fixture(scope="module")
def teacher(espalier, tmp_path_factory):
    """A model of the built-in task that is not the one that a run begins with."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    espalier("grpo", "--out", run, *tiny("--warm-start-steps", 40, "--steps", 4, "--seed", 5))
    return run / "model"


def distilled(espalier, run, teacher, *more):
    return espalier("grpo", "--out", run, *tiny(*LOOP, "--teacher-model", teacher, "--opd-kl-coef", 1, *more))


def test_the_policy_comes_nearer_to_its_teacher_whose_log_probs_are_those_of_score(espalier, teacher, tmp_path):
    told = distilled(espalier, tmp_path / "run", teacher, "--steps", 40, "--train-batch-size", 16, "--lr", "1e-2").stdout
    assert "  teacher kl " in told
    gaps = [line["teacher_kl"] for line in metrics(tmp_path / "run") if line["kind"] == "step"]
    assert len(gaps) == 40 and statistics.mean(gaps[:5]) > 0.1 and statistics.mean(gaps[-5:]) < 0.5 * statistics.mean(gaps[:5])
    last = tmp_path / "run/last_rollouts.jsonl"
    records = [json.loads(line) for line in last.read_text().splitlines()]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({k: v for k, v in record.items() if k != "teacher_logprobs"}) + "\n" for record in records))
    espalier("score", "--model", teacher, "--rollouts", bare, "--out", tmp_path / "scored.jsonl", "--as", "teacher_logprobs", "--threads", 2)
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [record["teacher_logprobs"] for record in records] == [record["teacher_logprobs"] for record in scored]


def test_a_run_that_goes_on_has_the_same_bits(espalier, teacher, tmp_path):
    distilled(espalier, tmp_path / "whole", teacher)
    distilled(espalier, tmp_path / "parts", teacher, "--steps", 7)
    espalier("grpo", "--resume", tmp_path / "parts", "--steps", 16)
    for file in ("model/model.safetensors", "last_rollouts.jsonl"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_prompts_need_no_reward_beside_a_teacher(espalier, teacher, tmp_path):
    student = teacher.parent / "checkpoints/step-000000"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [3 + (7 * i + j) % 50 for j in range(9)]}) + "\n" for i in range(6)))
    words = ("grpo", "--model", student, "--prompts", prompts, "--out", tmp_path / "run", "--n", 3, "--train-batch-size", 2, "--steps", 2,
             "--max-response-length", 4, "--opd-kl-coef", 0.5)
    assert "--teacher-model" in espalier(*words, expect=2).stderr
    espalier(*words, "--teacher-model", teacher)
    steps = [line for line in metrics(tmp_path / "run") if line["kind"] == "step"]
    assert len(steps) == 2 and all(step["teacher_kl"] != 0 and step["reward"] == 0 for step in steps)


def test_what_cannot_be_is_said_before_the_run_begins(espalier, teacher, tmp_path):
    told = espalier("grpo", "--out", tmp_path / "run", *tiny("--teacher-model", teacher), expect=2).stderr
    assert "--teacher-model" in told and "--opd-kl-coef above 0" in told
    told = espalier("grpo", "--out", tmp_path / "run", *tiny("--teacher-model", tmp_path / "none", "--opd-kl-coef", 1), expect=3).stderr
    assert "none" in told and not (tmp_path / "run").exists()
    small = make_model("qwen3_tied", tmp_path / "small", vocab_size=8)
    told = espalier("grpo", "--out", tmp_path / "run", *tiny(*LOOP, "--teacher-model", small, "--opd-kl-coef", 1), expect=3).stderr
    assert "has 8 tokens" in told and "same vocabulary" in told
