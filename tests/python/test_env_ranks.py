"""`--env` on several ranks: the trajectories, records and updates of one process."""

import json

import numpy
import pytest
from safetensors.numpy import load_file

from test_env import ENVIRONMENT, WORDS, with_masks
from test_parallel import Ranks
from text_model import make_text_model, read_lines, word_tokenizer, write_lines

LAYOUTS = [(2, ["--dp", 2]), (3, ["--dp", 3]), (2, ["--tp", 2]), (4, ["--tp", 2, "--dp", 2])]
PROMPTS = [{"prompt": "a b"}, {"prompt": "c d e"}, {"prompt": "h"}, {"prompt": "a b"}, {"prompt": "g g"}]
# What an environment says when it begins depends on nothing but the prompt, so that it is the same in any process.
TALKING = ENVIRONMENT.replace("self.turns, self.asked = 0, prompt", "self.turns = 0; return 'g h' if 'c' in prompt else None")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_text_model(tmp_path_factory.mktemp("env") / "model", word_tokenizer(WORDS))


@pytest.fixture
def words(model, tmp_path):
    (tmp_path / "env.py").write_text(TALKING)
    prompts = write_lines(PROMPTS, tmp_path / "prompts.jsonl")
    return ["--model", model, "--prompts", prompts, "--env", tmp_path / "env.py", "--turns", 3, "--n", 6, "--dtype", "float64", "--threads", 1]


def run(program, count, arguments, expect=0):
    ranks = Ranks(program, count, arguments)
    assert set(ranks.end()) <= {expect, 7 if expect else 0}, ranks.stderr
    assert not any(ranks.stdout[1:]), "rank 0 alone prints"
    return ranks


@pytest.mark.parametrize("count, layout", [(2, ["--dp", 2, "--ep", 2]), (4, ["--tp", 2, "--dp", 2, "--ep", 4])])
def test_ranks_of_experts_wait_for_each_other_s_environments(count, layout, espalier, program, words, tmp_path):
    model = make_text_model(tmp_path / "model", word_tokenizer(WORDS), kind="Qwen3Moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    words = ["generate", "--model", model, *words[2:], "--max-response-length", 30]
    espalier(*words, "--out", tmp_path / "alone.jsonl")
    run(program, count, [*words, *layout, "--out", tmp_path / "ranks.jsonl"])
    for one, other in zip(read_lines(tmp_path / "alone.jsonl"), read_lines(tmp_path / "ranks.jsonl"), strict=True):
        assert one["rollout_logprobs"] == pytest.approx(other.pop("rollout_logprobs"), abs=1e-12)
        assert {name: value for name, value in one.items() if name != "rollout_logprobs"} == other


@pytest.mark.parametrize("count, layout", LAYOUTS)
def test_trajectories_are_those_of_one_process(count, layout, espalier, program, words, tmp_path):
    words = ["generate", *words, "--max-response-length", 30, "--json"]
    alone = espalier(*words, "--out", tmp_path / "alone.jsonl").json
    told = json.loads(run(program, count, [*words, *layout, "--out", tmp_path / "ranks.jsonl"]).stdout[0])
    records = [with_masks(read_lines(tmp_path / name)) for name in ("alone.jsonl", "ranks.jsonl")]
    assert {"done", "turns"} <= {record["finish_reason"] for record in records[0]}
    for one, other in zip(*records, strict=True):
        assert one["rollout_logprobs"] == pytest.approx(other.pop("rollout_logprobs"), abs=1e-12)
        assert {name: value for name, value in one.items() if name != "rollout_logprobs"} == other
    for name in ("rollouts", "prompts", "turns", "tokens", "reward"):
        assert told[name] == alone[name] or told[name] == pytest.approx(alone[name], rel=1e-15), name


def test_an_environment_plays_a_trajectory_on_one_rank(program, words, tmp_path):
    """Each of 30 trajectories begins once, those of a prompt in one process."""
    (tmp_path / "env.py").write_text(
        "import os, pathlib\n" + TALKING.replace("self.turns = 0;", "pathlib.Path(__file__).with_name(f'log{os.getpid()}').open('a').write(prompt + '\\n'); self.turns = 0;"))
    run(program, 4, ["generate", *words, "--max-response-length", 30, "--tp", 2, "--dp", 2, "--out", tmp_path / "ranks.jsonl"])
    begun = [log.read_text().splitlines() for log in tmp_path.glob("log*")]
    assert len(begun) == 2, "of two ranks of tp one asks"
    assert sorted(sum(begun, [])) == sorted(6 * [prompt["prompt"] for prompt in PROMPTS])
    assert not {"c d e"} & set(begun[0]) & set(begun[1])


@pytest.mark.parametrize("layout", [["--dp", 2], ["--tp", 2]])
def test_a_failing_step_loses_nothing_on_any_rank(layout, program, words, tmp_path):
    (tmp_path / "env.py").write_text(TALKING.replace(
        "self.turns += 1\n", "self.turns += 1\n        if self.first == 'h' and self.turns == 2: raise ValueError('boom')\n").replace(
        "self.turns = 0;", "self.turns, self.first = 0, prompt;"))
    ranks = run(program, 2, ["generate", *words, "--max-response-length", 30, *layout, "--out", tmp_path / "ranks.jsonl"], expect=3)
    assert sum(err.count("ValueError: boom") for err in ranks.stderr) == 1 and "prompts.jsonl:3" in "".join(ranks.stderr)
    records = read_lines(tmp_path / "ranks.jsonl")
    assert len(records) == 30
    assert "abort" in {record["finish_reason"] for record in records if record["prompt"] == "h"}
    assert all(("reward" in record) == (record["finish_reason"] != "abort") for record in records)


@pytest.mark.parametrize("count, layout", [(2, ["--dp", 2]), (4, ["--tp", 2, "--dp", 2])])
def test_grpo_trains_as_one_process(count, layout, espalier, program, words, tmp_path):
    words = ["grpo", *words, "--val-prompts", tmp_path / "prompts.jsonl", "--train-batch-size", 3, "--max-response-length", 24, "--steps", 3,
             "--lr", "1e-3", "--save-dtype", "float64"]
    espalier(*words, "--out", tmp_path / "alone")
    run(program, count, [*words, *layout, "--out", tmp_path / "ranks"])
    metrics = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("alone", "ranks")]
    for one, other in zip(*metrics, strict=True):
        for name in one.keys() & {"turns", "reward", "accuracy", "loss_tokens", "grad_norm"}:
            assert other[name] == pytest.approx(one[name], rel=1e-9), name
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("ranks", "alone"))
    for name, expected in theirs.items():  # Adam divides by what may be near zero: gradients to 1e-10, weights to less
        assert numpy.linalg.norm(ours[name] - expected) <= 1e-8 * numpy.linalg.norm(expected), name


def test_a_file_that_fails_when_it_begins_ends_all_ranks(program, words, tmp_path):
    (tmp_path / "env.py").write_text("class Environment:\n    def reset(self, prompt):\n        if prompt == 'h': raise OSError('down')\n    def step(self, text): pass\n")
    ranks = run(program, 2, ["generate", *words, "--max-response-length", 30, "--dp", 2, "--comm-timeout", 60, "--out", tmp_path / "ranks.jsonl"], expect=3)
    assert sum(err.count("OSError: down") for err in ranks.stderr) == 1
    assert not (tmp_path / "ranks.jsonl").exists()
