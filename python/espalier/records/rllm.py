"""rLLM's episodes, `Episode.to_dict()` as JSON: one object, a list of objects, or one object per line.

  {"id": "task:rollout", "trajectories": [{"uid", "name", "reward", "steps": [{"prompt_ids", "response_ids", "logprobs", "reward",
   "advantage"}, ...]}, ...]}

A step is a turn. Trajectories with equal task and name form a group. The reward of a trajectory goes to its last turn; in a trajectory
without a reward, each turn has the reward of its step. Files of rLLM's EpisodeLogger have no token ids and are refused.
"""

from .errors import UnsupportedRecords
from .json_files import first_of
from .left_out import holds_something, refuse_media
from .neutral import Place, number, plain_scalars, record, series

NAME = "rLLM episodes"
_OF_EPISODE, _OF_TRAJECTORY = {"id", "episode_id", "trajectories", "training_step", "task"}, {"uid", "name", "steps", "reward", "task"}
_OF_STEP = {"prompt_ids", "response_ids", "logprobs", "reward", "advantage", "weight_version", "done"}
_ROUTES = "routing_matrices"


def matches(content):
    return "trajectories" in first_of(content)


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
    notes.leave({key: value for key, value in episode.items() if key not in _OF_EPISODE})
    for at, trajectory in enumerate(episode["trajectories"]):
        steps = trajectory.get("steps") if isinstance(trajectory, dict) else None
        if not isinstance(steps, list) or not all(isinstance(one, dict) for one in steps):
            raise place.wrong(f"trajectories[{at}].steps", "a list of objects, as Trajectory.to_dict() has it", type(steps).__name__)
        role = trajectory.get("name") or ""
        notes.leave({key: value for key, value in trajectory.items() if key not in _OF_TRAJECTORY})
        for turn, one in enumerate(steps):
            left = {key: value for key, value in one.items() if key not in _OF_STEP}
            _refuse(f"{place.path}: episode {place.index}, trajectory {at}, step {turn}", one, left)
            notes.leave(left)
            yield _turn(place, name, f"{name}:{role}:{at}", role, turn, one, step, _reward(place, trajectory, one, turn == len(steps) - 1))
    if any(not trajectory["steps"] for trajectory in episode["trajectories"]):
        notes.add("trajectories without steps are left out")


def _refuse(where, one, left):
    """Raises UnsupportedRecords for a step with recorded experts or images."""
    output = one.get("model_output") if isinstance(one.get("model_output"), dict) else {}
    if holds_something(one.get(_ROUTES)) or holds_something(output.get(_ROUTES)):
        raise UnsupportedRecords(f"{where}: {_ROUTES}", "no recorded experts, or [tokens][layers][k] in a neutral record (routed_experts)",
                                 "those of an engine, in its own encoding", "To train with the router's own choice, remove the field")
    refuse_media(where, left)
    if any(not isinstance(token, int) for token in one.get("prompt_ids") or ()):
        raise UnsupportedRecords(f"{where}: prompt_ids", "token ids only", "blocks of images or other media")


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
                  step=step, reward=reward, rollout_logprobs=series(place, "logprobs", one.get("logprobs") or None, mask, sampled=True),
                  advantage=series(place, "advantage", advantage, mask),
                  meta=plain_scalars({"weight_version": one.get("weight_version")}))
