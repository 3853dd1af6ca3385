"""Kept sets of top-p and top-k in records: what `score`, `train` and `convert` do with them (gradients: test_train_parity.py, test_objectives.py)."""

import json

import pytest
import torch

import oracle
from comparison import Trained
from dumps import slime_sample
from make_model import add_kept_sets, make_rollouts, write_records

SEED = 17
RECORD = {"prompt_ids": [5, 6], "response_ids": [7, 8], "reward": 1.0}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def settled(record):
    """The sets as they are written: ascending, each id once, none for masked tokens that stand outside."""
    sets = [None if ids is None else sorted(set(ids)) for ids in record.get("kept_ids") or []]
    return sets if any(sets) else None


@pytest.mark.parametrize("plan", [("--schedule", "dense"), ("--schedule", "packed"), ("--schedule", "phased", "--token-budget", 5)])
def test_score_is_over_the_sets_and_keeps_them(plan, espalier, model_of, tmp_path):
    records = add_kept_sets(make_rollouts(SEED), SEED)
    path, out = write_records(records, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    done = espalier("score", "--model", model_of("qwen3_tied"), "--rollouts", path, "--out", out, "--dtype", "float64", "--entropies", *plan)
    assert f"kept_ids in {sum(settled(r) is not None for r in records)} of {len(records)} records: log-probs" in done.stderr
    model = oracle.load_model(model_of("qwen3_tied"), torch.float64)
    for found, record, *wanted in zip(read(out), records, *oracle.score(model, records), strict=True):
        assert found["logprobs"] == pytest.approx(wanted[0], abs=1e-11) and found["entropies"] == pytest.approx(wanted[1], abs=1e-11)
        assert found.get("kept_ids") == settled(record)


def test_ignored_sets_are_kept_too(espalier, model_of, tmp_path):
    records = add_kept_sets(make_rollouts(SEED), SEED)
    plain = [{name: value for name, value in record.items() if name != "kept_ids"} for record in records]
    found = {}
    for name, some, options in (("sets", records, ("--kept-sets", "ignore")), ("plain", plain, ())):
        path, out = write_records(some, tmp_path / f"{name}.jsonl"), tmp_path / f"{name}_scored.jsonl"
        done = espalier("score", "--model", model_of("qwen3_tied"), "--rollouts", path, "--out", out, "--entropies", *options)
        found[name] = read(out)
        assert ("are ignored: log-probs are over the whole vocabulary" in done.stderr) == (name == "sets")
    assert [settled(record) for record in records] == [record.pop("kept_ids", None) for record in found["sets"]]
    assert found["sets"] == found["plain"]


@pytest.mark.parametrize("sets,place,words", [
    ([[7]], "kept_ids", "2 entries, one per response token"), ([[7], [9, 3]], "kept_ids[1]", "the sampled token 8 among the kept ids"),
    ([[7], []], "kept_ids[1]", "an empty list"), ([[7], [8, 10**6]], "kept_ids[1][1]", "an integer in [0,"), ([[7], 8], "kept_ids[1]", "a list of token ids")])
def test_a_token_outside_its_set_is_an_error_with_line_and_field(sets, place, words, espalier, model_of, tmp_path):
    path = write_records([RECORD, {**RECORD, "kept_ids": sets}], tmp_path / "in.jsonl")
    for verb in (("score", "--out", tmp_path / "out.jsonl"), ("train", "--out", tmp_path / "out"), ("verify",)):
        done = espalier(verb[0], "--model", model_of("qwen3_tied"), "--rollouts", path, *verb[1:], expect=3)
        assert f"in.jsonl:2: {place}" in done.stderr and words in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.jsonl").exists()


def test_sampled_records_train_with_weights_of_exactly_one(espalier, model_of, tmp_path):
    prompts = write_records([{"prompt_ids": [5, 9, 2 + i]} for i in range(3)], tmp_path / "prompts.jsonl")
    model = model_of("qwen3_tied")
    espalier("generate", "--model", model, "--prompts", prompts, "--out", tmp_path / "sampled.jsonl", "--n", 4, "--top-p", 0.5,
             "--max-response-length", 9, "--temperature", 1.3)
    records = [{**record, "reward": float(i % 3)} for i, record in enumerate(read(tmp_path / "sampled.jsonl"))]
    path = write_records(records, tmp_path / "rewarded.jsonl")
    runs = [Trained(espalier, model, path, tmp_path / name, dtype="float32", policy_loss="reinforce", **options) for name, options in (
        ("weighted", {"rollout_is": "token"}), ("plain", {}), ("ignored", {"rollout_is": "token", "kept_sets": "ignore"}))]
    weighted, plain, ignored = (run.gradients for run in runs)
    assert all(torch.equal(weighted[name], gradient) for name, gradient in plain.items())
    assert any(not torch.allclose(ignored[name], gradient, rtol=.1) for name, gradient in plain.items())
    assert [line["logprobs"] for line in runs[0].logprobs] == [record["rollout_logprobs"] for record in records]


def test_slime_s_sets_become_the_field(espalier, tmp_path):
    sample = {"prompt_ids": [1, 40, 9], "response_ids": [7, 11, 2], "loss_mask": [1, 0, 1], "rollout_logprobs": [-.5, 0., 0.], "reward": 1., "group": "a"}
    sets = {"rollout_top_p_token_ids": torch.tensor([9, 7, 5, 2], dtype=torch.int32),
            "rollout_top_p_token_offsets": torch.tensor([0, 2, 3, 4], dtype=torch.int32)}
    torch.save({"rollout_id": 0, "samples": [{**slime_sample(0, sample), **sets}]}, tmp_path / "rollout_0.pt")
    espalier("convert", tmp_path / "rollout_0.pt", tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl")[0]["kept_ids"] == [[7, 9], None, [2]]  # the second token has no loss and is not in its set
    assert "kept_ids" in espalier("inspect", tmp_path / "out.jsonl").stdout
