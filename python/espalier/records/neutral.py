"""Builds neutral records (docs/rollout_format.md) and checks their values."""

import itertools
import math

from .errors import RecordError, UnsupportedRecords
from .tensors import Tensor, as_list

FINITE_REMEDY = ("Repair it where the rollout was made. If that is impossible, leave out its whole group: advantages compare the rollouts of a "
                 "group")
SAMPLED = ("rollout_logprobs", "full_logprobs")  # the sampler's log-probs, which may be missing at single tokens


class Place:
    """The place of a sample in a file, for messages."""

    def __init__(self, path, index):
        self.path, self.index = path, index

    def wrong(self, field, expected, got, remedy=""):
        return RecordError(f"{self.path}: sample {self.index}: {field}", expected, got, remedy)


def token_ids(place, field, values):
    ids = as_list(values)
    for at, token in enumerate(ids):
        if type(token) is not int or token < 0:
            raise place.wrong(f"{field}[{at}]", "a token id, an integer of at least 0", repr(token)[:40])
    return ids


def zero_or_one(place, field, values):
    mask = as_list(values)
    for at, value in enumerate(mask):
        if value not in (0, 1):
            raise place.wrong(f"{field}[{at}]", "0 or 1", repr(value)[:40], "A mask keeps or drops a token's loss; it is not a weight")
    return [int(value) for value in mask]


def span_of_ones(place, field, mask, padding):
    """(begin, end) of the ones in a mask. Raises RecordError if it has zeros elsewhere than on the side `padding`: "left" or "right"."""
    count = sum(mask)
    begin = len(mask) - count if padding == "left" else 0
    if any(value != 1 for value in mask[begin : begin + count]):
        raise place.wrong(field, f"ones without gaps and padding at the {padding} only", "a 0 between ones, or padding elsewhere")
    return begin, begin + count


def number(place, field, value):
    if isinstance(value, Tensor):
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise place.wrong(field, "a finite number", repr(value)[:40], FINITE_REMEDY if isinstance(value, float) else "")
    return value


def series(place, field, values, loss_mask, sampled=False):
    """Returns one number for each response token, or None if `values` is None. Where the mask is 0, a file may hold any value, and values that are
    not finite become 0. `sampled`: these are log-probs of the sampler, which may be missing at a token with loss: None then stands there."""
    if values is None:
        return None
    numbers = as_list(values)
    if len(numbers) != len(loss_mask):
        raise place.wrong(field, f"{len(loss_mask)} entries, one per response token", str(len(numbers)))
    for at, (value, counts) in enumerate(zip(numbers, loss_mask)):
        if isinstance(value, (int, float)) and math.isfinite(value):
            continue
        if counts and not (value is None or isinstance(value, float)):
            raise place.wrong(f"{field}[{at}]", "a number", repr(value)[:40])
        if counts and not sampled:
            raise place.wrong(f"{field}[{at}]", "a finite number, because the token has loss", repr(value)[:40], FINITE_REMEDY)
        numbers[at] = None if counts else 0.0
    return numbers


def all_series(place, fields, values_of, loss_mask):
    """Returns {name: series} for `fields`, {name in records: field of the dump}. `values_of(field)` gives the field's values, or None."""
    return {name: series(place, field, values_of(field), loss_mask, sampled=name in SAMPLED) for name, field in fields.items()}


def weighted(place, field, weights, advantage, loss_mask, notes):
    """`advantage`, one for each response token or one number, times the weights that the trainer multiplied its policy loss with. `weights`: one for
    each response token, one for all, or None."""
    if weights is None:
        return advantage
    factors = series(place, field, weights * len(loss_mask) if len(weights) == 1 else weights, loss_mask)
    if all(factor == 1 for factor, counts in zip(factors, loss_mask) if counts):
        return advantage
    if advantage is None:
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: {field}", "advantages, which take these weights", "none",
                                 "Dump the batch with its advantages, or without these weights; --rollout-is makes them again from rollout_logprobs")
    notes.add(f"{field} are multiplied into advantage: give no --rollout-is, which would weigh twice, and no vespo, whose weights are no factor")
    advantages = advantage if isinstance(advantage, list) else [advantage] * len(loss_mask)
    return [value * factor for value, factor in zip(advantages, factors)]


def kept_sets(place, field, ids, offsets, tokens):
    """Returns `kept_ids`: for each of `tokens` response tokens the list ids[offsets[t] : offsets[t + 1]], or None where that is empty, which
    means that no set was recorded. Without offsets, `ids` holds a list for each response token. None if no token has a set."""
    if ids is None and offsets is None:
        return None
    if ids is None or offsets is None and not all(each is None or isinstance(each, (list, tuple, Tensor)) for each in as_list(ids)):
        raise place.wrong(field, "ids and their offsets, or a list of ids for each response token", "only the offsets" if ids is None else "ids without offsets",
                          "Log-probs of the sampler are over these sets: dump both fields, or neither of them and log-probs over the whole vocabulary")
    if offsets is None:
        lists = [[] if each is None else as_list(each) for each in as_list(ids)]
        offsets = [0, *itertools.accumulate(map(len, lists))]
        ids = [token for each in lists for token in each]
    ids, offsets = token_ids(place, field, ids), as_list(offsets)
    if len(offsets) != tokens + 1:
        raise place.wrong(f"offsets of {field}", f"{tokens + 1} entries, one more than response tokens", str(len(offsets)))
    for at, offset in enumerate(offsets):
        if type(offset) is not int or offset < (offsets[at - 1] if at else 0) or offset > len(ids):
            raise place.wrong(f"offsets of {field}[{at}]", f"ascending integers from 0 to {len(ids)}, the number of ids", repr(offset)[:40])
    if offsets[0] != 0 or offsets[-1] != len(ids):
        raise place.wrong(f"offsets of {field}", f"a range from 0 to {len(ids)}, the number of ids", f"one from {offsets[0]} to {offsets[-1]}")
    sets = [ids[begin:end] or None for begin, end in zip(offsets, offsets[1:])]
    return sets if any(sets) else None


def record(place, prompt_ids, response_ids, loss_mask, **fields):
    """Makes the record from its arguments and those `fields` that are not None."""
    prompt = token_ids(place, "prompt", prompt_ids)
    response = token_ids(place, "response", response_ids)
    if not prompt:
        raise place.wrong("prompt", "at least one token", "none")
    mask = zero_or_one(place, "loss mask", loss_mask)
    if len(mask) != len(response):
        raise place.wrong("loss mask", f"{len(response)} entries, one per response token", str(len(mask)))
    out = {"prompt_ids": prompt, "response_ids": response, "loss_mask": mask}
    out.update((name, value) for name, value in fields.items() if value is not None)
    return out


def plain_scalars(values):
    """The members of a mapping that are texts, finite numbers or booleans, for `meta`. None if there are none."""
    return {name: value for name, value in values.items() if is_plain(value)} or None


def is_plain(value):
    return isinstance(value, (str, bool, int)) or isinstance(value, float) and math.isfinite(value)
