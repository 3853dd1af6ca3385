"""Agents' trajectories: turns that repeat their history run it once, and advantages go by trajectory."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from comparison import FLOAT64_RELATIVE, Trained, relative_errors
from make_model import write_records

SEED = 91
TURNS = (3, 1, 4, 2)  # of the trajectories of a group
SYSTEM = 12           # tokens that all share


def trajectories(groups=2, seed=SEED):
    """Turns in drawn order: every prompt is the last turn's prompt, its response, and what a tool answered."""
    draw = random.Random(seed)
    tokens = lambda count: [draw.randrange(3, 60) for _ in range(count)]  # noqa: E731
    records = []
    for group in range(groups):
        system = tokens(SYSTEM)
        for index, turns in enumerate(TURNS):
            history, reward = system, draw.random()
            for turn in range(turns):
                response = tokens(draw.randrange(2, 5))
                tool = draw.randrange(0, 3)  # tokens of a tool inside the response
                records.append({"group": group, "trajectory": f"t{index}", "turn": turn, "prompt_ids": history,
                                "response_ids": response + tokens(tool) + tokens(1), "reward": reward,
                                "loss_mask": [1] * len(response) + [0] * tool + [1]})
                history = history + records[-1]["response_ids"] + tokens(3)
    draw.shuffle(records)
    return records


def unique_tokens(records):
    return len({tuple((r["prompt_ids"] + r["response_ids"])[:n]) for r in records
                for n in range(1, len(r["prompt_ids"] + r["response_ids"]) + 1)})


def advantages(records):
    """GRPO over trajectories, each counted once."""
    out = {}
    for group in {r["group"] for r in records}:
        rewards = {r["trajectory"]: r["reward"] for r in records if r["group"] == group}
        values = torch.tensor(list(rewards.values()), dtype=torch.float64)
        for name, reward in rewards.items():
            out[group, name] = ((reward - values.mean()) / (values.std() + 1e-6)).item()
    return [out[r["group"], r["trajectory"]] for r in records]


@pytest.fixture(scope="module")
def model(model_of):
    return model_of("qwen3_tied")


def test_gradients_are_those_of_advantages_worked_out_by_hand_and_of_the_dense_model(espalier, model, tmp_path):
    records = trajectories()
    by_hand = [{key: value for key, value in {**record, "advantage": advantage}.items() if key not in ("reward", "trajectory", "turn")}
               for record, advantage in zip(records, advantages(records))]
    turns, given = write_records(records, tmp_path / "turns.jsonl"), write_records(by_hand, tmp_path / "given.jsonl")
    found = Trained(espalier, model, turns, tmp_path / "a").gradients
    exact = Trained(espalier, model, given, tmp_path / "b", share="off").gradients
    assert max(relative_errors(found, exact).values()) <= FLOAT64_RELATIVE
    spoilt = [{**record, "advantage": 1.1 * record["advantage"] if index == 0 else record["advantage"]}
              for index, record in enumerate(by_hand)]
    other = Trained(espalier, model, write_records(spoilt, tmp_path / "spoilt.jsonl"), tmp_path / "c").gradients
    assert max(relative_errors(other, exact).values()) > 100 * FLOAT64_RELATIVE
    espalier("verify", "--model", model, "--rollouts", turns, "--dtype", "float64")


def test_turns_run_their_history_once_and_inspect_says_what_each_adds(espalier, model, tmp_path):
    records = trajectories()
    path = write_records(records, tmp_path / "turns.jsonl")
    seen = espalier("inspect", path, "--json").json
    assert seen["trajectories"] == 2 * len(TURNS) and seen["groups"] == 2 and seen["turns"]["max"] == max(TURNS)
    assert seen["tokens"]["physical"] == unique_tokens(records) == sum(turn["physical"] for turn in seen["by_turn"])
    assert seen["tokens"]["logical"] == sum(turn["logical"] for turn in seen["by_turn"])
    assert not [a for a in seen["anomalies"] if a["kind"] in ("prompt_differs", "group_of_one", "equal_rewards")]
    run = Trained(espalier, model, path, tmp_path / "run", trunk_state="keep", wave_state="keep")
    last = json.loads((run.out / "espalier/metrics.jsonl").read_text().splitlines()[-1])
    assert last["groups"] == 2 and last["reward"] == pytest.approx(
        sum({(r["group"], r["trajectory"]): r["reward"] for r in records}.values()) / (2 * len(TURNS)))
    text = espalier("inspect", path).stdout
    assert "trajectories      8" in text and "turn " in text


def test_records_keep_trajectory_and_turn_through_score(espalier, model, tmp_path):
    path, out = write_records(trajectories(1), tmp_path / "turns.jsonl"), tmp_path / "scored.jsonl"
    espalier("score", "--model", model, "--rollouts", path, "--out", out, "--as", "old_logprobs")
    before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in (path, out))
    for name in ("trajectory", "turn", "group", "reward"):
        assert [r[name] for r in before] == [r[name] for r in after]


@pytest.mark.parametrize("change, words", [
    (lambda r: r.pop("trajectory"), ["turn", "trajectory"]),
    (lambda r: r.pop("turn"), ["turn", "every record of a trajectory"]),
    (lambda r: r.update(turn=1), ["each turn of a trajectory once"]),
    (lambda r: r.update(turn="first"), ["turn"]),
])
def test_broken_lineages_are_refused_by_line(espalier, tmp_path, change, words):
    records = [{"group": 0, "trajectory": "a", "turn": turn, "prompt_ids": [3] * (turn + 1), "response_ids": [4], "reward": 1.0} for turn in range(2)]
    change(records[0])
    outcome = espalier("inspect", write_records(records, tmp_path / "r.jsonl"), expect=3)
    assert "r.jsonl:" in outcome.stderr and all(word in outcome.stderr for word in words)


def test_unequal_outcomes_are_refused_only_where_outcomes_were_asked_for(espalier, model, tmp_path):
    records = trajectories(1)
    records[0]["reward"] += 1
    turns = [r for r in records if r["trajectory"] == records[0]["trajectory"]]
    if len(turns) == 1:
        records[0]["reward"] -= 1
        next(r for r in records if r["trajectory"] == "t2" and r["turn"] == 0)["reward"] += 1
    path = write_records(records, tmp_path / "turns.jsonl")
    words = ["train", "--model", model, "--rollouts", path, "--dtype", "float64"]
    refused = espalier(*words, "--out", tmp_path / "no", "--turn-rewards", "outcome", expect=3)
    assert "--turn-rewards sum" in refused.stderr
    done = espalier(*words, "--out", tmp_path / "yes")
    assert "a trajectory's reward is their sum" in done.stdout + done.stderr


def test_a_trunk_of_a_thousand_turns(espalier, model, tmp_path):
    """A chain of 1,000 nodes: nothing recurses by depth."""
    records = [{"trajectory": 1, "turn": turn, "prompt_ids": [5] + [7 + n % 50 for n in range(turn)], "response_ids": [7 + turn % 50, 3], "reward": 1.0}
               for turn in range(1000)]
    path = write_records(records, tmp_path / "deep.jsonl")
    seen = espalier("inspect", path, "--json").json
    assert seen["tokens"]["physical"] == unique_tokens(records) == 2001 and len(seen["by_turn"]) == 1000
    rows = espalier("plan", "--model", model, "--rollouts", path, "--json").json["rows"]
    assert rows["physical"] == 2001 and rows["logical"] == sum(turn + 3 for turn in range(1000))


def large_tree():
    """20 trajectories of five turns below one system prompt: 20,000 rows, of which the deepest path has 1,475."""
    draw = random.Random(SEED)
    tokens = lambda count: [draw.randrange(3, 60) for _ in range(count)]  # noqa: E731
    system, records = tokens(500), []
    for index in range(20):
        history, tool = system, []
        for turn in range(5):
            response = tokens(120 if turn else 195)
            records.append({"group": 0, "trajectory": index, "turn": turn, "prompt_ids": history + tool, "response_ids": response,
                            "reward": float(index % 3)})
            history, tool = history + tool + response, tokens(75)
    return records


def test_a_tree_of_twenty_thousand_rows_has_the_dense_gradient(espalier, program, tmp_path):
    """Its rows run once under any plan; on two ranks that share it, all but what lies above the cut."""
    from make_model import make_model
    from test_parallel import Ranks
    model = make_model("qwen3_tied", tmp_path / "model", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=8, max_position_embeddings=2048)
    path = write_records(large_tree(), tmp_path / "turns.jsonl")
    dense = Trained(espalier, model, path, tmp_path / "dense", schedule="dense").gradients
    for name, plan in {"phased": dict(schedule="phased", token_budget=1500), "recompute": dict(schedule="phased", token_budget=4000, trunk_state="recompute"),
                       "auto": {}}.items():
        run = Trained(espalier, model, path, tmp_path / name, **plan)
        assert max(relative_errors(run.gradients, dense).values()) <= FLOAT64_RELATIVE, name
        step = run.json["steps"][0]
        assert step["rows"]["logical"] == 108_500
        forks = step["rows"]["physical"] - 20_000  # a trunk's last token is the first row of each item below it
        assert 0 <= forks <= 200, name
    layout = espalier("plan", "--model", model, "--rollouts", path, "--dtype", "float64", "--dp", 2, "--schedule", "phased", "--json").json["layout"]
    assert layout["repeated_rows"] == 500 and layout["largest_rows_over_mean"] < 1.01, "ten trajectories and the system prompt each"
    ranks = Ranks(program, 2, ["train", "--model", model, "--rollouts", path, "--dtype", "float64", "--dp", 2, "--schedule", "phased",
                               "--gradients", tmp_path / "ranks.safetensors", "--out", tmp_path / "ranks"])
    assert ranks.end() == [0, 0], ranks.stderr
    assert max(relative_errors(load_file(tmp_path / "ranks.safetensors"), dense).values()) <= FLOAT64_RELATIVE
