"""verl's DataProto, pickled by save_to_disk: tensors in `batch`, arrays of objects in `non_tensor_batch`, and `meta_info`.

  prompts [B, P] padded at the left, responses [B, R] padded at the right, attention_mask [B, P + R]
  response_mask, old_log_probs, ref_log_prob, rollout_log_probs, advantages, returns, values, token_level_* [B, R]
  rollout_is_weights [B, R]: factors of the policy loss, which go into the advantages
  non_tensor_batch["uid"]: the group; meta_info["temperature"], meta_info["global_steps"]
  step-wise agents: non_tensor_batch["traj_uid"] (verl-agent), or rLLM's "episode_ids", "trajectory_ids", "step_ids", "is_pad_step"

A TensorDict or a dict with the same names can also be read (tensor_dicts.py). In nested (jagged) tensors, as verl's TransferQueue has them, rows
are unpadded, and there may be no attention_mask.
"""

import math
import re

from . import tensor_dicts
from .errors import RecordError, UnsupportedRecords
from .left_out import refuse_media
from .neutral import Place, all_series, is_plain, number, plain_scalars, record, span_of_ones, weighted, zero_or_one
from .pickles import Inert
from .tensors import Jagged, Tensor, as_list

NAME = "verl DataProto"
_SERIES = {"old_logprobs": "old_log_probs", "ref_logprobs": "ref_log_prob", "rollout_logprobs": "rollout_log_probs",
           "values": "values", "returns": "returns", "advantage": "advantages"}
_WEIGHTS = "rollout_is_weights"  # factors of the policy loss, made from rollout_log_probs
_REWARDS = ("token_level_rewards", "token_level_scores", "rm_scores")
# The tensors that a record takes; input_ids and position_ids follow from the others.
TENSORS = {"prompts", "responses", "attention_mask", "response_mask", "input_ids", "position_ids", "routed_experts", "temperature", _WEIGHTS,
         *_SERIES.values(), *_REWARDS}
_TAKEN_META = {"temperature", "global_steps", "validate"}
_LINEAGE = ("uid", "traj_uid", "episode_ids", "trajectory_ids", "step_ids", "is_pad_step")


def matches(content):
    if isinstance(content, Inert):
        return content.name == "DataProto" or tensor_dicts.matches(content)
    return isinstance(content, dict) and {"prompts", "responses"} <= content.keys() and isinstance(content["responses"], Tensor)


def records(contents, notes):
    for path, content, step in contents:
        yield from _records(path, content, step, notes)


def _records(path, content, step, notes):
    batch, objects, meta = tensor_dicts.parts(content, path)
    unpadded = isinstance(batch.get("prompts"), Jagged) and isinstance(batch.get("responses"), Jagged)
    for name in ("prompts", "responses", *(("attention_mask",) if not unpadded else ())):
        if not isinstance(batch.get(name), Tensor) or len(batch[name].shape) != 2:
            raise RecordError(f"{path}: {name}", "a tensor [samples, tokens]", "none of that form",
                              "Only a batch after generation can be replayed; text alone cannot")
    if meta.get("validate") is True:
        raise UnsupportedRecords(f"{path}: meta_info: validate", "a batch of training", "one of validation", "Responses of a validation are not trained on")
    count = batch["responses"].shape[0]
    of_batch = {name: values for name, values in objects.items() if isinstance(values, (list, tuple)) and len(values) != count}
    objects = {name: values for name, values in objects.items() if name not in of_batch}
    for name, values in {**objects, **{name: batch[name] for name in TENSORS & batch.keys()}}.items():
        if isinstance(values, Tensor) and (not values.shape or len(values) != count):
            raise RecordError(f"{path}: {name}", f"{count} rows, one per sample", f"shape {values.shape}")
    left = {name: tensor for name, tensor in batch.items() if name not in TENSORS}
    refuse_media(path, {**left, **of_batch})
    _check_positions(path, batch.get("position_ids"))
    notes.leave({**left, **of_batch, **{name: value for name, value in meta.items() if name not in _TAKEN_META}})
    found = meta.get("global_steps")
    step = found if type(found) is int else step
    padding = 0
    for index in range(count):
        place = Place(path, index)
        row = {name: batch[name][index] for name in TENSORS & batch.keys()}
        if unpadded:
            row["attention_mask"] = [1] * (len(row["prompts"]) + len(row["responses"]))
        extra = {name: values[index] for name, values in objects.items()}
        if extra.get("is_pad_step"):
            padding += 1
            continue
        yield record_of(place, row, extra, row.get("temperature", meta.get("temperature")), step, notes)
    if padding:
        notes.add(f"{padding} rows that rLLM added to fill up the batch (is_pad_step) are left out")


def _check_positions(path, positions):
    """M-RoPE's positions [B, 3 or 4, S] have equal rows for text; others show images, whose features are elsewhere."""
    if positions is None or len(positions.shape) != 3:
        return
    for sample in positions.tolist():
        if any(axis != sample[-1] for axis in sample[-3:]):
            raise UnsupportedRecords(f"{path}: position_ids", "positions of text", "positions of images (the axes differ)",
                                     "espalier.hf and espalier.trl train rollouts with images in Python")


def record_of(place, row, extra, temperature, step, notes):
    """The neutral record of one sample. `row`: its tensors by verl's names. `extra`: its other values."""
    refuse_media(f"{place.path}: sample {place.index}", extra)
    notes.leave({name: value for name, value in extra.items() if name not in _LINEAGE and not is_plain(value)})
    prompt, response = row["prompts"].tolist(), row["responses"].tolist()
    attended = zero_or_one(place, "attention_mask", row["attention_mask"])
    if len(attended) != len(prompt) + len(response):
        raise place.wrong("attention_mask", f"{len(prompt) + len(response)} entries, prompt and response", str(len(attended)))
    begin, _ = span_of_ones(place, "attention_mask of the prompt", attended[: len(prompt)], "left")
    _, end = span_of_ones(place, "attention_mask of the response", attended[len(prompt) :], "right")
    mask = [1] * end
    if "response_mask" in row:
        whole = zero_or_one(place, "response_mask", row["response_mask"])
        if len(whole) != len(response) or any(whole[end:]):
            raise place.wrong("response_mask", f"{len(response)} entries, zero where attention_mask is zero", "others")
        mask = whole[:end]

    def part(name):
        if name not in row:
            return None
        values = row[name].tolist()
        if len(values) != len(response):
            raise place.wrong(name, f"{len(response)} entries, one per response token with padding", str(len(values)))
        return values[:end]

    parts = all_series(place, _SERIES, part, mask)
    parts["advantage"] = weighted(place, _WEIGHTS, part(_WEIGHTS), parts["advantage"], mask, notes)
    routes = row.get("routed_experts")
    if routes is not None:
        if len(routes) != len(attended):
            raise place.wrong("routed_experts", f"{len(attended)} entries, one per token with padding", str(len(routes)))
        routes = [as_list(routes[i]) for i in range(begin, len(prompt) + end)]
    return record(place, prompt[begin:], response[:end], mask, **_lineage(place, extra), step=step,
                  temperature=None if temperature is None else number(place, "temperature", temperature),
                  reward=_reward(place, row, end, mask), **parts, routed_experts=routes,
                  meta=plain_scalars({k: v for k, v in extra.items() if k not in _LINEAGE}))


def _lineage(place, extra):
    """Group, trajectory and turn of a sample. rLLM's trajectory_ids are equal for all rollouts of a task: such an id is the group, and together with
    the episode id the trajectory. A step_id ends with the turn."""
    for name in _LINEAGE[:-1]:
        if not isinstance(extra.get(name), (str, int, type(None))):
            raise place.wrong(name, "a text or an integer", type(extra[name]).__name__)
    group, episode, role = extra.get("uid"), extra.get("episode_ids"), extra.get("trajectory_ids")
    if extra.get("traj_uid") is not None or episode is None or role is None:
        return {"group": group, "trajectory": extra.get("traj_uid")}
    turn = re.search(r"step(\d+)$", str(extra.get("step_ids", "")))
    return {"group": role if group is None else group, "trajectory": f"{episode}:{role}", "turn": int(turn.group(1)) if turn else None}


def _reward(place, row, end, mask):
    """The reward: the sum over the response, as verl's outcome estimators take it; a list where tokens before the last one have rewards, which
    verl's gae and reinforce_plus_plus use where they stand. None if the batch has no rewards."""
    for name in _REWARDS:
        if name in row:
            values = row[name].tolist()
            if any(value != 0 for value in values[end:]):
                raise place.wrong(name, "zeros in the padding", "other values")
            last = max((t for t, one in enumerate(mask) if one), default=0)
            if any(value != 0 for value in values[:last]):
                return [number(place, name, value) for value in values[:end]]
            return number(place, name, math.fsum(values[:end]))
    return None
