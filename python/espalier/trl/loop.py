"""The common beginnings of a padded batch's rows, run once in a training loop that is not TRL's.

    shared = SharedLoop(model)
    with shared.micro_batch():
        loss = ...                     # calls model(input_ids, attention_mask, ...) on a padded batch, as before
        loss.backward()

    SharedLoop(model).attach()         # the same for a loop that cannot be changed: within model.forward
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from espalier.trl.batches import SharedBatches


class SharedLoop(SharedBatches):
    """`shared_rows`, `verify` and `verification`: as in espalier.trl's trainers. `reference`: a second model that the loop calls on the same batches."""

    def __init__(self, model: torch.nn.Module, reference: torch.nn.Module | None = None, *, verify: bool = False) -> None:
        self.model, self.ref_model = model, reference
        super().__init__(verify=verify)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[Any]:
        """Context manager around the forward and the backward of a micro-batch."""
        try:
            with self._shared_backbones():
                yield self
        finally:
            self._end_step()

    def attach(self) -> None:
        """Replaces the model's forward by one that shares wherever gradients are enabled. Calls without gradients are the model's own."""
        own = self.model.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                self._end_step()
                return own(*args, **kwargs)
            with self._shared_backbones():
                return own(*args, **kwargs)

        self.model.forward = forward  # type: ignore[method-assign]
