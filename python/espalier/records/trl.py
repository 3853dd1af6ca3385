"""A batch of TRL's GRPOTrainer that a user saved: a dict of tensors in a .pt or .safetensors file.

  prompt_ids, prompt_mask [B, P] padded at the left; completion_ids, completion_mask [B, C] padded at the right
  advantages [B] or [B, C]; old_per_token_logps, ref_per_token_logps, sampling_per_token_logps, tool_mask [B, C]
  importance_sampling_ratio [B, C] or [B, 1]: factors of the policy loss, which go into the advantages
  num_items_in_batch: the number of loss tokens in the generation batch of all processes; each record keeps it. The dict may hold only a
  part of that batch, and the loss's share of the number depends on TRL's gradient_accumulation_steps and steps_per_generation

TRL's dict contains neither temperature nor group: the reader's temperature (--temperature) is used, and equal prompts form a group.
"""

from .errors import RecordError
from .left_out import refuse_media
from .neutral import Place, all_series, number, record, series, span_of_ones, weighted, zero_or_one
from .tensors import Tensor

NAME = "TRL batch"
_SERIES = {"old_logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps",
           "rollout_logprobs": "sampling_per_token_logps"}
_WEIGHTS = "importance_sampling_ratio"  # factors of the policy loss, made from sampling_per_token_logps
_NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_TAKEN = {*_NEEDED, *_SERIES.values(), "advantages", "tool_mask", "num_items_in_batch", _WEIGHTS}


def matches(content):
    return isinstance(content, dict) and {"prompt_ids", "completion_ids"} <= content.keys()


def records(contents, notes):
    for path, content, step in contents:
        yield from _records(path, content, step, notes)


def _records(path, content, step, notes):
    for name in _NEEDED:
        if not isinstance(content.get(name), Tensor) or len(content[name].shape) != 2:
            raise RecordError(f"{path}: {name}", "a tensor [samples, tokens]", "none of that form")
    left = {name: value for name, value in content.items() if name not in _TAKEN}
    refuse_media(path, left)
    notes.leave(left)
    rows = {name: values for name, values in content.items() if isinstance(values, Tensor) and values.shape}
    count = content["completion_ids"].shape[0]
    for name in (*_NEEDED, *_SERIES.values(), "advantages", "tool_mask", _WEIGHTS):
        if name in rows and len(rows[name]) != count:
            raise RecordError(f"{path}: {name}", f"{count} rows, one per sample", str(len(rows[name])))
    notes.add("TRL batch: the temperature is not in it (--temperature, by default 1); equal prompts form a group")
    items = content.get("num_items_in_batch")
    shared = {} if items is None else {"num_items_in_batch": number(Place(path, 0), "num_items_in_batch", items)}
    if shared and shared["num_items_in_batch"] < 0:
        raise RecordError(f"{path}: num_items_in_batch", "a number of tokens, at least 0", str(shared["num_items_in_batch"]))
    empty = 0
    for index in range(count):
        row = {name: values[index] for name, values in rows.items() if len(values) == count}
        found = _record(Place(path, index), row, step, notes) | shared
        empty += not found["response_ids"]
        yield found
    if empty:
        notes.add(f"{empty} samples have an empty completion_mask: their tokens cannot be told from padding and are left out")


def _record(place, row, step, notes):
    prompt_mask = zero_or_one(place, "prompt_mask", row["prompt_mask"])
    mask = zero_or_one(place, "completion_mask", row["completion_mask"])
    prompt, completion = row["prompt_ids"].tolist(), row["completion_ids"].tolist()
    for name, ids, kept in (("prompt_mask", prompt, prompt_mask), ("completion_mask", completion, mask)):
        if len(ids) != len(kept):
            raise place.wrong(name, f"{len(ids)} entries, one per token", str(len(kept)))
    begin, _ = span_of_ones(place, "prompt_mask", prompt_mask, "left")
    _, end = span_of_ones(place, "completion_mask", mask, "right")

    def part(name):
        if name not in row:
            return None
        values = row[name].tolist()
        if len(values) != len(completion):
            raise place.wrong(name, f"{len(completion)} entries, one per completion token with padding", str(len(values)))
        return values[:end]

    tools = part("tool_mask")
    loss_mask = [1] * end if tools is None else zero_or_one(place, "tool_mask", tools)
    advantage = row.get("advantages")
    if isinstance(advantage, Tensor) and len(advantage) != 1:
        advantage = series(place, "advantages", part("advantages"), loss_mask)
    elif advantage is not None:
        advantage = number(place, "advantages", advantage)
    weights = row[_WEIGHTS].tolist() if _WEIGHTS in row and len(row[_WEIGHTS]) == 1 else part(_WEIGHTS)
    advantage = weighted(place, _WEIGHTS, weights, advantage, loss_mask, notes)
    parts = all_series(place, _SERIES, part, loss_mask)
    return record(place, prompt[begin:], completion[:end], loss_mask, step=step, advantage=advantage, **parts)
