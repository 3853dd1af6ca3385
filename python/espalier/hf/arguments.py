"""Checks of a caller's arguments before anything runs. Each error names place and remedy."""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch

from espalier.errors import Error, Unsupported
from espalier.hf.checks import base_model, unwrapped

TRUNK_STATES = ("keep", "recompute", "offload")
SCHEDULES = ("auto", "shared", "dense")

_Word = TypeVar("_Word", bound=str)


def _refuse(name: str, expected: str, got: object, remedy: str = "") -> NoReturn:
    raise Error("option", name, expected, repr(got), remedy, 2)


def temperature(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        _refuse("temperature", "a finite number above 0", value, "Give the temperature that the rollouts were sampled with")
    return float(value)


def wave_tokens(value: Any) -> int:
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or whole < 1:
        _refuse("wave_tokens", "a whole number of rows, at least 1", value, "4096 is the default")
    return whole


def choice(name: str, value: _Word, among: Sequence[str]) -> _Word:
    if not isinstance(value, str) or value not in among:
        _refuse(name, ", ".join(among), value)
    return value


def coefficient(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value)):
        _refuse("router_aux_loss_coef", "a finite number or None", value)
    return value


def model(given: Any) -> None:
    """Checks that the argument is a transformers model whose weights are in memory."""
    if not isinstance(given, torch.nn.Module) or not hasattr(_base(given), "config"):
        raise Error("input", "model", "a transformers causal language model", type(given).__name__, "Load it with AutoModelForCausalLM", 2)
    empty = next((name for name, p in unwrapped(given).named_parameters() if p.is_meta), None)
    if empty is not None:
        raise Error("input", "model", "weights in memory", f"{empty} on the meta device", "Load the weights before the step", 2)


def _base(given: Any) -> Any:
    try:
        return base_model(given)
    except AttributeError:
        return None


def gradients_wanted(given: torch.nn.Module) -> None:
    """Checks that autograd is on, that a parameter is trained, and that nothing reads gradients before the end of the step."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise Error("input", "phased_step", "a call with gradients enabled", mode, "Call it outside, or use espalier.hf.score", 2)
    named = list(unwrapped(given).named_parameters())
    if not any(p.requires_grad for _, p in named):
        raise Error("input", "model", "a parameter with requires_grad", "none", "Set requires_grad_(True) on the trained parameters", 2)
    frozen = next((name for name, p in named if p.is_inference()), None)
    if frozen is not None:
        raise Error("input", f"model.{frozen}", "a parameter made outside of inference mode", "an inference tensor",
                    "Load the model outside of torch.inference_mode()", 2)
    for name, p in named:
        if getattr(p, "_post_accumulate_grad_hooks", None) or getattr(p, "_in_backward_optimizers", None):
            raise Unsupported(f"model.{name}", "gradients that are kept until the end of the step",
                              "a hook on the gradient of every backward, like that of an optimizer in the backward",
                              "Remove register_post_accumulate_grad_hook and step the optimizer after the step")


def loss(given: Any) -> None:
    if not callable(given):
        raise Error("input", "loss", "a function of a wave that returns a scalar tensor", type(given).__name__, "", 2)
