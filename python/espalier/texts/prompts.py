"""Converts prompts in verl's Parquet layout to JSON Lines: one object per row, with a member for each column that is not null."""

import json

from espalier.records.errors import RecordError
from espalier.records.parquet_files import Table


def _plain(value):
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def lines(path):
    for number, row in enumerate(Table(path).rows(path), 1):
        try:
            filled = {name: value for name, value in row.items() if value is not None}
            yield json.dumps(filled, default=_plain, allow_nan=False) + "\n"
        except ValueError as error:
            raise RecordError(f"{path}:{number}", "values that JSON can hold", str(error)) from error
