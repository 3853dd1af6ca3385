"""Harbor's files with token ids of each turn.

  result.json of a trial: {"task_name", "trial_name", "agent_result": {"rollout_details": [{"prompt_token_ids": [[...], ...], "completion_token_ids",
   "logprobs", "extra"}, ...]}, "verifier_result": {"rewards": {"reward": 1.0}}}
  a trajectory in ATIF: {"schema_version": "ATIF-v1.6", "session_id", "steps": [{"source": "agent", "metrics": {"prompt_token_ids",
   "completion_token_ids", "logprobs"}}, ...]}, without a reward

A trial is a trajectory, a call of the model a turn. Further rollout_details are the chats of sub-agents and summaries: branches of the trial. Trials
of one task form a group. The reward belongs to the last turn of the first chat.
"""

from . import calls
from .errors import UnsupportedRecords
from .json_files import first_of
from .neutral import Place, number

NAME = "Harbor trials"
_REMEDY = "Run the agent with collect_rollout_details=true, against a server that returns token ids"
_OF_TRIAL = {"task_name", "trial_name", "agent_result", "verifier_result", "id"}
_OF_METRICS = {"prompt_token_ids", "completion_token_ids", "logprobs"}


def matches(content):
    first = first_of(content)
    return _is_trajectory(first) or "trial_name" in first and "agent_result" in first


def _is_trajectory(row):
    return str(row.get("schema_version", "")).startswith("ATIF") and isinstance(row.get("steps"), list)


def records(contents, notes):
    for path, rows, step in contents:
        for index, row in enumerate(rows):
            yield from (_of_trajectory if _is_trajectory(row) else _of_trial)(Place(path, index), row, step, notes)


def _of_trial(place, row, step, notes):
    notes.leave({name: value for name, value in row.items() if name not in _OF_TRIAL})
    details = (row.get("agent_result") or {}).get("rollout_details") or ()
    if not any(one.get("completion_token_ids") for one in details):
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: agent_result.rollout_details", "prompt_token_ids and completion_token_ids", "none", _REMEDY)
    reward = _reward(place, row, notes)
    for branch, one in enumerate(details):
        prompts, answers, logprobs = (one.get(name) or [] for name in ("prompt_token_ids", "completion_token_ids", "logprobs"))
        if len(prompts) != len(answers) or logprobs and len(logprobs) != len(answers):
            raise place.wrong(f"rollout_details[{branch}]", f"{len(answers)} prompts and log-probs, one per turn", f"{len(prompts)} and {len(logprobs)}")
        extra = dict(one.get("extra") or {})
        routes = extra.pop("routed_experts", None) or [None] * len(answers)
        notes.leave(extra)
        for at, (prompt, answer) in enumerate(zip(prompts, answers)):
            yield calls.turn(place, prompt, answer, logprobs[at] if logprobs else None, routes=routes[at], group=row.get("task_name"),
                             trajectory=str(row.get("trial_name") or row.get("id")), turn=at, branch=branch if len(details) > 1 else None, step=step,
                             reward=reward if branch == 0 and at == len(answers) - 1 else None)


def _reward(place, row, notes):
    rewards = (row.get("verifier_result") or {}).get("rewards") or {}
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if value is None and rewards:
        notes.add(f"a trial has several rewards ({', '.join(rewards)}) and none named reward: they are left out")
    return None if value is None else number(place, "reward", value)


def _of_trajectory(place, row, step, notes):
    """The turns of a trajectory, and of its embedded sub-agents as branches."""
    chats = [row, *(row.get("subagent_trajectories") or ())]
    name, found = str(row.get("session_id") or row.get("trajectory_id") or place.index), False
    for branch, chat in enumerate(chats):
        for at, metrics in enumerate(_calls(place, chat.get("steps") or (), notes)):
            found = True
            notes.leave({name_: value for name_, value in metrics.items() if name_ not in _OF_METRICS})
            yield calls.turn(place, metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics.get("logprobs"), trajectory=name, turn=at,
                             branch=branch if len(chats) > 1 else None, step=step)
    if not found:
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: steps", "metrics with prompt_token_ids and completion_token_ids", "text only", _REMEDY)


def _calls(place, steps, notes):
    """The metrics of the steps that are a call of the model of their own."""
    for one in steps:
        if one.get("source") != "agent" or one.get("llm_call_count") == 0:
            continue
        metrics = one.get("metrics") or {}
        if one.get("is_copied_context"):
            notes.add("steps copied from an earlier trajectory (is_copied_context) are left out: they were trained there")
        elif not calls.has_ids(metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")):
            notes.add("steps of an agent without token ids are left out: they stay in the prompts of later steps")
        elif (one.get("llm_call_count") or 1) > 1:
            raise UnsupportedRecords(f"{place.path}: sample {place.index}: step {one.get('step_id')}", "one call of the model in a step",
                                     f"{one['llm_call_count']}, whose tokens are joined", "Give the trial's result.json, which has the calls one by one")
        else:
            yield metrics
