"""Reads pickles as data. No global that a file names is imported or called.

A pickle is a small program that can name globals and call them. Here every name is looked up in a closed list of classes of this file: a
few decode numbers, the others only store their arguments. Any other name ends the reading with an error that contains the name, before an
object is made. So a malicious file can at worst contain values that are refused later.
"""

import io
import pickle

from .errors import RecordError
from .tensors import DTYPES, Jagged, Storage, Tensor, bytes_per_number, numbers_of

PROTOCOL_STARTS = tuple(b"\x80" + bytes([version]) for version in (2, 3, 4, 5))


class Inert:
    """A stand-in for a global of a pickle. Its instances keep their arguments and their state."""

    name = ""

    def __new__(cls, *args, **kwargs):
        held = object.__new__(cls)
        held.args, held.state = args, None
        return held

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        """Items of a dict's subclass, which its state holds too."""


def _wrong(name, args):
    return RecordError(name, "the arguments its writers give it", ", ".join(type(a).__name__ for a in args) or "none")


class InertDict(dict):
    """A stand-in for subclasses of dict. It keeps the items and drops other constructor arguments and the state."""

    def __new__(cls, *args, **kwargs):
        return dict.__new__(cls)

    def __init__(self, *args, **kwargs):
        for items in args:
            if isinstance(items, (dict, list, tuple)):
                self.update(items)

    def __setstate__(self, state):
        pass


class _Set(Inert):
    def __new__(cls, items=()):
        return frozenset(items) if isinstance(items, (list, tuple)) else frozenset()


class _Bytes(Inert):
    def __new__(cls, *args):
        if len(args) > 1 or any(not isinstance(a, bytes) for a in args):
            raise _wrong("bytearray", args)
        return b"".join(args)


class _Encode(Inert):
    """_codecs.encode(text, "latin1"): protocol 2 writes bytes so."""

    def __new__(cls, *args):
        if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
            raise _wrong("_codecs.encode", args)
        return args[0].encode("latin1")


class _Size(Inert):
    def __new__(cls, size=()):
        return tuple(size) if isinstance(size, (list, tuple)) else ()


class _Text(Inert):
    """torch.device("cpu") or a memory layout: becomes the text."""

    def __new__(cls, *args):
        return ":".join(str(a) for a in args)


# ---- torch ----------------------------------------------------------------------------------------------------------


class DTypeName(Inert):
    """torch.float32 and the like: the class itself is the value."""

    dtype = None


class StorageType(Inert):
    dtype = None  # None: untyped bytes


class _StorageFromBytes(Inert):
    """torch.storage._load_from_bytes(bytes of torch.save): a plain pickle writes a tensor's storage so."""

    def __new__(cls, *args):
        from . import torch_files  # imported here because torch_files imports this file

        if len(args) != 1 or not isinstance(args[0], bytes):
            raise _wrong("torch storage", args)
        stream = io.BytesIO(args[0])
        storage = (torch_files.load_zip if torch_files.is_zip(args[0][:4]) else torch_files.load_legacy)(stream, "torch storage")
        if not isinstance(storage, Storage):
            raise _wrong("torch storage", (storage,))
        return storage


class _RebuildTensor(Inert):
    """_rebuild_tensor_v2(storage, offset, size, stride, ...); v3 has the dtype as its seventh argument."""

    def __new__(cls, storage=None, offset=0, size=(), stride=(), *rest):
        args = (storage, offset, size, stride, *rest)
        dtype = getattr(storage, "dtype", None)
        if len(rest) > 2 and isinstance(rest[2], type) and issubclass(rest[2], DTypeName):
            dtype = rest[2].dtype
        if not isinstance(storage, Storage) or dtype is None or not all(isinstance(a, (list, tuple)) for a in (size, stride)):
            raise _wrong("torch tensor", args)
        return Tensor(storage, dtype, size, stride, offset)


class _RebuildParameter(Inert):
    def __new__(cls, data=None, *rest):
        if not isinstance(data, Tensor):
            raise _wrong("torch parameter", (data, *rest))
        return data


class _RebuildNested(Inert):
    """_rebuild_njt({values, offsets, lengths, _ragged_idx, ...}): a nested tensor of torch.jagged layout."""

    def __new__(cls, *args):
        parts = args[0] if len(args) == 1 and isinstance(args[0], dict) else {}
        values, offsets = parts.get("values"), parts.get("offsets")
        if not isinstance(values, Tensor) or not isinstance(offsets, Tensor):
            raise _wrong("nested tensor", args)
        if parts.get("lengths") is not None or parts.get("_ragged_idx", 1) != 1:
            return Inert.__new__(cls, *args)  # ragged in another dimension, as M-RoPE's positions are
        return Jagged(values, offsets)


class _RebuildFromType(Inert):
    """_rebuild_from_type_v2(function, type, arguments, state): a tensor of a subclass, or with attributes."""

    def __new__(cls, function=None, kind=None, args=(), state=None):
        if function not in (_RebuildTensor, _RebuildParameter, _RebuildNested) or not isinstance(args, tuple):
            raise _wrong("torch tensor", (function, kind, args, state))
        return function(*args)


# ---- NumPy ----------------------------------------------------------------------------------------------------------

_NUMPY_DTYPES = {
    "f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32", "i2": "int16", "i1": "int8",
    "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool",
}


class _NumpyType(Inert):
    """numpy.dtype("i8", False, True) with a state whose second entry is the byte order."""

    def __new__(cls, code="", *rest):
        held = Inert.__new__(cls, code)
        held.code, held.order = (code, "|") if isinstance(code, str) else ("", "|")
        return held

    def __setstate__(self, state):
        if isinstance(state, tuple) and len(state) > 1:
            self.order = state[1]

    def decode(self, data, count):
        kind, width = self.code[:1], self.code[1:]
        if self.order == ">" and self.code not in ("u1", "i1", "b1"):
            raise RecordError("NumPy array", "little-endian numbers", "big-endian ones", "Write it again on this machine")
        if self.code in _NUMPY_DTYPES:
            return numbers_of(data, _NUMPY_DTYPES[self.code])
        if kind in ("U", "S") and width.isdigit():
            step = int(width) * (4 if kind == "U" else 1)
            texts = [data[i * step : (i + 1) * step].decode("utf-32-le" if kind == "U" else "latin1") for i in range(count)]
            return [text.rstrip("\0") for text in texts]
        raise RecordError("NumPy array", "integers, floats, booleans, texts or objects", f"dtype {self.code!r}")

    def dtype(self):
        return _NUMPY_DTYPES.get(self.code, self.code)


def _count(shape):
    if not isinstance(shape, tuple) or any(type(size) is not int or size < 0 for size in shape):
        raise RecordError("NumPy array", "a shape of whole numbers", repr(shape)[:80])
    count = 1
    for size in shape:
        count *= size
    return count


class NumpyArray(Tensor):
    """_reconstruct(...), empty until its state comes: (version, shape, dtype, columns first, bytes or list of objects)."""

    __slots__ = ()

    def __new__(cls, *args):
        return object.__new__(cls)

    def __init__(self, *args):
        super().__init__(None, "bool", (0,))

    def __setstate__(self, state):
        if not isinstance(state, tuple) or len(state) != 5:
            raise _wrong("NumPy array", (state,))
        _, shape, kind, columns_first, data = state
        self._fill(shape, kind, data, columns_first is True)

    def _fill(self, shape, kind, data, columns_first):
        count = _count(shape)
        if not isinstance(kind, _NumpyType) or not isinstance(data, (list, bytes, bytearray)):
            raise _wrong("NumPy array", (shape, kind, data))
        strides = None
        if columns_first:
            strides = [_count(shape[:i]) for i in range(len(shape))]
        super().__init__(None, kind.dtype(), shape, strides)
        self._flat = data if isinstance(data, list) else kind.decode(data, count)
        self._check(len(self._flat))


class _NumpyFromBuffer(Inert):
    """_frombuffer(bytes, dtype, shape, order): protocol 5 writes an array so."""

    def __new__(cls, data=b"", kind=None, shape=(), order="C", *rest):
        if order not in ("C", "F") or rest not in ((), (None,)):
            raise _wrong("NumPy array", (data, kind, shape, order, *rest))
        array = NumpyArray()
        array._fill(shape, kind, data, order == "F")
        return array


class _NumpyScalar(Inert):
    def __new__(cls, kind=None, data=b"", *rest):
        if not isinstance(kind, _NumpyType) or not isinstance(data, bytes):
            raise _wrong("NumPy scalar", (kind, data))
        return kind.decode(data, 1)[0]


# ---- the closed list ------------------------------------------------------------------------------------------------

_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}
# Classes of the systems that wrote the files: stand-ins, told apart by name.
HELD = (
    ("verl.protocol", "DataProto"),
    ("tensordict._td", "TensorDict"), ("tensordict.tensordict", "TensorDict"), ("tensordict", "TensorDict"),
    ("tensordict._reductions", "_make_td"), ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"),
    ("tensordict.tensorclass", "NonTensorData"), ("tensordict.tensorclass", "NonTensorStack"),
    *((package + ".utils.types", name) for package in ("slime", "miles")
      for name in ("Sample", "Sample.Status", "Sample.SpecInfo", "Sample.PrefixCacheInfo")),
    ("slime.utils.tensor_store", "DiskTensorRef"), ("slime.utils.tensor_store", "TensorRef"),
    *((module, name) for module in ("skyrl_train.training_batch", "skyrl.backends.skyrl_train.training_batch")
      for name in ("TrainingInputBatch", "TensorBatch", "_rebuild_tensor_batch")),
    ("skyrl_train.generators.base", "TrajectoryID"), ("skyrl.train.generators.base", "TrajectoryID"),
)


class Picture(Inert):
    """Any class of PIL: an image, which readers refuse where it has a part in training."""

    name = "picture"


def _closed_list():
    names = {
        ("collections", "OrderedDict"): InertDict, ("collections", "defaultdict"): InertDict,
        ("tensordict.utils", "_StringOnlyDict"): InertDict, ("_codecs", "encode"): _Encode,
        ("torch", "Size"): _Size, ("torch", "device"): _Text, ("torch.serialization", "_get_layout"): _Text,
        ("torch._utils", "_rebuild_tensor"): _RebuildTensor, ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor,
        ("torch._utils", "_rebuild_tensor_v3"): _RebuildTensor, ("torch._utils", "_rebuild_parameter"): _RebuildParameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _RebuildFromType, ("torch.storage", "_load_from_bytes"): _StorageFromBytes,
        ("torch.nested._internal.nested_tensor", "_rebuild_njt"): _RebuildNested,
        ("torch.nested._internal.nested_tensor", "NestedTensor"): Inert, ("torch._dynamo.decorators", "_DimRange"): Inert,
        ("torch", "Tensor"): Inert, ("torch.nn.parameter", "Parameter"): Inert,
        ("torch.storage", "UntypedStorage"): StorageType, ("torch", "UntypedStorage"): StorageType,
        ("numpy", "dtype"): _NumpyType, ("numpy", "ndarray"): Inert,
    }
    for kind, dtype in _STORAGES.items():
        names["torch", kind + "Storage"] = type(kind + "Storage", (StorageType,), {"dtype": dtype})
    for dtype in DTYPES:
        names["torch", dtype] = type(dtype, (DTypeName,), {"dtype": dtype})
    for numpy in ("numpy.core", "numpy._core"):
        names[numpy + ".multiarray", "_reconstruct"] = NumpyArray
        names[numpy + ".multiarray", "scalar"] = _NumpyScalar
        names[numpy + ".numeric", "_frombuffer"] = _NumpyFromBuffer
    for builtins in ("builtins", "__builtin__"):  # protocol 2 has Python 2's name
        names[builtins, "set"] = names[builtins, "frozenset"] = _Set
        names[builtins, "bytearray"] = names[builtins, "bytes"] = _Bytes
        for kind in ("list", "dict", "int", "float", "str"):  # the factory of a defaultdict
            names[builtins, kind] = Inert
    names["skyrl.backends.skyrl_train.training_batch", "TensorFormat"] = _Text
    for module, name in HELD:
        names[module, name] = type(name.rpartition(".")[2], (Inert,), {"name": name})
    return names


_NAMES = _closed_list()


class _Reader(pickle.Unpickler):
    def __init__(self, stream, where, storage):
        super().__init__(stream)
        self._where, self._storage = where, storage

    def find_class(self, module, name):
        if module == "PIL" or module.startswith("PIL."):
            return Picture
        try:
            return _NAMES[module, name]
        except KeyError:
            raise RecordError(
                self._where, "tensors, arrays, lists, dicts, texts and numbers only", f"a call of {module}.{name}",
                "Nothing of this file was executed. A file that names functions is not read; write plain tensors") from None

    def persistent_load(self, key):
        if self._storage is None:
            raise RecordError(self._where, "a pickle that holds its own data", "a reference to something outside")
        return self._storage(key)


def load(stream, where, storage=None):
    """Reads the first pickle of a stream as data. `storage`: function that returns the Storage for torch's storage key, a tuple."""
    try:
        return _Reader(stream, where, storage).load()
    except RecordError as error:
        raise error.at(where) from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise RecordError(where, "a complete pickle", f"{type(error).__name__}: {error}",
                          "It was cut short, damaged or manipulated; copy or write it again") from None


def load_bytes(data, where, storage=None):
    return load(io.BytesIO(data), where, storage)


def storage_key(key, where):
    """(dtype or None, key, numbers or bytes) of torch's ("storage", type, key, place, count, ...)."""
    shaped = isinstance(key, tuple) and len(key) >= 5 and key[0] == "storage" and isinstance(key[2], str)
    if not shaped or not isinstance(key[1], type) or not issubclass(key[1], StorageType) or type(key[4]) is not int:
        raise RecordError(where, "torch's references to storages", "another reference")
    return key[1].dtype, key[2], key[4]


def storage_bytes(dtype, count):
    return count * (bytes_per_number(dtype) if dtype else 1)
