"""The layouts of slime's debug dumps, files of torch.save; all become samples with the names of slime's Sample.

  --save-debug-rollout-data   {rollout_id, samples: [Sample.to_dict(), ...]}: what was sampled; eval_*.pt: what was evaluated
  --save-debug-train-data     before August 2026, one file a rank: {rollout_id, rank, rollout_data: {tokens: [...], response_lengths: [...], ...}},
                              each field a list with an entry per sample
                              since then, format_version 2, one file a rollout: {rollout_id, samples: [{tokens, response_lengths, ...}], raw_reward}

`raw_reward` of a train dump has the order of the rollout, and the samples have that of a rank's partition: entry p belongs to the sample with
`rollout_position` (before: `partition`) p. `local_raw_reward` has the order of the samples.

A rollout dump may keep large tensors in safetensors files beside it (DiskTensorRef): NAME_r3_spill/ID/FILE for NAME.pt.
"""

import os
import re

from . import safetensors_files
from .errors import RecordError, UnsupportedRecords
from .neutral import Place
from .pickles import Inert
from .tensors import Tensor, as_list

_NAMES = {"loss_masks": "loss_mask", "response_lengths": "response_length", "sample_indices": "index", "sample_index": "index", "rollout_ids": "rollout_id",
          "partition": "rollout_position"}
_OF_FILE = {"rollout_id", "rank", "samples", "format_version", "dp_shards", "raw_reward", "rollout_data"}
_OF_SCHEDULE = {"micro_batch_indices", "num_microbatches", "global_batch_sizes", "max_seq_len", "dynamic_global_batch_size"}
_REFERENCES = ("DiskTensorRef", "TensorRef")
_SPILLED = "_r3_spill"


def matches(content):
    return isinstance(content, dict) and (isinstance(content.get("samples"), list) or isinstance(content.get("rollout_data"), dict))


def is_train(content):
    return "rollout_data" in content or type(content.get("format_version")) is int


def is_evaluation(path):
    """True for eval_3.pt and the like: slime writes evaluation under the same names, with this before the number."""
    return re.search(r"(?:^|[^a-zA-Z])eval_\d+", os.path.basename(path)) is not None


def samples(path, content, notes):
    """Yields (place, sample). A sample is a dict; its `step` is the dump's rollout_id, and its `raw_reward` is its own or is not there."""
    notes.leave({name: value for name, value in content.items() if name not in _OF_FILE})
    step = content.get("rollout_id")
    step = step if type(step) is int else None
    if "rollout_data" in content:
        found, rewards = _columns(path, content["rollout_data"], notes)
    elif is_train(content):
        if content["format_version"] != 2:
            raise UnsupportedRecords(f"{path}: format_version", "2, or a dump without this field", str(content["format_version"]))
        found, rewards = content["samples"], content.get("raw_reward")
    else:
        found, rewards = [], None
        for sample in content["samples"]:
            found.extend(sample if isinstance(sample, list) else [sample])  # in nested lists, each inner list is a group
    for index, sample in enumerate(found):
        place = Place(path, index)
        if isinstance(sample, Inert):
            sample = sample.state
        sample = {_NAMES.get(name, name): value for name, value in sample.items()} if isinstance(sample, dict) else {}
        if sample.get("tokens") is None or type(sample.get("response_length")) is not int:
            raise place.wrong("sample", "tokens and response_length", "a sample without them",
                              "Was the dump written by --save-debug-rollout-data or --save-debug-train-data?")
        if is_train(content):
            sample["raw_reward"] = _own_raw_reward(place, sample, rewards)
            if sample["raw_reward"] is None:  # the order of the rollout, without the sample's position in it
                notes.leave({"raw_reward": rewards})
        yield place, {**{name: _stored(place, name, value) for name, value in sample.items()}, "step": step}


def _columns(path, data, notes):
    """(the samples of one rank, raw_reward of the whole batch)."""
    lengths = {name: _length(column) for name, column in data.items()}
    count = lengths.get("tokens")
    if count is None:
        raise RecordError(f"{path}: rollout_data", "a list tokens", "none")
    if lengths.get("response_lengths") != count:
        raise RecordError(f"{path}: response_lengths", f"{count} entries, one per sample", str(lengths.get("response_lengths", "none")))
    rewards = as_list(data.get("raw_reward"))
    columns = {name: data[name] for name, length in lengths.items() if length == count and name != "raw_reward"}
    notes.leave({name: value for name, value in data.items() if name not in columns and name not in _OF_SCHEDULE and name != "raw_reward"})
    if "partition" not in columns and _ascending(columns.get("sample_indices")) and rewards is not None and len(rewards) == count:
        columns.setdefault("local_raw_reward", rewards)
    return [{name: column[i] for name, column in columns.items()} for i in range(count)], rewards


def _length(column):
    """The number of entries of a list or tensor, None for anything else."""
    if isinstance(column, Tensor):
        return column.shape[0] if column.shape else None
    return len(column) if isinstance(column, (list, tuple)) else None


def _ascending(indices):
    """True for indices of samples that have the order of the rollout, as far as they show it."""
    indices = as_list(indices)
    return indices is not None and all(type(i) is int for i in indices) and all(a < b for a, b in zip(indices, indices[1:]))


def _own_raw_reward(place, sample, rewards):
    own, position = sample.pop("local_raw_reward", None), sample.get("rollout_position")
    if own is not None:
        return own
    if type(position) is not int or rewards is None:
        return None
    rewards = as_list(rewards)
    if not 0 <= position < len(rewards):
        raise place.wrong("raw_reward", f"an entry for rollout_position {position}", f"{len(rewards)} entries", "Was the dump written completely?")
    return rewards[position]


def _stored(place, name, value):
    """The tensor behind a DiskTensorRef, which lies beside the dump; any other value itself."""
    if not isinstance(value, Inert) or value.name not in _REFERENCES:
        return value
    parts = str((value.state or {}).get("path", "")).replace("\\", "/").split("/")
    folder = os.path.splitext(os.path.basename(place.path))[0] + _SPILLED
    if len(parts) < 3 or parts[-3] != folder or any(part in ("", ".", "..") for part in parts[-2:]):
        raise place.wrong(name, f"a tensor in the dump's own folder {folder}", "/".join(parts)[-80:] or "none", "Only files beside the dump are read")
    path = os.path.join(os.path.dirname(place.path), *parts[-3:])
    try:
        with open(path, "rb") as file:
            found = safetensors_files.load(file, os.path.getsize(path), path).get("tensor")
            if found is None:
                raise RecordError(path, "a tensor named tensor", "none")
            found.flat()
            return found
    except OSError as error:
        raise place.wrong(name, f"the file {path}", error.strerror or str(error), f"Copy the folder {folder} together with the dump") from None
