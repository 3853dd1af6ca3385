"""The rollouts of a transformers model, and the sizes that its plan needs."""

from typing import Any

import torch

from espalier import native
from espalier.hf.model_parts import decoder_config
from espalier.rows import rollouts


class Rollouts(rollouts.Rollouts):
    """Rollouts planned for a transformers model."""

    def plan(self, model: torch.nn.Module, *, wave_tokens: int, trunk_state: str, gradients: bool) -> native.Plan:
        return self.planned(shape_of(model), next(model.parameters()), wave_tokens=wave_tokens, trunk_state=trunk_state, gradients=gradients)


def shape_of(model: torch.nn.Module) -> dict[str, int]:
    """The fields of a transformers config that the cost model needs; names differ between families."""
    config = decoder_config(model)
    get = lambda *names, default=0: next((v for v in (_size(config, name) for name in names) if v), default)
    heads = get("num_attention_heads", default=1)
    hidden = get("hidden_size", default=1)
    experts = get("num_experts", "num_local_experts", "n_routed_experts")
    return dict(layers=get("num_hidden_layers", default=1), hidden=hidden, inner=get("intermediate_size", default=4 * hidden), heads=heads,
                kv_heads=get("num_key_value_heads", default=heads), head_dim=get("head_dim", default=max(1, hidden // heads)),
                vocabulary=get("vocab_size", default=1), experts=experts, experts_per_token=get("num_experts_per_tok", default=1),
                expert_inner=get("moe_intermediate_size", "intermediate_size", default=1))


def _size(config: Any, name: str) -> int | None:
    """A size of the config, or the largest if layers differ. None if the config does not have it, or has no single value for all layers."""
    try:
        value = getattr(config, name, None)
    except Exception:  # transformers refuses to say what differs by layer
        return None
    return int(max(value) if isinstance(value, (list, tuple)) and value else value or 0)
