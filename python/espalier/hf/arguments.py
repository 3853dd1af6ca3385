"""Checks of the arguments that concern a transformers model, before anything runs. Each error names place and remedy."""

import math
import numbers
from typing import Any

import torch

from espalier.errors import Error, Unsupported
from espalier.hf.model_parts import base_model, unwrapped
from espalier.rows.arguments import refuse

TRUNK_STATES = ("keep", "recompute", "offload")


def coefficient(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value)):
        refuse("router_aux_loss_coef", "a finite number or None", value)
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
