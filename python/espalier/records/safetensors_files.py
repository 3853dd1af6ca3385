"""Reads safetensors files: eight bytes with the header's length, a JSON header, raw numbers."""

import json

from .errors import RecordError, UnsupportedRecords
from .tensors import Storage, Tensor, bytes_per_number

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
           "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"}
_DAMAGED = "It was cut short or damaged; copy or write it again"


def load(file, size, where):
    """The file's tensors by name. `size`: bytes of the file. The file must stay open while numbers are read."""
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise RecordError(where, f"a header of at most {max(size - 8, 0)} bytes", f"one of {length}", _DAMAGED)
    try:
        header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError):
        raise RecordError(where, "a JSON header", "other bytes", _DAMAGED) from None
    return {name: _tensor(file, size, 8 + length, entry, f"{where}: {name}") for name, entry in entries.items()}


def _tensor(file, size, begin, entry, where):
    try:
        kind, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        count = 1
        for part in shape:
            count *= part
        sound = all(type(n) is int and n >= 0 for n in (first, end, *shape))
    except (KeyError, TypeError, ValueError):
        raise RecordError(where, "dtype, shape and data_offsets", "other members", _DAMAGED) from None
    if kind not in _DTYPES:
        raise UnsupportedRecords(where, "integers, floats or booleans", f"dtype {str(kind)[:20]}")
    dtype = _DTYPES[kind]
    if not sound or end - first != count * bytes_per_number(dtype) or begin + end > size:
        raise RecordError(where, f"{kind} numbers of its shape inside the file", f"bytes {first} to {end} of {size - begin}", _DAMAGED)

    def read():
        file.seek(begin + first)
        return file.read(end - first)

    return Tensor(Storage(read), dtype, shape)
