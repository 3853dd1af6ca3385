"""verl's DataProto, pickled by save_to_disk: tensors in `batch`, arrays of objects in `non_tensor_batch`, and `meta_info`.

  prompts [B, P] padded at the left, responses [B, R] padded at the right, attention_mask [B, P + R]
  response_mask, old_log_probs, ref_log_prob, rollout_log_probs, advantages, returns, values, token_level_* [B, R]
  non_tensor_batch["uid"]: the group; meta_info["temperature"], meta_info["global_steps"]
  step-wise agents: non_tensor_batch["traj_uid"] (verl-agent), or rLLM's "episode_ids", "trajectory_ids", "step_ids", "is_pad_step"

The pickle's state holds `batch` as bytes of torch.save, as bytes of an inner pickle of arrays, or (numpy serialization) as a
tuple (batch size, device, {name: (dtype, shape, bytes)}). A TensorDict saved alone can also be read.
"""

import io
import math
import re

from . import pickles, torch_files
from .errors import RecordError, UnsupportedRecords
from .neutral import Place, number, plain_scalars, record, series, span_of_ones, zero_or_one
from .pickles import Inert
from .tensors import DTYPES, Tensor, as_list, numbers_of

NAME = "verl DataProto"
_SERIES = {"old_logprobs": "old_log_probs", "ref_logprobs": "ref_log_prob", "rollout_logprobs": "rollout_log_probs",
           "values": "values", "returns": "returns", "advantage": "advantages"}
_REWARDS = ("token_level_rewards", "token_level_scores", "rm_scores")
_USED = {"prompts", "responses", "attention_mask", "response_mask", "input_ids", "position_ids", "routed_experts",
         *_SERIES.values(), *_REWARDS}
_LINEAGE = ("uid", "traj_uid", "episode_ids", "trajectory_ids", "step_ids", "is_pad_step")
_CONSOLIDATED = "_rebuild_tensordict_files_consolidated"


def matches(content):
    if isinstance(content, Inert):
        return content.name in ("DataProto", "TensorDict", "_make_td", _CONSOLIDATED)
    return isinstance(content, dict) and {"prompts", "responses", "attention_mask"} <= content.keys()


def records(contents, notes):
    for path, content, step in contents:
        yield from _records(path, content, step, notes)


def _records(path, content, step, notes):
    batch, objects, meta = _parts(content, path)
    for name in ("prompts", "responses", "attention_mask"):
        if not isinstance(batch.get(name), Tensor) or len(batch[name].shape) != 2:
            raise RecordError(f"{path}: {name}", "a tensor [samples, tokens]", "none of that form",
                              "Only a batch after generation can be replayed; text alone cannot")
    count = batch["responses"].shape[0]
    for name, values in {**objects, **{name: batch[name] for name in _USED if name in batch}}.items():
        if not values.shape or len(values) != count:
            raise RecordError(f"{path}: {name}", f"{count} rows, one per sample", f"shape {values.shape}")
    ignored = sorted(name for name in batch if name not in _USED)
    if ignored:
        notes.append(f"tensors that no field of a record takes: {', '.join(ignored)}")
    found = meta.get("global_steps")
    step = found if type(found) is int else step
    padding = 0
    for index in range(count):
        place = Place(path, index)
        row = {name: batch[name][index] for name in _USED if isinstance(batch.get(name), Tensor)}
        extra = {name: values[index] for name, values in objects.items()}
        if extra.get("is_pad_step"):
            padding += 1
            continue
        yield record_of(place, row, extra, meta.get("temperature"), step)
    if padding:
        notes.append(f"{padding} rows that rLLM added to fill up the batch (is_pad_step) are left out")


def record_of(place, row, extra, temperature, step):
    """The neutral record of one sample. `row`: its tensors by verl's names. `extra`: its other values."""
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

    parts = {name: series(place, field, part(field), mask) for name, field in _SERIES.items()}
    routes = row.get("routed_experts")
    if routes is not None:
        if len(routes) != len(attended):
            raise place.wrong("routed_experts", f"{len(attended)} entries, one per token with padding", str(len(routes)))
        routes = [routes[i].tolist() for i in range(begin, len(prompt) + end)]
    return record(place, prompt[begin:], response[:end], mask, **_lineage(place, extra), step=step,
                  temperature=None if temperature is None else number(place, "temperature", temperature),
                  reward=_reward(place, row, end), **parts, routed_experts=routes,
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


def _reward(place, row, end):
    """The reward: the sum over the response, as in verl's estimators. None if the batch has no rewards."""
    for name in _REWARDS:
        if name in row:
            values = row[name].tolist()
            if any(value != 0 for value in values[end:]):
                raise place.wrong(name, "zeros in the padding", "other values")
            return number(place, name, math.fsum(values[:end]))
    return None


# ---- the pickle's parts ---------------------------------------------------------------------------------------------


def _parts(content, path):
    """(tensors by name, arrays by name, meta) of a DataProto, a TensorDict or a dict of tensors."""
    if not isinstance(content, Inert) or content.name != "DataProto":
        return _tensors(content, path), {}, {}
    state = content.state
    if isinstance(state, dict):  # a class that pickles its attributes
        state = (state.get("batch"), state.get("non_tensor_batch"), state.get("meta_info"))
    if not isinstance(state, tuple) or len(state) != 3:
        raise RecordError(f"{path}: DataProto", "batch, non_tensor_batch and meta_info", "another state")
    batch, objects, meta = state
    arrays = {name: values for name, values in (objects or {}).items() if isinstance(values, Tensor)}
    return _tensors(batch, f"{path}: batch"), arrays, meta if isinstance(meta, dict) else {}


def _tensors(batch, where):
    if isinstance(batch, (bytes, bytearray)):
        return _tensors(_unpacked(bytes(batch), where), where)
    if isinstance(batch, Inert):
        return _tensors(_tensor_dict(batch, where), where)
    if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], dict):
        return {name: _encoded(entry, f"{where}: {name}") for name, entry in batch[2].items()}
    if isinstance(batch, dict):
        return {name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}
    raise RecordError(where, "tensors by name", type(batch).__name__)


def _unpacked(data, where):
    if torch_files.is_zip(data):
        return torch_files.load_zip(io.BytesIO(data), where)
    if torch_files.is_legacy(data):
        return torch_files.load_legacy(io.BytesIO(data), where)
    return pickles.load_bytes(data, where)


def _tensor_dict(held, where):
    """The tensors of a pickled TensorDict. They are in its own state, or share one storage."""
    if held.name == _CONSOLIDATED:
        return _consolidated(held, where)
    state = held.args[1] if held.name == "_make_td" and len(held.args) == 2 else held.state
    if isinstance(state, dict) and isinstance(state.get("_tensordict"), dict):
        return state["_tensordict"]
    raise UnsupportedRecords(where, "a TensorDict of tensors", f"a {held.name} of another form",
                             "Save with the tensordict version that verl names, or batch.to_dict() with torch.save")


def _consolidated(held, where):
    try:
        metadata, storage = held.args
        raw, begin = bytes(storage.flat()), storage.offset
        out = {}
        for name, (dtype, shape, first, end, *_) in metadata["leaves"].items():
            kind = dtype.removeprefix("torch.")
            data = raw[begin + first : begin + end]
            tensor = Tensor.of(numbers_of(data, kind), kind, shape)
            out[name] = tensor
        return out
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RecordError(where, "a TensorDict in one storage", "metadata of another form") from None


def _encoded(entry, where):
    if not isinstance(entry, tuple) or len(entry) != 3 or entry[0] not in DTYPES:
        raise UnsupportedRecords(where, "a tensor as (dtype, shape, bytes)", "a nested tensor or another form",
                                 "Save the batch before it becomes a nested tensor")
    dtype, shape, data = entry
    data = bytes(as_list(data)) if isinstance(data, Tensor) else data
    if not isinstance(data, (bytes, bytearray)):
        raise RecordError(where, "bytes", type(data).__name__)
    return Tensor.of(numbers_of(bytes(data), dtype), dtype, tuple(shape))
