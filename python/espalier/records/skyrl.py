"""SkyRL's training batch, as trainer.dump_data_batch pickles it: a TrainingInputBatch of tensors, and its metadata.

  sequences, attention_mask [B, S]: prompt and response, padded at the left and, in older versions, at the right
  response_mask, loss_mask, rewards, action_log_probs, base_action_log_probs, rollout_logprobs, values, returns, advantages [B, R]:
  for the last R columns of `sequences`; response_mask is 1 for response tokens
  is_last_step [B], of step-wise training: rows up to the next true one are the turns of one trajectory
  metadata["uids"]: the group; metadata["trajectory_ids"]: a text, or a TrajectoryID(instance_id, repetition_id)

The pickle's state holds each tensor as bytes of torch.save. SkyRL reads a trajectory's reward from its last turn.
"""

import io
import math

from . import torch_files
from .errors import RecordError, UnsupportedRecords
from .neutral import Place, number, record, series, span_of_ones, zero_or_one
from .pickles import Inert
from .tensors import Tensor, as_list

NAME = "SkyRL training batch"
_SERIES = {"old_logprobs": "action_log_probs", "ref_logprobs": "base_action_log_probs", "rollout_logprobs": "rollout_logprobs",
           "values": "values", "returns": "returns", "advantage": "advantages"}
_NEEDED = ("sequences", "attention_mask", "response_mask")
_USED = {*_NEEDED, "loss_mask", "rewards", "is_last_step", *_SERIES.values()}
_NOT_TEXT = ("pixel_values", "image_grid_thw")


def matches(content):
    return isinstance(content, Inert) and content.name in ("TrainingInputBatch", "TensorBatch")


def records(contents, notes):
    for path, content, step in contents:
        yield from _records(path, content, step, notes)


def _records(path, content, step, notes):
    batch, metadata = _parts(content, path)
    for name in _NEEDED:
        if name not in batch or len(batch[name].shape) != 2:
            raise RecordError(f"{path}: {name}", "a tensor [samples, tokens]", "none of that form")
    count = batch["sequences"].shape[0]
    for name in _USED & batch.keys():
        if not batch[name].shape or len(batch[name]) != count:
            raise RecordError(f"{path}: {name}", f"{count} rows, one per sample", f"shape {batch[name].shape}")
    groups = _names(path, metadata, "uids", count)
    trajectories = _names(path, metadata, "trajectory_ids", count) if "is_last_step" in batch else None
    ignored = sorted(batch.keys() - _USED)
    if ignored:
        notes.append(f"tensors that no field of a record takes: {', '.join(ignored)}")
    notes.append("SkyRL training batch: the temperature is not in it (--temperature, by default 1)")
    padding = _padding(groups)
    if padding:
        notes.append(f"{padding} rows that SkyRL added to fill up the batch are left out")
    lineages = _lineages(path, batch["is_last_step"].tolist(), trajectories, count - padding) if "is_last_step" in batch else None
    unused = 0
    for index in range(count - padding):
        row = {name: batch[name][index] for name in _USED & batch.keys() if name != "is_last_step"}
        lineage = {} if lineages is None else dict(zip(("trajectory", "turn"), lineages[index]))
        reward, is_last = _reward(Place(path, index), row), lineages is None or lineages[index][2]
        unused += not is_last and bool(reward)
        yield _record(Place(path, index), row, step, group=None if groups is None else groups[index],
                      reward=reward if is_last else None, **lineage)
    if unused:
        notes.append(f"rewards of {unused} turns that are not the last of their trajectory are left out: SkyRL takes that of the last")


def _record(place, row, step, **fields):
    sequence = row["sequences"].tolist()
    attended = zero_or_one(place, "attention_mask", row["attention_mask"])
    present = zero_or_one(place, "response_mask", row["response_mask"])
    if len(attended) != len(sequence) or len(present) > len(sequence):
        raise place.wrong("attention_mask", f"{len(sequence)} entries, and a response_mask of at most as many", f"{len(attended)}, {len(present)}")
    offset = len(sequence) - len(present)
    first = present.index(1) if 1 in present else 0
    _, last = span_of_ones(place, "response_mask", present[first:], "right")
    begin = attended.index(1) if 1 in attended else 0
    _, end = span_of_ones(place, "attention_mask", attended[begin:], "right")
    end += begin
    cut, last = (offset + first, first + last) if 1 in present else (end, 0)
    if 1 in present and offset + last != end:
        raise place.wrong("response_mask", "a response that ends where attention_mask ends", f"column {offset + last} instead of {end}")

    def part(name):
        if name not in row:
            return None
        values = row[name].tolist()
        if len(values) != len(present):
            raise place.wrong(name, f"{len(present)} entries, as response_mask", str(len(values)))
        return values[first:last]

    mask = zero_or_one(place, "loss_mask", part("loss_mask")) if "loss_mask" in row else [1] * (end - cut)
    parts = {name: series(place, field, part(field), mask) for name, field in _SERIES.items()}
    return record(place, sequence[begin:cut], sequence[cut:end], mask, step=step, **fields, **parts)


def _reward(place, row):
    return number(place, "rewards", math.fsum(row["rewards"].tolist())) if "rewards" in row else None


def _padding(groups):
    """The number of padding rows at the end: their groups are pad0, pad1, and so on."""
    for count in range(len(groups or ()), 0, -1):
        if groups[-count:] == [f"pad{i}" for i in range(count)]:
            return count
    return 0


def _lineages(path, last, names, count):
    """(trajectory, turn, is last) of each row."""
    out, seen, begin = [], set(), 0
    for index in range(count):
        name = f"{path}:{begin}" if names is None else names[begin]
        if names is not None and names[index] != name:
            raise Place(path, index).wrong("trajectory_ids", f"{name} up to its last step", names[index])
        if index == begin and name in seen:
            raise Place(path, index).wrong("trajectory_ids", "consecutive steps of a trajectory", f"{name} again after its last step")
        seen.add(name)
        out.append((name, index - begin, bool(last[index])))
        begin = index + 1 if last[index] else begin
    if begin != count:
        raise Place(path, count - 1).wrong("is_last_step", "true at the last step of each trajectory", "false at the end of the batch")
    return out


def _names(path, metadata, field, count):
    values = metadata.get(field)
    if values is None:
        return None
    values = [_name_of(path, field, value) for value in as_list(values)]
    if len(values) != count:
        raise RecordError(f"{path}: metadata: {field}", f"{count} entries, one per sample", str(len(values)))
    return values


def _name_of(path, field, value):
    if isinstance(value, Inert) and value.name == "TrajectoryID":
        state = value.state if isinstance(value.state, dict) else {}
        value = f"{state.get('instance_id')}_{state.get('repetition_id')}"
    if not isinstance(value, (str, int)):
        raise RecordError(f"{path}: metadata: {field}", "texts, integers or TrajectoryID", type(value).__name__)
    return value


def _parts(content, path):
    """(tensors by name, metadata) of the pickle's state."""
    state = content.state
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise RecordError(f"{path}: {content.name}", "a state with batch_dict and metadata", type(state).__name__)
    batch = {}
    for name, data in state["batch_dict"].items():
        if name in _NOT_TEXT:
            raise UnsupportedRecords(f"{path}: {name}", "tokens only", "images")
        if not isinstance(data, (bytes, bytearray)):
            raise UnsupportedRecords(f"{path}: {name}", "bytes of torch.save", type(data).__name__, "Dump with the SkyRL version that wrote them so")
        tensor = torch_files.load_zip(io.BytesIO(data), f"{path}: {name}")
        if tensor is not None:  # SkyRL keeps absent tensors as None
            if not isinstance(tensor, Tensor):
                raise UnsupportedRecords(f"{path}: {name}", "a tensor", type(tensor).__name__)
            batch[name] = tensor
    metadata = state.get("metadata")
    return batch, metadata if isinstance(metadata, dict) else {}
