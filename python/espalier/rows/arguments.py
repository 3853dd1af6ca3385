"""Checks of a caller's arguments before anything runs. Each error names place and remedy."""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch

from espalier.errors import Error

SCHEDULES = ("auto", "shared", "dense")

_Word = TypeVar("_Word", bound=str)


def refuse(name: str, expected: str, got: object, remedy: str = "") -> NoReturn:
    raise Error("option", name, expected, repr(got), remedy, 2)


def temperature(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        refuse("temperature", "a finite number above 0", value, "Give the temperature that the rollouts were sampled with")
    return float(value)


def wave_tokens(value: Any) -> int:
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or whole < 1:
        refuse("wave_tokens", "a whole number of rows, at least 1", value, "4096 is the default")
    return whole


def choice(name: str, value: _Word, among: Sequence[str]) -> _Word:
    if not isinstance(value, str) or value not in among:
        refuse(name, ", ".join(among), value)
    return value


def loss(given: Any) -> None:
    if not callable(given):
        raise Error("input", "loss", "a function of a wave that returns a scalar tensor", type(given).__name__, "", 2)
