"""transformers' own forwards of the vision models whose classes verl patches.

verl replaces the forwards of Qwen2-VL, Qwen2.5-VL and Qwen3-VL with ones that take pixel values. Shared calls pass the vision tower's features instead
(espalier.hf.images), which transformers' own forwards take.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from espalier.hf.model_parts import base_model

_MODULES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_own: dict[Any, Callable] = {}  # the forward of each class


def remember() -> None:
    """Stores transformers' own forwards. Called before verl makes an engine, which patches the classes."""
    for name in _MODULES:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:
            continue
        for kind in vars(module).values():
            forward = vars(kind).get("forward") if inspect.isclass(kind) and kind.__module__ == module.__name__ else None
            if forward is not None and forward.__module__.startswith("transformers."):
                _own.setdefault(kind, forward)


def replaced(model: torch.nn.Module) -> list[Any]:
    """The classes among a model's modules whose forward verl has replaced."""
    kinds = {kind for module in base_model(model).modules() for kind in type(module).__mro__}
    return [kind for kind in kinds if getattr(vars(kind).get("forward"), "__module__", "").startswith("verl.models.transformers.")]


@contextlib.contextmanager
def in_use(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which the classes that verl patched have transformers' own forwards. Classes without a stored forward keep verl's."""
    patched = {kind: vars(kind)["forward"] for kind in replaced(model) if kind in _own}
    for kind in patched:
        kind.forward = _own[kind]
    try:
        yield
    finally:
        for kind, forward in patched.items():
            kind.forward = forward
