"""Waves: whole responses whose tokens a loss sees together, with values from the open trunks and from the rows of an item; and what steps return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from espalier.rows.verdict import Verification


class Wave:
    """Whole responses of some rollouts, with the log-probs and entropies of their tokens.

    `rollouts`: indices into the step's list, ascending. `rollout`, `position` [E]: the rollout of each value, and the token's index in that
    rollout's response. `logprobs`, `entropies` [E]: in nats, differentiable.
    """

    def __init__(self, rollouts: Sequence[int], rollout: torch.Tensor, position: torch.Tensor, logprobs: torch.Tensor,
                 entropies: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        self.rollouts, self.rollout, self.position, self.logprobs = rollouts, rollout, position, logprobs
        self._entropies = entropies

    @property
    def entropies(self) -> torch.Tensor:
        if callable(self._entropies):
            with torch.enable_grad():  # the first caller may read them under no_grad
                self._entropies = self._entropies()
        return self._entropies

    def __len__(self) -> int:
        return len(self.logprobs)


class TrunkTokens:
    """Log-probs and entropies of the tokens that an open trunk's rows predict, `values` [2, E], and the sums of their gradients, `grads`."""

    def __init__(self, edges: np.ndarray) -> None:
        self.edges = edges
        self.values: torch.Tensor | None = None
        self.grads: torch.Tensor | None = None

    def keep(self, logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        """Stores detached values, from the first forward."""
        if self.values is None:
            self.values = torch.stack([logprobs.detach(), entropies.detach()])
            self.grads = torch.zeros_like(self.values)


def tokens_of(above: Sequence[TrunkTokens], edges: np.ndarray, finished: np.ndarray, places: Callable[[Any], Any]) -> tuple[np.ndarray, Any, np.ndarray]:
    """The finished rollouts' tokens, in order: the index of each token's values in [open trunks | this item], its rollout, and its position in the
    response. `edges`: of this item; `places`: the rollouts' indices in the whole step."""
    keys = np.concatenate([trunk.edges for trunk in above if trunk.values is not None] + [edges])
    chosen = np.flatnonzero(np.isin(keys[:, 2], finished))
    chosen = chosen[np.lexsort((keys[chosen, 3], keys[chosen, 2]))]
    return chosen, places(keys[chosen, 2]), keys[chosen, 3]


def wave_of(above: Sequence[TrunkTokens], finished: list[int], tokens: Sequence[torch.Tensor], own: torch.Tensor | None,
            own_entropies: Callable[[], torch.Tensor], gradients: bool) -> tuple[Wave, list[tuple[TrunkTokens, torch.Tensor]]]:
    """The Wave of the finished rollouts, and the leaves that stand for the open trunks' values. `tokens`: as `tokens_of` returns them, on the device.
    `own`: the log-probs of the item's edges, or None if it has none."""
    order, rollout, position = tokens
    leaves = [(trunk, trunk.values.clone().requires_grad_(gradients)) for trunk in above if trunk.values is not None]

    def values(which: int, mine: torch.Tensor | None) -> torch.Tensor:
        parts = [leaf[which] for _, leaf in leaves] + ([mine] if mine is not None else [])
        return torch.cat(parts) if parts else torch.zeros(0, device=order.device)

    return Wave(finished, rollout, position, values(0, own)[order], lambda: values(1, own_entropies() if own is not None else None)[order]), leaves


@dataclass(frozen=True)
class Result:
    """Result of one step. `str()` is a line for a log.

    `rows`: token rows that ran forward. `rows_without_sharing`: the rows of a dense step.
    `loss`: the sum over waves. `router_loss`: router_aux_loss_coef times the load-balancing loss.
    `schedule`: dense, packed or phased.
    `verification`: the table, if this step was compared with the dense one.
    `verified`: whether this step, or an earlier one of its regime, was compared.
    """
    loss: float
    rows: int
    rows_without_sharing: int
    waves: int
    seconds: float
    peak_bytes: int
    verification: Verification | None = None
    router_loss: float = 0.0
    schedule: str = ""
    verified: bool = False

    def __str__(self) -> str:
        return (f"{self.rows:,} rows run instead of {self.rows_without_sharing:,} ({self.rows_without_sharing / self.rows:.2f} times fewer), "
                f"{self.schedule}, {self.waves} waves, {self.seconds:.2f} s, peak {self.peak_bytes / 2**20:,.0f} MiB")


@dataclass(frozen=True)
class Scores:
    """Log-probs of each rollout, one per response token, and entropies if requested. `rows` as in `Result`."""
    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor] | None
    rows: int
    rows_without_sharing: int
