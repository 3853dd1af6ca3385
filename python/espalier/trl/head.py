"""The log-probs and entropies of a call's rows, as the installed TRL computes them."""

from typing import Any

import torch
from trl.trainer import utils as of_trl

FUSED = hasattr(of_trl, "add_fused_lm_head")  # TRL puts a head into the model's forward; older releases take a softmax over its logits


def scored(trainer: Any, model: torch.nn.Module, labels: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies) [T] of the tokens `labels` [T] behind the rows of a call; without meaning for rows with the label -100."""
    if FUSED:
        out = model(shift_labels=labels[None], fused_lm_head=True, **inputs)
        return out.log_probs[0], out.entropy[0] if out.entropy is not None else torch.zeros_like(out.log_probs[0])
    logits = model(use_cache=False, **inputs).logits[0] / trainer.temperature
    with torch.set_grad_enabled(torch.is_grad_enabled() and getattr(trainer, "_entropy_bonus_enabled", False)):
        entropies = of_trl.entropy_from_logits(logits)
    return of_trl.selective_log_softmax(logits[None], labels.clamp(min=0)[None])[0], entropies


def stand_in(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The output of a call of one token in place of `scored`: FSDP2 tells calls that run the head's module from others."""
    if FUSED:
        return model(input_ids=ids, use_cache=False, shift_labels=torch.full_like(ids, -100), fused_lm_head=True)["log_probs"]
    return model(input_ids=ids, use_cache=False)["logits"]
