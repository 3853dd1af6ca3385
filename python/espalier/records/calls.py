"""A call of a model in an agent's trace: its prompt, its answer and the sampler's log-probs become the record of a turn."""

import base64
import binascii

from .errors import UnsupportedRecords
from .left_out import holds_something
from .neutral import record, series
from .tensors import DTYPES, bytes_per_number, numbers_of

_ENVELOPE = "nrlre1"  # NeMo-RL's text form of recorded experts: nrlre1:<dtype>:<tokens>x<layers>x<k>:<base64>


def has_ids(prompt, answer):
    return isinstance(prompt, list) and bool(prompt) and isinstance(answer, list)


def turn(place, prompt, answer, logprobs, *, mask=None, routes=None, **fields):
    """The record of a call. `routes`: its recorded experts in a form of `experts`, or None."""
    for name, ids in (("prompt", prompt), ("answer", answer)):
        if any(not isinstance(token, int) for token in ids):
            raise UnsupportedRecords(f"{place.path}: sample {place.index}: {name}", "token ids only", "blocks of images or other media")
    mask = [1] * len(answer) if mask is None else mask
    return record(place, prompt, answer, mask, rollout_logprobs=series(place, "logprobs", logprobs or None, mask, sampled=True),
                  routed_experts=experts(place, routes, len(prompt) + len(answer)), **fields)


def experts(place, value, tokens):
    """`routed_experts` of nested lists [tokens][layers][k] or of NeMo-RL's text form."""
    if not holds_something(value):
        return None
    if isinstance(value, str):
        value = _unpacked(place, value)
    if not isinstance(value, list) or len(value) not in (tokens, tokens - 1):
        raise place.wrong("routed_experts", f"{tokens} or {tokens - 1} entries, one per token of prompt and answer",
                          str(len(value)) if isinstance(value, list) else type(value).__name__)
    return value


def _unpacked(place, text):
    parts = text.split(":")
    sizes = parts[2].split("x") if len(parts) == 4 else ()
    if len(parts) != 4 or parts[0] != _ENVELOPE or parts[1] not in DTYPES or len(sizes) != 3 or not all(size.isdigit() for size in sizes):
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: routed_experts", "lists of integers, or nrlre1:<dtype>:<shape>:<base64>", text[:24],
                                 "To train with the router's own choice, remove the field")
    tokens, layers, chosen = map(int, sizes)
    try:
        data = base64.b64decode(parts[3], validate=True)
    except binascii.Error as error:
        raise place.wrong("routed_experts", "base64", str(error)) from None
    if len(data) != tokens * layers * chosen * bytes_per_number(parts[1]):
        raise place.wrong("routed_experts", f"{tokens * layers * chosen} numbers", f"{len(data)} bytes")
    flat = list(numbers_of(data, parts[1]))
    return [[flat[(t * layers + layer) * chosen :][:chosen] for layer in range(layers)] for t in range(tokens)]
