"""rLLM's episodes become turns of trajectories."""

import json

import pytest

from espalier import records
from espalier.records import RecordError, UnsupportedRecords


def step(prompt, response, **fields):
    """A step as rLLM's Step.to_dict() writes it."""
    return {"prompt_ids": prompt, "response_ids": response, "logprobs": [-0.5] * len(response), "chat_completions": [], "observation": None,
            "thought": "", "action": None, "model_response": "", "model_output": None, "info": {}, "reward": 0.0, "done": False, "mc_return": 0.0,
            "advantage": None, "weight_version": 3, **fields}


def episode(name, *trajectories):
    return {"id": name, "task": {"question": "?"}, "termination_reason": None, "is_correct": True, "metrics": {}, "info": {},
            "trajectories": [{"uid": "u", "name": role, "task": None, "steps": steps, "reward": reward, "info": {}} for role, reward, steps in trajectories]}


EPISODES = [episode("q:0", ("solver", 1.0, [step([1, 2], [3]), step([1, 2, 3, 9], [4, 5])]), ("judge", None, [step([7], [8], reward=0.25)])),
            episode("q:1", ("solver", 0.0, [step([1, 2], [6])]))]


@pytest.mark.parametrize("lines", [False, True])
def test_steps_are_turns_and_a_trajectorys_reward_stands_once(lines, tmp_path):
    path = tmp_path / ("episodes.jsonl" if lines else "episodes.json")
    path.write_text("\n".join(map(json.dumps, EPISODES)) if lines else json.dumps(EPISODES, indent=1))
    found = list(records.read(path))
    assert [(r["group"], r["trajectory"], r["turn"], r.get("reward")) for r in found] == [
        ("q:solver", "q:0:solver:0", 0, None), ("q:solver", "q:0:solver:0", 1, 1.0), ("q:judge", "q:0:judge:1", 0, 0.25), ("q:solver", "q:1:solver:0", 0, 0.0)]
    assert found[1]["prompt_ids"] == [1, 2, 3, 9] and found[1]["rollout_logprobs"] == [-0.5, -0.5]


def test_the_program_reads_what_was_converted(espalier, tmp_path):
    path, out = tmp_path / "episodes.json", tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(EPISODES))
    assert records.convert(path, out) == 4
    seen = espalier("inspect", out, "--json").json
    assert seen["trajectories"] == 3 and seen["turns"]["max"] == 2


def test_episodes_without_tokens_are_refused_by_place(tmp_path):
    path = tmp_path / "episodes.json"
    path.write_text(json.dumps([episode("q:0", ("solver", 1.0, [{"model_response": "text"}]))]))
    with pytest.raises(UnsupportedRecords, match="text only"):
        list(records.read(path))
    for broken, word in [({"id": None}, "id"), ({"trajectories": ["text"]}, "steps"), ({"trajectories": [{"steps": [7]}]}, "steps")]:
        path.write_text(json.dumps([{**EPISODES[0], **broken}]))
        with pytest.raises(RecordError, match=word):
            list(records.read(path))
