"""Tensors of files: numbers in a flat storage, viewed with an offset, a shape and strides.

Values become Python numbers: float32 and float16 widen exactly, bfloat16 through float32. A storage is read when its first number is
needed, because in some files a tensor comes before its bytes.
"""

import struct

from .errors import RecordError

# dtype -> (format of one number, bytes)
_FORMATS = {
    "float64": ("d", 8), "float32": ("f", 4), "float16": ("e", 2), "bfloat16": ("bfloat16", 2),
    "int64": ("q", 8), "int32": ("i", 4), "int16": ("h", 2), "int8": ("b", 1),
    "uint64": ("Q", 8), "uint32": ("I", 4), "uint16": ("H", 2), "uint8": ("B", 1), "bool": ("?", 1),
}
DTYPES = frozenset(_FORMATS)


def bytes_per_number(dtype):
    return _FORMATS[dtype][1]


def numbers_of(data, dtype):
    """The numbers in little-endian bytes, as a sequence that can be sliced."""
    code, size = _FORMATS[dtype]
    if len(data) % size:
        raise RecordError("storage", f"a multiple of {size} bytes for {dtype}", f"{len(data)} bytes", "Copy the file again")
    if code == "bfloat16":  # the upper half of a float32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return memoryview(wide).cast("f")
    if code == "e":
        return struct.unpack(f"<{len(data) // size}e", data)
    return memoryview(data).cast("B").cast(code)


class Storage:
    """Bytes that the function `read` returns when they are first needed. `dtype`: the type that the file gives the storage, or None."""

    def __init__(self, read, dtype=None):
        self.read, self.dtype, self._numbers = read, dtype, {}

    def numbers(self, dtype):
        if dtype not in self._numbers:
            self._numbers[dtype] = numbers_of(self.read(), dtype)
        return self._numbers[dtype]


class Tensor:
    """A strided view of a Storage. Strides and offset count numbers, not bytes. `flat()`: the storage's numbers."""

    __slots__ = ("dtype", "shape", "strides", "offset", "_storage", "_flat")

    def __init__(self, storage, dtype, shape, strides=None, offset=0):
        self.dtype, self.offset, self._storage, self._flat = dtype, offset, storage, None
        self.shape = tuple(shape)
        if strides is None:  # row-major
            strides, step = [], 1
            for size in reversed(self.shape):
                strides.insert(0, step)
                step *= size
        self.strides = tuple(strides)
        parts = (*self.shape, *self.strides, offset)
        if len(self.shape) != len(self.strides) or any(type(part) is not int or part < 0 for part in parts):
            raise RecordError("tensor", "a shape and strides of whole numbers, none negative", f"{shape}, {strides}, {offset}")

    @classmethod
    def of(cls, values, dtype, shape):
        """A tensor made of a sequence in memory."""
        tensor = cls(None, dtype, shape)
        tensor._flat = values
        tensor._check(len(values))
        return tensor

    def _check(self, available):
        if 0 in self.shape:
            return
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
        if last >= available:
            raise RecordError("tensor", f"numbers up to the {last + 1}th in its storage", f"{available} there",
                              "The file was cut short or damaged; copy or write it again")

    def flat(self):
        if self._flat is None:
            self._flat = self._storage.numbers(self.dtype)
            self._check(len(self._flat))
        return self._flat

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, index):
        """Row `index` as a tensor; if the tensor has one dimension, the number."""
        if not 0 <= index < self.shape[0]:
            raise IndexError(index)
        at = self.offset + index * self.strides[0]
        if len(self.shape) == 1:
            return self.flat()[at]
        row = Tensor(self._storage, self.dtype, self.shape[1:], self.strides[1:], at)
        row._flat = self.flat()
        return row

    def tolist(self):
        if not self.shape:
            return self.flat()[self.offset]
        if len(self.shape) > 1:
            return [self[i].tolist() for i in range(self.shape[0])]
        count, stride = self.shape[0], self.strides[0]
        if count == 0:
            return []
        flat = self.flat()
        if stride == 0:
            return [flat[self.offset]] * count
        return list(flat[self.offset : self.offset + (count - 1) * stride + 1 : stride])

    def __setstate__(self, state):
        raise RecordError("tensor", "a tensor without a state of its own", type(state).__name__)


class Jagged(Tensor):
    """A nested tensor: rows of different lengths. Row i is values[offsets[i] : offsets[i + 1]]. `shape` has the number of values in place of the rows'
    lengths."""

    __slots__ = ("_values", "_offsets")

    def __init__(self, values, offsets):
        super().__init__(None, values.dtype, (max(len(offsets) - 1, 0), *values.shape))
        self._values, self._offsets = values, offsets

    @classmethod
    def of_rows(cls, rows):
        """A nested tensor made of tensors in memory."""
        offsets, flat = [0], []
        for row in rows:
            flat.extend(row.flat())
            offsets.append(offsets[-1] + row.shape[0])
        first = rows[0]
        return cls(Tensor.of(flat, first.dtype, (offsets[-1], *first.shape[1:])), Tensor.of(offsets, "int64", (len(offsets),)))

    def flat(self):
        self._offsets.flat()
        return self._values.flat()

    def __getitem__(self, index):
        begin, end = (as_list(self._offsets)[index + i] for i in (0, 1))
        values = self._values
        if not 0 <= begin <= end <= values.shape[0]:
            raise RecordError("nested tensor", f"ascending offsets up to {values.shape[0]}", f"{begin}, {end}")
        row = Tensor(None, values.dtype, (end - begin, *values.shape[1:]), values.strides, values.offset + begin * values.strides[0])
        row._flat = values.flat()
        return row

    def tolist(self):
        return [self[i].tolist() for i in range(len(self))]


def as_list(values):
    """A plain list of a tensor's or a sequence's entries; None stays None."""
    if values is None:
        return None
    return values.tolist() if isinstance(values, Tensor) else list(values)
