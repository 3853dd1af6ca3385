"""longrope: the longest rollout that a verb reads decides between short and long factors, for every row of every plan.

transformers decides in each call. Here it runs each rollout alone, told to be in the regime that the longest one asks for."""

import gzip
import json

import pytest
import torch

import objective
import oracle
from comparison import Trained, assert_equal_gradients, assert_equal_series
from make_model import make_model, make_rollouts, write_records
from test_train_parity import LOGPROB_FLOAT64, SCHEDULES

SEED = 43
LIMIT = 30  # tokens up to which a rollout alone would have short factors: most of these have


@pytest.fixture(scope="module")
def records():
    out = [r for r in make_rollouts(SEED) if r["response_ids"]]
    lengths = [len(r["prompt_ids"] + r["response_ids"]) for r in out]
    assert min(lengths) <= LIMIT < max(lengths)
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return phi3(tmp_path_factory.mktemp("phi3"))


def phi3(folder):
    """make_model's, whose limit is another: stated twice, as Phi-3's files state it."""
    directory = make_model("phi3", folder / "model", original_max_position_embeddings=LIMIT)
    config = json.loads((directory / "config.json").read_text())
    config["original_max_position_embeddings"] = config["rope_parameters"]["original_max_position_embeddings"] = LIMIT
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def in_regime(directory, long):
    """The model in float64 whose calls all have the regime's factors. Tables are in use then: only the limit moves."""
    loaded = oracle.load_model(directory, torch.float64)
    limit = 1 if long else 10**6
    loaded.config.original_max_position_embeddings = limit
    loaded.config.rope_parameters.update(original_max_position_embeddings=limit, attention_factor=1.0)  # that in use stays
    return loaded


def step_of(directory, records, long):
    resolved = objective.resolve({})
    return oracle.gradients(in_regime(directory, long), records, objective.advantages(records, resolved), resolved)


def shorter(records):
    return [r for r in records if len(r["prompt_ids"] + r["response_ids"]) <= LIMIT]


@pytest.mark.parametrize("plan", SCHEDULES, ids=lambda plan: "_".join(str(value) for value in plan.values()))
def test_the_longest_rollout_decides_for_all_rows(plan, model, records, espalier, tmp_path):
    _, _, exact, logprobs, _ = step_of(model, records, True)
    path = write_records(records, tmp_path / "rollouts.jsonl")
    run = Trained(espalier, model, path, tmp_path, **plan)
    assert_equal_gradients(run.gradients, exact, SEED)
    assert_equal_series(run.logprobs, "logprobs", logprobs, LOGPROB_FLOAT64)


def test_without_a_longer_one_all_rows_have_short_factors(model, records, espalier, tmp_path):
    short = shorter(records)
    _, _, exact, *_ = step_of(model, short, False)
    path = write_records(short, tmp_path / "rollouts.jsonl")
    assert_equal_gradients(Trained(espalier, model, path, tmp_path).gradients, exact, SEED)
    told = espalier("train", "--model", model, "--rollouts", path, "--out", tmp_path / "told").stderr
    assert "long_factor" not in told


@pytest.mark.parametrize("verb", ["train", "score", "plan", "verify"])
def test_every_verb_that_reads_rollouts_says_so(verb, model, records, espalier, tmp_path):
    path = write_records(records, tmp_path / "rollouts.jsonl")
    out = [] if verb in ("plan", "verify") else ["--out", tmp_path / "out"]
    told = espalier(verb, "--model", model, "--rollouts", path, *out).stderr
    assert f"more than original_max_position_embeddings = {LIMIT}: all rows rotate by long_factor" in told


@pytest.mark.parametrize("longest, long", [(4, False), (60, True)])
def test_sampling_decides_by_the_longest_possible_rollout(longest, long, model, records, espalier, tmp_path):
    prompts = [{"prompt_ids": r["prompt_ids"][:20], "id": str(i)} for i, r in enumerate(records[:4])]
    path, out = write_records(prompts, tmp_path / "prompts.jsonl"), tmp_path / "out.jsonl"
    run = espalier("generate", "--model", model, "--prompts", path, "--out", out, "--dtype", "float64", "--n", 2, "--max-response-length",
                   longest, "--stop-ids", 1)
    assert ("long_factor" in run.stderr) == long
    sampled = [json.loads(line) for line in out.read_text().splitlines()]
    wanted, _ = oracle.score(in_regime(model, long), sampled)
    for record, values in zip(sampled, wanted, strict=True):
        assert record["rollout_logprobs"] == pytest.approx(values, abs=LOGPROB_FLOAT64, rel=0)


def test_a_trace_is_replayed_with_the_factors_of_its_run(model, records, espalier, tmp_path):
    """The long rollout is in the second step; only the first one is recorded."""
    short = [{**r, "step": 1} for r in shorter(records)]
    longer = [{**r, "step": 2} for r in records if r not in shorter(records)]
    path = write_records(short + longer, tmp_path / "rollouts.jsonl")
    espalier("train", "--model", model, "--rollouts", path, "--out", tmp_path / "out", "--record", tmp_path / "trace", "--lr", "1e-3")
    trace = json.loads((tmp_path / "trace/trace.json").read_text())
    longest = max(len(r["prompt_ids"] + r["response_ids"]) for r in records)
    assert trace["positions"] == longest
    # A trace of the first step alone, as a run that ended there would have left it.
    rollouts = tmp_path / "trace/rollouts.jsonl.gz"
    kept = [line for line in gzip.decompress(rollouts.read_bytes()).decode().splitlines() if json.loads(line)["step"] == 1]
    rollouts.write_bytes(gzip.compress("\n".join(kept).encode()))
    (tmp_path / "trace/trace.json").write_text(json.dumps({**trace, "steps": trace["steps"][:1], "checkpoints": []}))
    step, = espalier("replay", tmp_path / "trace", "--json").json["steps"]
    assert step["loss"] == trace["steps"][0]["loss"]
