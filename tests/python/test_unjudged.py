"""Responses that nobody judged, as in TRL: no reward, statistics over the others, advantage 0. Groups of one under TRL's names."""

import json

import pytest
import torch
from trl.trainer.utils import nanstd

from make_model import write_records
from text_model import byte_level_tokenizer, make_text_model, read_lines, write_lines

HALF = "None if len({0}) % 2 else float(len({0}))"
FORMS = {
    "verl": f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {HALF.format('solution_str')}\n",
    "dict": f"def compute_score(solution_str, **_):\n    return {{'score': {HALF.format('solution_str')}, 'seen': True}}\n",
    "batch": f"def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return [{HALF.format('text')} for text in solution_strs]\n",
    "trl": f"def compute_score(prompts, completions, **_):\n    return [{HALF.format('text')} for text in completions]\n",
}
FORMS["dict"] = FORMS["dict"].replace("(solution_str, **_)", "(data_source, solution_str, ground_truth, extra_info)")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return make_text_model(tmp_path_factory.mktemp("text") / "model", byte_level_tokenizer(["one two three"] * 3, 300))


@pytest.mark.parametrize("form", FORMS)
def test_generate_leaves_the_reward_out(form, espalier, text_model, tmp_path):
    (tmp_path / "reward.py").write_text(FORMS[form])
    prompts, out = write_lines([{"prompt": "one"}, {"prompt": "two"}], tmp_path / "prompts.jsonl"), tmp_path / "out.jsonl"
    done = espalier("generate", "--model", text_model, "--prompts", prompts, "--out", out, "--reward", tmp_path / "reward.py", "--n", 8,
                    "--max-response-length", 6, "--json")
    records = read_lines(out)
    judged = [r for r in records if len(r["response"]) % 2 == 0]
    assert 0 < len(judged) < len(records)
    assert all(r.get("reward") == (float(len(r["response"])) if r in judged else None) for r in records)
    assert all("reward" not in r for r in records if r not in judged)
    assert done.json["reward"] == pytest.approx(sum(r["reward"] for r in judged) / len(judged))
    assert f"{len(records) - len(judged)} of {len(records)} responses were not judged" in done.stderr
    trained = espalier("train", "--model", text_model, "--rollouts", out, "--out", tmp_path / "trained")
    assert f"{len(records) - len(judged)} of {len(records)} records have neither reward nor advantage" in trained.stderr


def test_a_loop_goes_on_and_ends_where_nobody_was_judged(espalier, text_model, tmp_path):
    prompts = write_lines([{"prompt": text} for text in ("one", "two", "three")], tmp_path / "prompts.jsonl")
    (tmp_path / "reward.py").write_text(FORMS["trl"])
    words = ["grpo", "--model", text_model, "--prompts", prompts, "--reward", tmp_path / "reward.py", "--n", 4, "--train-batch-size", 2,
             "--max-response-length", 5, "--steps", 2, "--json"]
    done = espalier(*words, "--out", tmp_path / "run", "--val-prompts", prompts, "--test-freq", 1)
    assert all(step["unjudged"] > 0 and step["reward"] > 0 for step in done.json["steps"])
    (tmp_path / "reward.py").write_text("def compute_score(prompts, completions, **_):\n    return [None] * len(completions)\n")
    error = espalier(*words, "--out", tmp_path / "none", expect=3).json["error"]
    assert "None for every response" in error["got"]


GROUPS = [[1.0, None, 0.0, .5], [2.0, None], [None, None, None], [.25], [1.0, 1.0, None], [3.0, -1.0]]


def records():
    return [{"group": g, "prompt_ids": [1, 5 + g], "response_ids": [7 + i, 2], **({} if reward is None else {"reward": reward})}
            for g, rewards in enumerate(GROUPS) for i, reward in enumerate(rewards)]


def trl_advantages(scale):
    """The lines of GRPOTrainer that turn rewards into advantages, for groups of any size."""
    rewards = [torch.tensor([float("nan") if r is None else r for r in group], dtype=torch.float64) for group in GROUPS]
    everything = nanstd(torch.cat(rewards))
    out = []
    for group in rewards:
        centred = group - torch.nanmean(group)
        deviation = everything if scale == "batch" else nanstd(group) if len(group) > 1 else torch.zeros(())
        out.append(torch.nan_to_num(centred if scale == "none" else centred / (deviation + 1e-4), nan=0.0))
    return torch.cat(out).tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trl_s(scale, espalier, model_of, tmp_path):
    path, metrics = write_records(records(), tmp_path / "r.jsonl"), tmp_path / "metrics.jsonl"
    espalier("train", "--model", model_of("qwen3_tied"), "--rollouts", path, "--scale-rewards", scale, "--rollout-metrics", metrics)
    found = [json.loads(line)["advantage"] for line in metrics.read_text().splitlines()]
    assert found == pytest.approx(trl_advantages(scale), abs=1e-12)


def test_a_file_without_any_reward_is_refused(espalier, model_of, tmp_path):
    path = write_records([{"prompt_ids": [1], "response_ids": [2], "reward": None}] * 2, tmp_path / "r.jsonl")
    refused = espalier("train", "--model", model_of("qwen3_tied"), "--rollouts", path, "--out", tmp_path / "trained", expect=3)
    assert "reward or advantage" in refused.stderr
