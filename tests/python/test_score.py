"""`score`: log-probs and entropies of recorded responses, written as records in the order of the input."""

import gzip
import json
import os

import pytest
import torch

import oracle
from make_model import FAMILIES, make_rollouts, write_records

SEED = 23
LOGPROB_FLOAT64 = 1e-11  # as in test_train_parity.py


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_close(found, exact, tolerance=LOGPROB_FLOAT64):
    for index, (own, wanted) in enumerate(zip(found, exact, strict=True)):
        assert own == pytest.approx(wanted, abs=tolerance, rel=0), f"seed {SEED}, record {index}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropies_are_the_oracles(family, espalier, model_of, tmp_path):
    records = make_rollouts(SEED)
    path, out = write_records(records, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    summary = espalier("score", "--model", model_of(family), "--rollouts", path, "--out", out, "--dtype", "float64", "--entropies",
                       "--json").json
    logprobs, entropies = oracle.score(oracle.load_model(model_of(family), torch.float64), records)
    scored = read(out)
    assert_close([r["logprobs"] for r in scored], logprobs)
    assert_close([r["entropies"] for r in scored], entropies)
    assert summary["rollouts"] == len(records) and summary["rows"]["physical"] < summary["rows"]["logical"]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_do_not_depend_on_the_instruction_set_of_the_tensor_library(family, espalier, model_of, tmp_path):
    """Machines differ in what ATen and MKL choose, even where the program's own kernels take the same set."""
    path, found = write_records(make_rollouts(SEED), tmp_path / "in.jsonl"), []
    for capability in ("default", "avx2"):
        out = tmp_path / f"{capability}.jsonl"
        espalier("score", "--model", model_of(family), "--rollouts", path, "--out", out, "--dtype", "float64", "--entropies", "--products", "own",
                 env={**os.environ, "ATEN_CPU_CAPABILITY": capability})
        found.append([(record["logprobs"], record["entropies"]) for record in read(out)])
    assert found[0] == found[1]


def test_records_are_carried_through_unchanged(espalier, model_of, tmp_path):
    records = [{**r, "id": f"r{i}", "meta": {"nested": [1, None, "x"]}, "reward_model": "left as it is"}
               for i, r in enumerate(make_rollouts(SEED))]
    path, out = write_records(records, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    espalier("score", "--model", model_of("qwen3_tied"), "--rollouts", path, "--out", out, "--as", "ref_logprobs")
    scored = read(out)
    for before, after in zip(records, scored, strict=True):
        added = after.pop("ref_logprobs")
        assert len(added) == len(before["response_ids"])
        defaults = {"temperature": 1.0, "loss_mask": [1] * len(before["response_ids"])}
        for name in before:
            assert after.get(name, defaults.get(name)) == before[name], name


def test_a_gzip_file_is_read_like_the_plain_one(espalier, model_of, tmp_path):
    path = write_records(make_rollouts(SEED), tmp_path / "in.jsonl")
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for source, out in ((path, "a.jsonl"), (packed, "b.jsonl")):
        espalier("score", "--model", model_of("llama_untied"), "--rollouts", source, "--out", tmp_path / out)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_scored_old_logprobs_make_every_ratio_one(espalier, model_of, tmp_path):
    """Scored by the same weights in float64, the ratios are 1 up to 1e-11, so nothing is clipped."""
    path, out = write_records(make_rollouts(SEED), tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    model = model_of("qwen2_untied")
    espalier("score", "--model", model, "--rollouts", path, "--out", out, "--as", "old_logprobs", "--dtype", "float64")
    run = espalier("train", "--model", model, "--rollouts", out, "--out", tmp_path / "model", "--dtype", "float64", "--json").json
    assert run["steps"][0]["clip_fraction"] == 0


@pytest.mark.rounding
def test_real_rollouts_score_close_to_what_was_recorded(espalier, stories, tmp_path):
    """`old_logprobs` of the data are this float32 model's own: two float32 runs differ by rounding, logits below 30."""
    out = tmp_path / "out.jsonl"
    espalier("score", "--model", stories / "hf", "--rollouts", stories / "rollouts.jsonl", "--out", out)
    for record in read(out):
        assert record["logprobs"] == pytest.approx(record["old_logprobs"], abs=1e-4, rel=0)
