"""slime's debug dumps, files of torch.save:

  --save-debug-rollout-data   {rollout_id, samples: [Sample.to_dict(), ...]}: what was sampled
  --save-debug-train-data     {rollout_id, rank, rollout_data: {tokens: [...], response_lengths: [...], log_probs, ...}}:
                              what one rank trained on, each field a list with an entry per sample

Samples with equal `rollout_id` (`rollout_ids` in train dumps) are the turns of one trajectory, in order.

The response is the last response_length tokens; mask and log-probs have its length. rollout_top_p_token_ids[offsets[t] : offsets[t + 1]], with
offsets in rollout_top_p_token_offsets, are the tokens that top-p kept when response token t was sampled. Files of one folder are joined by sample index:
train dumps of all ranks, to which rollout dumps add the group. The `rollout_id` of the dump itself is the step.
"""

import collections

from .errors import RecordError, UnsupportedRecords
from .neutral import Place, kept_sets, number, plain_scalars, record, series, zero_or_one
from .pickles import Inert
from .tensors import as_list

NAME = "slime debug dump"
_SERIES = {  # neutral name -> names in samples and in train dumps
    "old_logprobs": ("log_probs",), "ref_logprobs": ("ref_log_probs",), "rollout_logprobs": ("rollout_log_probs",),
    "values": ("values",), "returns": ("returns",),
}
_LISTS = {"loss_masks": "loss_mask", "response_lengths": "response_length", "sample_indices": "index", "rollout_ids": "rollout_id"}


def matches(content):
    return isinstance(content, dict) and (isinstance(content.get("samples"), list) or isinstance(content.get("rollout_data"), dict))


def records(contents, notes):
    """Returns the neutral records. `contents`: [(path, object)] of one or several dumps. Adds to `notes`."""
    train, sampled = [], []
    for path, content in contents:
        (train if "rollout_data" in content else sampled).extend(_samples(path, content))
    if not train:
        return _with_trajectories(sampled, [_record(place, sample, notes) for place, sample in sampled])
    joined = _one_per_index(train)
    seen = {_key(sample): sample for _, sample in sampled if sample.get("index") is not None}
    merged, out, found = [], [], 0
    for place, sample in joined:
        other = seen.get(_key(sample)) if sample.get("index") is not None else None
        if other is not None:
            found += 1
            if as_list(other["tokens"]) != as_list(sample["tokens"]):
                raise place.wrong("tokens", "the tokens of the rollout dump's sample with this index", "others", "Are both of one run?")
            sample = {**{k: v for k, v in other.items() if v is not None}, **{k: v for k, v in sample.items() if v is not None}}
        merged.append((place, sample))
        out.append(_record(place, sample, notes))
    if sampled and found < len(sampled):
        notes.append(f"{len(sampled) - found} of {len(sampled)} sampled responses stand in no train dump and are left out")
    return _with_trajectories(merged, out)


def _with_trajectories(samples, out):
    """Adds `trajectory` to the records of samples that share their rollout_id with another sample of the step. Returns the records."""
    names = [None if sample.get("rollout_id") is None else (sample["step"], sample["rollout_id"]) for _, sample in samples]
    counts = collections.Counter(names)
    for (place, sample), name, record_ in zip(samples, names, out):
        if name is not None and counts[name] > 1:
            if not isinstance(sample["rollout_id"], (int, str)):
                raise place.wrong("rollout_id", "an integer or a text", type(sample["rollout_id"]).__name__)
            record_["trajectory"] = sample["rollout_id"]
    return out


def _key(sample):
    return sample["step"], sample["index"]


def _one_per_index(train):
    """Joins the samples of all ranks, since ranks may hold the same sample. If a rank lacks a field (log-probs, on early pipeline stages), it
    comes from another rank."""
    by_index, out = {}, []
    for place, sample in train:
        first = by_index.setdefault(_key(sample), sample) if sample.get("index") is not None else sample
        if first is sample:
            out.append((place, sample))
            continue
        if as_list(first["tokens"]) != as_list(sample["tokens"]):
            raise place.wrong("tokens", "the tokens of the other rank's sample with this index", "others")
        for name, value in sample.items():
            if first.get(name) is None:
                first[name] = value
    return out


def _samples(path, content):
    step = content.get("rollout_id")
    step = step if type(step) is int else None
    if "rollout_data" in content:
        found = _columns(path, content["rollout_data"])
    else:
        found = []
        for sample in content["samples"]:
            found.extend(sample if isinstance(sample, list) else [sample])  # in nested lists, each inner list is a group
    for index, sample in enumerate(found):
        place = Place(path, index)
        if isinstance(sample, Inert):
            sample = sample.state
        if not isinstance(sample, dict) or sample.get("tokens") is None or type(sample.get("response_length")) is not int:
            raise place.wrong("sample", "tokens and response_length", "a sample without them",
                              "Was the dump written by --save-debug-rollout-data or --save-debug-train-data?")
        yield place, {**sample, "step": step}


def _columns(path, data):
    counts = {name: len(column) for name, column in data.items() if isinstance(column, list)}
    for name in ("tokens", "response_lengths"):
        if name not in counts:
            raise RecordError(f"{path}: rollout_data", f"a list {name}", "none")
    names = [name for name, count in counts.items() if count == counts["tokens"]]
    if "response_lengths" not in names:
        raise RecordError(f"{path}: response_lengths", f"{counts['tokens']} entries, one per sample", str(counts["response_lengths"]))
    return [{_LISTS.get(name, name): data[name][i] for name in names} for i in range(counts["tokens"])]


def _reward(place, sample, notes):
    value = sample.get("raw_reward")  # train dumps: `rewards` are normalised already
    value = sample.get("reward", sample.get("rewards")) if value is None else value
    if isinstance(value, dict):
        note = "rewards that are dicts are left out: slime picks one with --reward-key"
        if note not in notes:
            notes.append(note)
        return None
    return None if value is None else number(place, "reward", value)


def _record(place, sample, notes):
    if sample.get("multimodal_inputs") or sample.get("multimodal_train_inputs"):
        raise UnsupportedRecords(f"{place.path}: sample {place.index}", "tokens only", "images or other media")
    tokens, length = as_list(sample["tokens"]), sample["response_length"]
    if not 0 <= length <= len(tokens):
        raise place.wrong("response_length", f"at most {len(tokens)}, the number of tokens", str(length))
    begin = len(tokens) - length
    mask = sample.get("loss_mask")
    mask = [1] * length if mask is None else zero_or_one(place, "loss_mask", mask)
    if len(mask) != length:
        raise place.wrong("loss_mask", f"{length} entries, one per response token", str(len(mask)))
    if sample.get("remove_sample"):
        mask = [0] * length
    parts = {name: series(place, field, _whole(place, field, sample, length), mask)
             for name, fields in _SERIES.items() for field in fields}
    routes = sample.get("rollout_routed_experts")
    status = sample.get("status")
    if isinstance(status, Inert):
        status = status.args[0] if status.args else None
    return record(
        place, tokens[:begin], tokens[begin:], mask, id=sample.get("index"), group=sample.get("group_index"),
        step=sample["step"], reward=_reward(place, sample, notes),
        advantage=series(place, "advantages", _whole(place, "advantages", sample, length), mask), **parts,
        kept_ids=kept_sets(place, "rollout_top_p_token_ids", sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets"),
                           length),
        routed_experts=None if routes is None else as_list(routes), meta=plain_scalars({"status": status}))


def _whole(place, field, sample, length):
    """The series `field`. Raises RecordError if its length differs, for example because the dump holds one rank's slice under context
    parallelism."""
    values = sample.get(field)
    if values is None or len(values) == length:
        return values
    if 0 < len(values) < length and field != "rollout_log_probs":
        raise place.wrong(field, f"{length} entries, one per response token", str(len(values)),
                          "With context parallelism a rank's dump holds slices: record with a context-parallel size of 1")
    raise place.wrong(field, f"{length} entries, one per response token", str(len(values)))
