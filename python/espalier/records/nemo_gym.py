"""NeMo Gym's rollouts, JSON Lines of ng_collect_rollouts:

  {"responses_create_params": {...}, "response": {"output": [item, ...]}, "reward": 1.0, "_ng_task_index": 0, "_ng_rollout_index": 1}

An output item that ends a call of the model has prompt_token_ids, generation_token_ids, generation_log_probs and perhaps routed_experts, if the model
server was configured for training. Each is a turn; a row is a trajectory. Rows of one task form a group. The reward belongs to the last turn.
"""

from . import calls
from .errors import UnsupportedRecords
from .json_files import first_of
from .neutral import Place, number

NAME = "NeMo Gym rollouts"
_TAKEN = {"response", "reward", "_ng_task_index", "_ng_rollout_index"}


def matches(content):
    return "responses_create_params" in first_of(content)


def records(contents, notes):
    for path, rows, step in contents:
        for index, row in enumerate(rows):
            yield from _records(Place(path, index), row, step, notes)


def _records(place, row, step, notes):
    notes.leave({name: value for name, value in row.items() if name not in _TAKEN})
    response = row.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    turns = [item for item in output or () if isinstance(item, dict) and calls.has_ids(item.get("prompt_token_ids"), item.get("generation_token_ids"))]
    if not turns:
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: response.output", "prompt_token_ids and generation_token_ids", "text only",
                                 "Collect rollouts with a model server for training (vllm_model_for_training), which returns token ids")
    task, rollout = row.get("_ng_task_index"), row.get("_ng_rollout_index")
    name = f"{task}:{rollout}" if task is not None and rollout is not None else f"row {place.index}"
    reward = None if row.get("reward") is None else number(place, "reward", row["reward"])
    for at, item in enumerate(turns):
        yield calls.turn(place, item["prompt_token_ids"], item["generation_token_ids"], item.get("generation_log_probs"), routes=item.get("routed_experts"),
                         group=task, trajectory=name, turn=at, step=step, reward=reward if at == len(turns) - 1 else None)
