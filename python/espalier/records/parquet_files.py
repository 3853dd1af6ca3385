"""Parquet files with one rollout per row. Columns have the neutral names or verl's.

  neutral: prompt_ids, response_ids, and any other field of the neutral record, as lists and numbers
  verl:    prompts, responses, and optionally attention_mask, response_mask, old_log_probs, advantages, token_level_scores, uid ...,
           as in verl's DataProto (verl.py). Tokens are padded if there is an attention_mask, and unpadded if there is none.

Needs pyarrow.
"""

import math

from . import verl
from .errors import RecordError, UnsupportedRecords
from .left_out import refuse_media
from .neutral import FINITE_REMEDY, SAMPLED, Place, series, zero_or_one

NAME = "Parquet file"
START = b"PAR1"
_ROWS = 256  # rows in memory at once


class Table:
    """An open Parquet file. `rows` reads it."""

    def __init__(self, path):
        try:
            from pyarrow import parquet
        except ImportError:
            raise UnsupportedRecords(path, "a Python with pyarrow, which reads Parquet", "none",
                                     "pip install pyarrow for the Python that ESPALIER_PYTHON names, or write JSON Lines") from None
        try:
            self.file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's errors derive from one of these
            raise RecordError(path, "a complete Parquet file", str(error).split("\n")[0][:120], "Write or copy it again") from None

    def rows(self, path):
        try:
            for batch in self.file.iter_batches(_ROWS):
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:
            raise RecordError(path, "a complete Parquet file", str(error).split("\n")[0][:120], "Write or copy it again") from None


class _Series(list):
    tolist = list.copy


def matches(content):
    return isinstance(content, Table)


def records(contents, notes):
    for path, table, step in contents:
        names = set(table.file.schema_arrow.names)
        if {"prompt_ids", "response_ids"} <= names:
            make = _neutral
        elif {"prompts", "responses"} <= names:
            make = _verl
        else:
            raise UnsupportedRecords(path, "columns prompt_ids and response_ids, or prompts and responses, with token ids",
                                     f"columns {', '.join(sorted(names))[:120]}",
                                     "Text does not tell which tokens were sampled: record token ids")
        for index, row in enumerate(table.rows(path)):
            yield make(Place(path, index), {name: value for name, value in row.items() if value is not None}, step, notes)


def _neutral(place, row, step, notes):
    """A row of neutral columns. Other columns stay: the program names what it does not use, as in JSON Lines."""
    refuse_media(f"{place.path}: sample {place.index}", row)
    _settle(place, row)
    for name, value in row.items():
        _check(place, name, value)
    if step is not None:
        row.setdefault("step", step)
    return row


def _settle(place, row):
    """Settles values that are not finite, as every reader does, in all columns with one number for each response token."""
    response = row["response_ids"] if isinstance(row.get("response_ids"), list) else []
    mask = zero_or_one(place, "loss_mask", row["loss_mask"]) if isinstance(row.get("loss_mask"), list) else [1] * len(response)
    for name, value in row.items():
        if name == "advantage" and isinstance(value, float) and not math.isfinite(value) and not any(mask):
            row[name] = 0.0
        elif isinstance(value, list) and len(value) == len(mask) and any(isinstance(one, float) and not math.isfinite(one) for one in value):
            row[name] = series(place, name, value, mask, sampled=name in SAMPLED)


def _check(place, name, value):
    """Raises RecordError if JSON cannot represent `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise place.wrong(name, "a finite number", repr(value), FINITE_REMEDY)
    if isinstance(value, dict):
        for key, member in value.items():
            _check(place, f"{name}.{key}", member)
    elif isinstance(value, list):
        for at, member in enumerate(value):
            _check(place, f"{name}[{at}]", member)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise place.wrong(name, "numbers, texts, lists and structs", type(value).__name__)


def _verl(place, row, step, notes):
    for name in ("prompts", "responses"):
        if not isinstance(row.get(name), list):
            raise place.wrong(name, "a list of token ids", "text" if isinstance(row.get(name), str) else "none")
    tokens = {name: _Series(value) for name, value in row.items() if isinstance(value, list) and name in verl.TENSORS}
    tokens.setdefault("attention_mask", _Series([1] * (len(row["prompts"]) + len(row["responses"]))))
    rest = {name: value for name, value in row.items() if name not in tokens}
    temperature, found = rest.pop("temperature", None), rest.pop("global_steps", rest.pop("step", None))
    return verl.record_of(place, tokens, rest, temperature, step if found is None else found, notes)
