"""The pickle of SkyRL's TrainingInputBatch: tensors by name, and the metadata.

Its state {batch_dict, metadata, ...} is that of the object, or since March 2026 an argument of _rebuild_tensor_batch(class, state). A tensor is
  bytes of torch.save (until February 2026),
  {format: numpy, data: bytes, shape, dtype}, also without the format; {format: numpy_view, data: array}; {format: torch, data: bytes of torch.save},
  {format: tensor_list, items: [...]}: a tensor of each row,
  {format: packed_tensor, values, cu_seqlens}: rows of different lengths, end to end.
"""

import io

from . import torch_files
from .errors import RecordError, UnsupportedRecords
from .pickles import Inert
from .tensors import DTYPES, Jagged, Tensor, numbers_of

_CLASSES = ("TrainingInputBatch", "TensorBatch")
_REBUILD = "_rebuild_tensor_batch"


def matches(content):
    return isinstance(content, Inert) and content.name in (*_CLASSES, _REBUILD)


def parts(content, path):
    """(tensors, or lists of one per row, by name; metadata)."""
    state = content.args[1] if content.name == _REBUILD and len(content.args) == 2 else content.state
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise RecordError(f"{path}: {content.name}", "a state with batch_dict and metadata", type(state).__name__)
    batch = {name: _tensor(data, f"{path}: {name}") for name, data in state["batch_dict"].items() if data is not None}
    metadata = state.get("metadata")
    return {name: value for name, value in batch.items() if value is not None}, metadata if isinstance(metadata, dict) else {}


def _tensor(data, where):
    if isinstance(data, (bytes, bytearray)):
        return _saved(data, where)
    kind = data.get("format", "numpy") if isinstance(data, dict) else None
    if kind == "numpy":
        return _of_bytes(data, where)
    if kind == "torch":
        return _saved(data.get("data"), where)
    if kind == "numpy_view" and isinstance(data.get("data"), Tensor):
        return data["data"]
    if kind == "tensor_list" and isinstance(data.get("items"), list):
        return [_tensor(item, where) for item in data["items"]]
    if kind == "packed_tensor":
        values, offsets = _tensor(data.get("values"), where), _tensor(data.get("cu_seqlens"), where)
        if isinstance(values, Tensor) and isinstance(offsets, Tensor):
            return Jagged(values, offsets)
    raise UnsupportedRecords(where, "a tensor in one of the forms of SkyRL's TensorBatch", f"format {kind}" if kind else type(data).__name__,
                             "This reader knows SkyRL up to 0.4.0")


def _of_bytes(data, where):
    raw, shape, dtype = data.get("data"), data.get("shape"), data.get("dtype")
    if not isinstance(raw, (bytes, bytearray)) or not isinstance(shape, (list, tuple)) or dtype not in DTYPES:
        raise RecordError(where, "bytes with a shape and a dtype", f"dtype {dtype!r}"[:60])
    return Tensor.of(numbers_of(bytes(raw), dtype), dtype, shape)


def _saved(data, where):
    """The tensor in bytes of torch.save; None if they hold None, as older versions wrote absent tensors."""
    if not isinstance(data, (bytes, bytearray)):
        raise RecordError(where, "bytes of torch.save", type(data).__name__)
    load = torch_files.load_zip if torch_files.is_zip(data[:4]) else torch_files.load_legacy
    found = load(io.BytesIO(data), where)
    if found is not None and not isinstance(found, Tensor):
        raise UnsupportedRecords(where, "a tensor", type(found).__name__)
    return found
