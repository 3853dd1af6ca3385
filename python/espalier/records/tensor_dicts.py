"""The members of a DataProto, of a TensorDict or of a dict: tensors, values of each sample, and values of the batch.

A pickled DataProto's state holds `batch` as bytes of torch.save, as bytes of an inner pickle of arrays, or (numpy serialization) as a tuple
(batch size, device, {name: (dtype, shape, bytes), or (layout, [(dtype, shape, bytes), ...]) for a nested tensor}). A TensorDict has its tensors in
its own state, or all in one storage (consolidated). In a TensorDict, NonTensorStack holds a value of each sample and NonTensorData one of the
batch.
"""

import io

from . import pickles, torch_files
from .errors import RecordError, UnsupportedRecords
from .pickles import Inert
from .tensors import DTYPES, Jagged, Tensor, as_list, numbers_of

_CONSOLIDATED = "_rebuild_tensordict_files_consolidated"
_NESTED = ("<NJT_VALUES>", "<NJT_OFFSETS>")  # how a consolidated TensorDict names the parts of a nested tensor


def matches(content):
    return content.name in ("TensorDict", "_make_td", _CONSOLIDATED)


def parts(content, path):
    """(tensors by name, arrays or lists of the samples' values by name, values of the batch by name)."""
    if not isinstance(content, Inert) or content.name != "DataProto":
        return _sorted(_members(content, path))
    state = content.state
    if isinstance(state, dict):  # a class that pickles its attributes
        state = (state.get("batch"), state.get("non_tensor_batch"), state.get("meta_info"))
    if not isinstance(state, tuple) or len(state) != 3:
        raise RecordError(f"{path}: DataProto", "batch, non_tensor_batch and meta_info", "another state")
    batch, objects, meta = state
    tensors, of_samples, of_batch = _sorted(_members(batch, f"{path}: batch"))
    return tensors, {**of_samples, **(objects if isinstance(objects, dict) else {})}, {**of_batch, **(meta if isinstance(meta, dict) else {})}


def _sorted(members):
    numbers = {name: value for name, value in members.items() if isinstance(value, Tensor) and value.dtype in DTYPES}
    arrays = {name: value for name, value in members.items() if name not in numbers and isinstance(value, (Tensor, list, tuple))}
    return numbers, arrays, {name: value for name, value in members.items() if name not in numbers and name not in arrays}


def _members(batch, where):
    if isinstance(batch, (bytes, bytearray)):
        return _members(_unpacked(bytes(batch), where), where)
    if isinstance(batch, Inert):
        return {name: _value(value, where) for name, value in _tensor_dict(batch, where).items()}
    if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], dict):
        return {name: _encoded(entry, f"{where}: {name}") for name, entry in batch[2].items()}
    if isinstance(batch, dict):
        return batch
    raise RecordError(where, "tensors by name", type(batch).__name__)


def _unpacked(data, where):
    if torch_files.is_zip(data):
        return torch_files.load_zip(io.BytesIO(data), where)
    if torch_files.is_legacy(data):
        return torch_files.load_legacy(io.BytesIO(data), where)
    return pickles.load_bytes(data, where)


def _tensor_dict(held, where):
    """The members of a pickled TensorDict."""
    if held.name == _CONSOLIDATED:
        return _consolidated(held, where)
    state = held.args[1] if held.name == "_make_td" and len(held.args) == 2 else held.state
    if isinstance(state, dict) and isinstance(state.get("_tensordict"), dict):
        return state["_tensordict"]
    raise UnsupportedRecords(where, "a TensorDict of tensors", f"a {held.name} of another form",
                             "Save with the tensordict version that verl names, or batch.to_dict() with torch.save")


def _value(value, where):
    """The value behind NonTensorData, a list of those behind a NonTensorStack; any other value itself."""
    if not isinstance(value, Inert):
        return value
    state = value.state if isinstance(value.state, dict) else {}
    if value.name == "NonTensorStack" and isinstance(state.get("tensordicts"), list):
        return [_value(one, where) for one in state["tensordicts"]]
    if value.name == "NonTensorData":
        return (state.get("non_tensordict") or {}).get("data")
    return value


def _consolidated(held, where):
    try:
        metadata, storage = held.args
        raw, begin = bytes(storage.flat()), storage.offset
        leaves = {}
        for name, (dtype, shape, first, end, *_) in metadata["leaves"].items():
            kind = dtype.removeprefix("torch.")
            leaves[name] = Tensor.of(numbers_of(raw[begin + first : begin + end], kind), kind, shape)
        out = {name: tensor for name, tensor in leaves.items() if not name.startswith("<")}
        for name in [name.removeprefix(_NESTED[0]) for name in leaves if name.startswith(_NESTED[0])]:
            out[name] = Jagged(*(leaves[part + name] for part in _NESTED))
        for name, (value, *_) in metadata.get("non_tensors", {}).items():
            out[name] = value
        for name, stack in metadata.items():
            if isinstance(stack, dict) and stack.get("cls") == "NonTensorStack":
                values = stack.get("non_tensors", {})
                out[name] = [values[str(i)][0] for i in range(len(values))]
        return out
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RecordError(where, "a TensorDict in one storage", "metadata of another form") from None


def _encoded(entry, where):
    if isinstance(entry, tuple) and len(entry) == 2 and entry[0] == "jagged" and entry[1]:
        return Jagged.of_rows([_encoded(row, where) for row in entry[1]])
    if not isinstance(entry, tuple) or len(entry) != 3 or entry[0] not in DTYPES:
        raise UnsupportedRecords(where, "a tensor as (dtype, shape, bytes)", "another form", "Write it with the verl version that this reader knows")
    dtype, shape, data = entry
    data = bytes(as_list(data)) if isinstance(data, Tensor) else data
    if not isinstance(data, (bytes, bytearray)):
        raise RecordError(where, "bytes", type(data).__name__)
    return Tensor.of(numbers_of(bytes(data), dtype), dtype, tuple(shape))
