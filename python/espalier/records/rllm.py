"""rLLM's episodes, `Episode.to_dict()` as JSON: one object, a list of objects, or one object per line.

  {"id": "task:rollout", "trajectories": [{"uid", "name", "reward", "steps": [{"prompt_ids", "response_ids", "logprobs", "reward",
   "advantage"}, ...]}, ...]}

A step is a turn. Trajectories with equal task and name form a group. The reward of a trajectory goes to its last turn; in a trajectory
without a reward, each turn has the reward of its step. Files of rLLM's EpisodeLogger have no token ids and are refused.
"""

import json

from .errors import RecordError, UnsupportedRecords
from .neutral import Place, number, record, series

NAME = "rLLM episodes"


def is_json(start):
    return start.lstrip()[:1] in (b"{", b"[")


def load(file, path):
    text = file.read()
    try:
        content = json.loads(text)
    except ValueError:
        content = [_line(path, at, line) for at, line in enumerate(text.splitlines(), 1) if line.strip()]
    return content if isinstance(content, list) else [content]


def _line(path, at, line):
    try:
        return json.loads(line)
    except ValueError as error:
        raise RecordError(f"{path}:{at}", "one JSON object", str(error)) from None


def matches(content):
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict) and "trajectories" in content[0]


def records(contents, notes):
    for path, episodes, step in contents:
        for index, episode in enumerate(episodes):
            yield from _records(Place(path, index), episode, step, notes)


def _records(place, episode, step, notes):
    if not isinstance(episode, dict) or not isinstance(episode.get("trajectories"), list):
        raise place.wrong("trajectories", "a list, as Episode.to_dict() has it", type(episode).__name__)
    name = episode.get("id", episode.get("episode_id"))
    if not isinstance(name, str) or not name:
        raise place.wrong("id", "the episode's name, task:rollout", repr(name)[:40])
    step = episode.get("training_step", step)
    for at, trajectory in enumerate(episode["trajectories"]):
        steps = trajectory.get("steps") if isinstance(trajectory, dict) else None
        if not isinstance(steps, list) or not all(isinstance(one, dict) for one in steps):
            raise place.wrong(f"trajectories[{at}].steps", "a list of objects, as Trajectory.to_dict() has it", type(steps).__name__)
        role = trajectory.get("name") or ""
        for turn, one in enumerate(steps):
            yield _turn(place, name, f"{name}:{role}:{at}", role, turn, one, step, _reward(place, trajectory, one, turn == len(steps) - 1))
    if any(not trajectory["steps"] for trajectory in episode["trajectories"]):
        notes.append("trajectories without steps are left out")


def _reward(place, trajectory, one, last):
    if trajectory.get("reward") is not None:
        return number(place, "reward", trajectory["reward"]) if last else None
    return None if one.get("reward") is None else number(place, "reward", one["reward"])


def _turn(place, episode, trajectory, role, turn, one, step, reward):
    if not isinstance(one.get("prompt_ids"), list) or not one["prompt_ids"] or not isinstance(one.get("response_ids"), list):
        raise UnsupportedRecords(f"{place.path}: episode {place.index}, trajectory {trajectory}, step {turn}", "prompt_ids and response_ids",
                                 "text only", "EpisodeLogger leaves token ids out: write Episode.to_dict()")
    mask = [1] * len(one["response_ids"])
    advantage = one.get("advantage")
    if isinstance(advantage, (int, float)):
        advantage = [advantage] * len(mask)
    return record(place, one["prompt_ids"], one["response_ids"], mask, group=f"{episode.rsplit(':', 1)[0]}:{role}", trajectory=trajectory, turn=turn,
                  step=step, reward=reward, rollout_logprobs=series(place, "logprobs", one.get("logprobs") or None, mask),
                  advantage=series(place, "advantage", advantage, mask))
