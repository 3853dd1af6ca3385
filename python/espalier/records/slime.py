"""slime's and miles' debug dumps (slime_layouts.py) as records.

The response is the last response_length tokens; mask and log-probs have its length. rollout_top_p_token_ids[offsets[t] : offsets[t + 1]], with
offsets in rollout_top_p_token_offsets, are the tokens that top-p kept when response token t was sampled.

Samples with equal `rollout_id` are the turns of one trajectory, in order. With `rollout_mask_sums`, the trainer takes one mean over all their tokens:
`loss_unit` is then "trajectory".

Files of one folder are joined by sample index: train dumps of all ranks, to which rollout dumps add the group and the raw reward. Dumps of
evaluation are left out. The `rollout_id` of the dump itself is the step.
"""

import collections

from . import slime_layouts
from .errors import UnsupportedRecords
from .left_out import refuse_media
from .neutral import all_series, is_plain, kept_sets, number, plain_scalars, record, series, zero_or_one
from .pickles import Inert
from .tensors import as_list

NAME = "slime debug dump"
_SERIES = {"old_logprobs": "log_probs", "ref_logprobs": "ref_log_probs", "rollout_logprobs": "rollout_log_probs", "values": "values", "returns": "returns"}
_TAKEN = {*_SERIES.values(), "advantages", "tokens", "response_length", "total_lengths", "loss_mask", "remove_sample", "index", "group_index", "rollout_id",
          "rollout_position", "data_parallel_rank", "rollout_mask_sums", "raw_reward", "reward", "rewards", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
          "rollout_routed_experts", "status", "weight_versions", "step"}
_DISTILLED = ("mopd_teacher_log_probs", "opd_reverse_kl")  # slime adds their KL to the advantages
_TEACHER = "teacher_log_probs"  # the same, but records have a field for it

matches = slime_layouts.matches


def records(contents, notes):
    """Returns the neutral records. `contents`: [(path, object)] of one or several dumps. Adds to `notes`."""
    evaluated = [path for path, _ in contents if slime_layouts.is_evaluation(path)]
    if evaluated and len(evaluated) == len(contents):
        raise UnsupportedRecords(evaluated[0], "a dump of training", "one of evaluation (eval_ in its name)",
                                 "Responses of an evaluation are not trained on; to read them all the same, rename the file")
    if evaluated:
        notes.add(f"{len(evaluated)} dumps of evaluation (eval_ in their names) are left out")
    train, sampled = [], []
    for path, content in contents:
        if path not in evaluated:
            (train if slime_layouts.is_train(content) else sampled).extend(slime_layouts.samples(path, content, notes))
    merged = _joined(_one_per_index(train), sampled, notes) if train else sampled
    out = [_record(place, sample, notes) for place, sample in merged]
    _give_trajectories(merged, out)
    return out


def _joined(train, sampled, notes):
    """Train dumps' samples, with the missing fields from samples of rollout dumps that have their index and tokens."""
    known = collections.defaultdict(list)
    for _, sample in sampled:
        if sample.get("index") is not None:
            known[_key(sample)].append(sample)
    out, found = [], set()
    for place, sample in train:
        same = known.get(_key(sample), ()) if sample.get("index") is not None else ()
        other = next((one for one in same if as_list(one["tokens"]) == as_list(sample["tokens"])), None)
        if same and other is None:
            raise place.wrong("tokens", "the tokens of the rollout dump's sample with this index", "others", "Are both of one run?")
        if other is not None:
            found.add(id(other))
            sample = {**{k: v for k, v in other.items() if v is not None}, **{k: v for k, v in sample.items() if v is not None}}
        out.append((place, sample))
    if sampled and len(found) < len(sampled):
        notes.add(f"{len(sampled) - len(found)} of {len(sampled)} sampled responses stand in no train dump and are left out")
    return out


def _give_trajectories(samples, out):
    """Adds `trajectory` and `turn` to the records of samples that share their rollout_id with another sample of the step, and `loss_unit`."""
    members = collections.defaultdict(list)
    for at, (_, sample) in enumerate(samples):
        if sample.get("rollout_id") is not None:
            members[sample["step"], sample["rollout_id"]].append(at)
    for (_, name), places in members.items():
        for turn, at in enumerate(places if len(places) > 1 else ()):
            if not isinstance(name, (int, str)):
                raise samples[at][0].wrong("rollout_id", "an integer or a text", type(name).__name__)
            out[at].update(trajectory=name, turn=turn)
        _check_mask_sums(samples, out, places)
    for (_, sample), found in zip(samples, out):
        if sample.get("rollout_mask_sums") is not None:
            found["loss_unit"] = "trajectory"


def _check_mask_sums(samples, out, places):
    """rollout_mask_sums divides the loss of a rollout: its samples must all be there."""
    place, sample = samples[places[0]]
    if sample.get("rollout_mask_sums") is None:
        return
    wanted, found = number(place, "rollout_mask_sums", sample["rollout_mask_sums"]), sum(sum(out[at]["loss_mask"]) for at in places)
    if found and wanted != found:
        raise place.wrong("rollout_mask_sums", f"{wanted:g} tokens with loss in the rollout's samples", str(found),
                          "Samples of this rollout are missing: give the dumps of all ranks together, as a folder")


def _key(sample):
    return sample["step"], sample["index"]


def _one_per_index(train):
    """Joins the samples of all ranks, since ranks may hold the same sample. If a rank lacks a field (log-probs, on early pipeline stages), it
    comes from another rank. Samples of one rollout may have one index and differ in their position."""
    by_index, out = {}, []
    for place, sample in train:
        if sample.get("index") is None:
            out.append((place, sample))
            continue
        first = by_index.setdefault((*_key(sample), sample.get("rollout_position")), sample)
        if first is sample:
            out.append((place, sample))
            continue
        if as_list(first["tokens"]) != as_list(sample["tokens"]):
            raise place.wrong("tokens", "the tokens of the other rank's sample with this index", "others")
        for name, value in sample.items():
            if first.get(name) is None:
                first[name] = value
    return out


def _reward(place, sample, notes):
    value = sample.get("raw_reward")
    value = sample.get("reward") if value is None else value
    if isinstance(value, dict):
        notes.add("rewards that are dicts are left out: slime picks one with --reward-key")
        return None
    if value is None and sample.get("rewards") is not None:
        notes.add("raw_reward is not there or belongs to no sample for certain: reward is slime's normalised rewards")
        value = sample["rewards"]
    return None if value is None else number(place, "reward", value)


def _record(place, sample, notes):
    teacher = sample.get(_TEACHER) if sample.get("advantages") is None else None  # else advantages hold its part
    left = {name: value for name, value in sample.items() if name not in _TAKEN and (teacher is None or name != _TEACHER)}
    refuse_media(f"{place.path}: sample {place.index}", left)
    if sample.get("advantages") is None and any(sample.get(name) is not None for name in _DISTILLED):
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: {next(name for name in _DISTILLED if sample.get(name) is not None)}",
                                 "records whose advantages hold the teacher's part", "no advantages",
                                 "Give the train dump (--save-debug-train-data) beside this one")
    notes.leave(left)
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
    parts = all_series(place, _SERIES, lambda field: _whole(place, field, sample, length), mask)
    if teacher is not None:
        parts["teacher_logprobs"] = series(place, _TEACHER, _whole(place, _TEACHER, sample, length), mask)
        notes.add(f"{_TEACHER} is teacher_logprobs: --opd-kl-coef, the run's opd_kl_coef, trains with it")
    routes = sample.get("rollout_routed_experts")
    status, versions = sample.get("status"), sample.get("weight_versions")
    if isinstance(status, Inert):
        status = status.args[0] if status.args else None
    meta = plain_scalars({"status": status}) or {}
    if isinstance(versions, list) and versions and all(map(is_plain, versions)):
        meta["weight_versions"] = versions
    return record(
        place, tokens[:begin], tokens[begin:], mask, id=sample.get("index"), group=sample.get("group_index"),
        step=sample["step"], reward=_reward(place, sample, notes),
        advantage=series(place, "advantages", _whole(place, "advantages", sample, length), mask), **parts,
        kept_ids=kept_sets(place, "rollout_top_p_token_ids", sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets"),
                           length),
        routed_experts=None if routes is None else as_list(routes), meta=meta or None)


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
