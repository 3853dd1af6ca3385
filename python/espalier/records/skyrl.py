"""SkyRL's training batch, as trainer.dump_data_batch pickles it: a TrainingInputBatch of tensors, and its metadata (skyrl_batch.py).

  sequences, attention_mask [B, S]: prompt and response, padded at the left and, in older versions, at the right
  response_mask, loss_mask, rewards, action_log_probs, base_action_log_probs, rollout_logprobs, values, returns, advantages [B, R]:
  for the last R columns of `sequences`; response_mask is 1 for response tokens
  rollout_expert_indices [B, S, layers, k], or packed to real tokens; router_padding_mask [B, S]: true where no experts were recorded
  rollout_sample_support, packed to response tokens, [tokens, k]: the tokens that were kept in sampling, then -1; only -1: not recorded
  is_last_step [B], of step-wise training: rows up to the next true one are the turns of one trajectory
  metadata["uids"]: the group, else metadata["policy_prompt_boundaries"]: (begin, end) rows of each prompt; metadata["pad_size"]: rows that fill up the batch;
  metadata["trajectory_ids"]: a text, or a TrajectoryID(instance_id, repetition_id)

SkyRL reads a trajectory's reward from its last turn. The trainer removes uids, is_last_step and rewards before it dumps a batch.
"""

import math

from . import skyrl_batch
from .errors import RecordError, UnsupportedRecords
from .left_out import refuse_media
from .neutral import Place, all_series, number, record, span_of_ones, zero_or_one
from .pickles import Inert
from .tensors import as_list

NAME = "SkyRL training batch"
_SERIES = {"old_logprobs": "action_log_probs", "ref_logprobs": "base_action_log_probs", "rollout_logprobs": "rollout_logprobs",
           "values": "values", "returns": "returns", "advantage": "advantages"}
_NEEDED = ("sequences", "attention_mask", "response_mask")
_ROUTES, _UNROUTED, _KEPT = "rollout_expert_indices", "router_padding_mask", "rollout_sample_support"
_USED = {*_NEEDED, "loss_mask", "rewards", "is_last_step", _ROUTES, _UNROUTED, _KEPT, *_SERIES.values()}
_TAKEN_METADATA = {"uids", "trajectory_ids", "is_last_step", "pad_size", "policy_prompt_boundaries", "policy_mini_batch_boundaries", "critic_mini_batch_boundaries",
                   "response_length", "avg_response_length", "metrics", "global_step"}

matches = skyrl_batch.matches


def records(contents, notes):
    for path, content, step in contents:
        yield from _records(path, content, step, notes)


def _records(path, content, step, notes):
    batch, metadata = skyrl_batch.parts(content, path)
    for name in _NEEDED:
        if name not in batch or len(batch[name].shape) != 2:
            raise RecordError(f"{path}: {name}", "a tensor [samples, tokens]", "none of that form")
    count = batch["sequences"].shape[0]
    left = {name: values for name, values in batch.items() if name not in _USED}
    refuse_media(path, left)
    _refuse_packing(path, left.get("sub_seq_lengths"))
    notes.leave({**left, **{name: value for name, value in metadata.items() if name not in _TAKEN_METADATA}})
    for name in _USED & batch.keys():
        if not batch[name].shape or len(batch[name]) != count:
            raise RecordError(f"{path}: {name}", f"{count} rows, one per sample", f"shape {batch[name].shape}")
    notes.add("SkyRL training batch: the temperature is not in it (--temperature, by default 1)")
    if len(metadata.get("policy_mini_batch_boundaries") or ()) > 1:
        notes.add(f"SkyRL made {len(metadata['policy_mini_batch_boundaries'])} optimizer steps of a batch; its records have one step")
    groups = _names(path, metadata, "uids", count)
    padding = _padding(path, metadata, groups, batch)
    groups = groups or _groups(path, metadata, step, count - padding)
    last = batch["is_last_step"].tolist() if "is_last_step" in batch else metadata.get("is_last_step")
    trajectories = _names(path, metadata, "trajectory_ids", count) if last is not None else None
    if padding:
        notes.add(f"{padding} rows that SkyRL added to fill up the batch are left out")
    lineages = _lineages(path, last, trajectories, count - padding) if last is not None else None
    unused = 0
    for index in range(count - padding):
        row = {name: batch[name][index] for name in _USED & batch.keys() if name != "is_last_step"}
        lineage = {} if lineages is None else dict(zip(("trajectory", "turn"), lineages[index]))
        reward, is_last = _reward(Place(path, index), row), lineages is None or lineages[index][2]
        unused += not is_last and bool(reward)
        yield _record(Place(path, index), row, step, group=None if groups is None else groups[index],
                      reward=reward if is_last else None, **lineage)
    if unused:
        notes.add(f"rewards of {unused} turns that are not the last of their trajectory are left out: SkyRL takes that of the last")


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
    parts = all_series(place, _SERIES, part, mask)
    return record(place, sequence[begin:cut], sequence[cut:end], mask, step=step, **fields, **parts, routed_experts=_routes(place, row, begin, end),
                  kept_ids=_kept(place, row.get(_KEPT), end - cut))


def _routes(place, row, begin, end):
    """The recorded experts of tokens [begin, end) of the padded sequence, None for a token without."""
    routes = row.get(_ROUTES)
    if routes is None:
        return None
    length = len(row["sequences"])
    if len(routes) == length and end - begin != length:  # padded like the sequence
        routes = [routes[at].tolist() for at in range(begin, end)]
    elif len(routes) == end - begin:
        routes = routes.tolist()
    else:
        raise place.wrong(_ROUTES, f"{length} entries, one per token with padding, or {end - begin}, one per real token", str(len(routes)))
    if _UNROUTED in row:
        missing = as_list(row[_UNROUTED])
        if len(missing) != length:
            raise place.wrong(_UNROUTED, f"{length} entries, one per token with padding", str(len(missing)))
        routes = [None if missing[begin + at] else route for at, route in enumerate(routes)]
    return routes if any(route is not None for route in routes) else None


def _kept(place, support, tokens):
    """`kept_ids` of the response's tokens, None for a token without a set."""
    if support is None:
        return None
    rows = support.tolist()
    if len(rows) != tokens:
        raise place.wrong(_KEPT, f"{tokens} entries, one per response token", str(len(rows)))
    sets = [[token for token in one if token >= 0] or None for one in rows]
    return sets if any(sets) else None


def _refuse_packing(path, lengths):
    for one in as_list(lengths) or ():
        if len(one) > 1:
            raise UnsupportedRecords(f"{path}: sub_seq_lengths", "one sequence in each row", f"{len(one)} packed ones", "Dump without packing")


def _reward(place, row):
    return number(place, "rewards", math.fsum(row["rewards"].tolist())) if "rewards" in row else None


def _padding(path, metadata, groups, batch):
    """The number of padding rows at the end: metadata's pad_size, or those whose groups are pad0, pad1, and so on."""
    size = metadata.get("pad_size")
    if size is None:
        return next((n for n in range(len(groups or ()), 0, -1) if groups[-n:] == [f"pad{i}" for i in range(n)]), 0)
    count = batch["sequences"].shape[0]
    if type(size) is not int or not 0 <= size < count:
        raise RecordError(f"{path}: metadata: pad_size", f"a number of rows below {count}", repr(size)[:40])
    if "loss_mask" in batch and any(any(batch["loss_mask"][index].tolist()) for index in range(count - size, count)):
        raise RecordError(f"{path}: metadata: pad_size", "rows without loss at the end of the batch", "rows with loss")
    return size


def _groups(path, metadata, step, count):
    """Groups by policy_prompt_boundaries, None without them. Their names hold the step: a group lies within one step."""
    boundaries = metadata.get("policy_prompt_boundaries")
    if boundaries is None:
        return None
    out = []
    for number_, pair in enumerate(as_list(boundaries)):
        begin, end = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        if begin != len(out) or type(end) is not int or end < begin:
            break
        out += [f"{'batch' if step is None else step}:{number_}"] * (end - begin)
    if len(out) != count:
        raise RecordError(f"{path}: metadata: policy_prompt_boundaries", f"ranges of rows that cover the first {count}", repr(boundaries)[:60])
    return out


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
