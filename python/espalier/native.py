"""Bindings of the torch-free C++ core, which builds all prefix trees and plans (espalier/binding/core_interface.h).

Arguments are NumPy buffers of int32 and int64. ctypes releases the GIL during every call.
"""

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.core_library import library
from espalier.errors import Error


class _Rollouts(ctypes.Structure):
    _fields_ = [("rollouts", ctypes.c_int64), ("tokens", ctypes.c_void_p), ("starts", ctypes.c_void_p),
                ("prompt_lengths", ctypes.c_void_p)]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in
                ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocabulary", "experts", "experts_per_token",
                 "expert_inner")]


class _Request(ctypes.Structure):
    _fields_ = [  # type: ignore[assignment]
        ("wave_tokens", ctypes.c_int64), ("threads", ctypes.c_int64), ("seconds_per_call", ctypes.c_double), ("gradients", ctypes.c_int32)] + [
        (name, ctypes.c_char_p) for name in ("schedule", "share", "trunk_state", "dtype", "device")]


def _failed() -> Error:
    return Error.of(json.loads(library().espalier_last_error()))


class _Buffers:
    """Concatenated rollouts in the core's layout. `prompts` and `responses` are lists of token id sequences."""

    def __init__(self, prompts: Sequence[Any], responses: Sequence[Any]) -> None:
        parts = [token_ids(ids, f"rollout {i // 2}") for i, ids in enumerate(part for pair in zip(prompts, responses) for part in pair)]
        lengths = np.array([len(part) for part in parts], np.int64).reshape(-1, 2)
        self.tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        self.starts = np.concatenate([[0], lengths.sum(1).cumsum()]).astype(np.int64)
        self.prompt_lengths = np.ascontiguousarray(lengths[:, 0])
        self.struct = _Rollouts(len(lengths), *(array.ctypes.data for array in (self.tokens, self.starts, self.prompt_lengths)))


def token_ids(ids: Any, where: str) -> np.ndarray:
    """Token ids (a flat list, array or tensor) as int32. Raises `Error` at place `where` for nested sequences and for ids outside 0 to 2**31 - 1."""
    if hasattr(ids, "detach"):
        ids = ids.detach().cpu()
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Error("input", where, "a flat list of token ids", f"{array.dtype} of shape {array.shape}", "", 3)
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise Error("input", where, "token ids from 0 to 2**31 - 1", f"{array.min()} to {array.max()}", "", 3)
    return np.ascontiguousarray(array, np.int32)


def group(prompts: Sequence[Any]) -> np.ndarray:
    """The group of each prompt, [N] int32, numbered from 0 in order of first appearance. Prompts with equal tokens share a group."""
    buffers = _Buffers(prompts, [()] * len(prompts))
    groups = np.zeros(len(prompts), np.int32)
    if library().espalier_group(ctypes.byref(buffers.struct), ctypes.c_void_p(groups.ctypes.data)) != 0:
        raise _failed()
    return groups


def causal_runs(subtree_end: Any) -> list[tuple[int, int, int]]:
    """(begin, length, end) of the runs of rows of which row i sees row j if j <= i < subtree_end[j] (int32). The rows of a run see each other
    causally, and rows [begin + length, end) see all of them."""
    ends = np.ascontiguousarray(subtree_end, np.int32)
    runs = np.empty((len(ends), 3), np.int32)
    count = library().espalier_causal_runs(ctypes.c_void_p(ends.ctypes.data), ctypes.c_int64(len(ends)), ctypes.c_void_p(runs.ctypes.data))
    if count < 0:
        raise _failed()
    return _runs(runs[:count])


def _runs(table: np.ndarray) -> list[tuple[int, int, int]]:
    return [(first, end - first, below) for first, end, below in table.tolist()]


@dataclass(frozen=True)
class Item:
    """A wave or a trunk. `segments` [S, 8] has the columns documented in core_interface.h; `runs`: `causal_runs`."""
    trunk: bool
    recompute: bool
    parent: int
    path_rows: int
    rows: int
    segments: np.ndarray
    runs: list[tuple[int, int, int]]
    rollouts: np.ndarray
    finished: np.ndarray


class Plan:
    """The plan of one step over all rollouts. `items` are in depth-first order: a trunk precedes the items below it. Raises `Error` if the
    core cannot plan the step.
    """

    def __init__(self, prompts: Sequence[Any], responses: Sequence[Any], shape: Mapping[str, int], *, wave_tokens: int, schedule: str = "auto",
                 share: str = "auto", trunk_state: str = "keep", dtype: str = "float32", device: str = "cpu", threads: int = 1,
                 seconds_per_call: float = 0.0, gradients: bool = True) -> None:
        buffers = _Buffers(prompts, responses)
        request = _Request(wave_tokens, threads, seconds_per_call, gradients, *(s.encode() for s in (schedule, share, trunk_state, dtype, device)))
        self._handle = library().espalier_plan_new(ctypes.byref(buffers.struct), ctypes.byref(_Shape(**shape)), ctypes.byref(request))
        self._delete = library().espalier_plan_delete  # __del__ may run at interpreter exit, after `library` is gone
        if not self._handle:
            raise _failed()
        self.items = [self._item(i) for i in range(library().espalier_plan_items(self._handle))]

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._delete(self._handle)

    def _table(self, item: int, name: str) -> np.ndarray:
        data, width = ctypes.POINTER(ctypes.c_int32)(), ctypes.c_int64()
        rows = library().espalier_plan_table(self._handle, item, name.encode(), ctypes.byref(data), ctypes.byref(width))
        if rows < 0:
            raise _failed()
        size = rows * width.value
        flat = np.ctypeslib.as_array(data, (size,)).copy() if size else np.zeros(0, np.int32)
        return flat.reshape(rows, width.value)

    def _item(self, i: int) -> Item:
        trunk, recompute, parent, path_rows, rows, _ = (int(value) for value in self._table(i, "item")[0])
        return Item(bool(trunk), bool(recompute), parent, path_rows, rows, self._table(i, "segments"), _runs(self._table(i, "runs")),
                    self._table(i, "rollouts")[:, 0], self._table(i, "finished")[:, 0])

    def program(self) -> list[tuple[bool, int]]:
        """The steps of a pass, in order: (True for a forward, False for a backward, index of the item). Without gradients a backward only ends its
        item."""
        steps = ctypes.POINTER(ctypes.c_int32)()
        count = library().espalier_plan_program(self._handle, ctypes.byref(steps))
        if count < 0:
            raise _failed()
        return [(bool(steps[2 * i]), int(steps[2 * i + 1])) for i in range(count)]

    def edges(self, item: int) -> np.ndarray:
        """Loss edges of an item, [E, 4]: row, target, rollout, position. Copied from the core on each call."""
        return self._table(item, "edges")

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(library().espalier_plan_json(self._handle))

    def __str__(self) -> str:
        return library().espalier_plan_text(self._handle).decode()
