"""verl's mini-batch as rollouts, and waves as the micro-batches that verl's losses expect."""

from collections.abc import Sequence
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

_COUNTS = {"images_seqlens"}  # of patches, which verl's agent loop adds for its estimate of operations


class MiniBatch:
    """A rank's rows. Row i of `input_ids` (jagged) is prompt i, then response i, without padding."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.lengths = data["input_ids"].offsets().diff().cpu()
        self.prompt_lengths, responses = _lengths(data)
        if not torch.equal(self.prompt_lengths + responses, self.lengths):
            raise ValueError("rows that are not a prompt and its response")
        if not bool((self.prompt_lengths > 0).all() and (responses > 0).all()):
            raise ValueError("an empty prompt or response")

    def images(self) -> list[dict[str, Any] | None]:
        """Each row's `multi_modal_inputs` without None values and verl's own counts, or None for a row without images."""
        rows = [getattr(row, "data", row) for row in self.data.get("multi_modal_inputs", [])]
        return [{name: x for name, x in (row or {}).items() if x is not None and name not in _COUNTS} or None for row in rows] or [None] * len(self.lengths)

    def rollouts(self, replayed: bool = False) -> list[dict[str, Any]]:
        """The rows as rollouts, with their images and, if `replayed`, their recorded experts. verl writes zeros where nothing was recorded."""
        tokens = self.data["input_ids"].values().cpu().numpy()
        ends = self.lengths.cumsum(0).tolist()
        out = [{"prompt_ids": tokens[end - n:end - n + p], "response_ids": tokens[end - n + p:end]}
               for end, n, p in zip(ends, self.lengths.tolist(), self.prompt_lengths.tolist())]
        out = [rollout if own is None else dict(rollout, images=own) for rollout, own in zip(out, self.images(), strict=True)]
        if replayed:
            records = self.data["routed_experts"].values().cpu().numpy()
            out = [dict(rollout, routed_experts=records[end - n:end]) for rollout, end, n in zip(out, ends, self.lengths.tolist())]
        return out

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of every response token, [T] each."""
        counts = (self.lengths - self.prompt_lengths).tolist()
        row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return row, torch.cat([torch.arange(n) for n in counts])

    @property
    def temperature(self) -> float:
        """The temperature, rounded as in verl's engine."""
        value = self.data["temperature"]
        value = value.flatten()[0] if isinstance(value, torch.Tensor) else torch.tensor(value)
        return float(value.to(torch.float32).clamp(min=1e-8))

    def part(self, rows: Sequence[int], device: Any) -> Any:
        """The micro-batch that consists of these rows."""
        return tu.index_select_tensor_dict(self.data, torch.tensor(rows)).to(device)

    def layout(self, rows: Sequence[int], row: torch.Tensor, position: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Lays out values of response tokens (`row`, `position` [E]) as verl's engine does: jagged over prompt + response of `rows`, each value at the
        row of its logits, one before its token. Other entries are NaN; no loss may read them."""
        device = values.device
        row, position = row.to(device), position.to(device)
        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        first = torch.zeros(len(self.lengths), dtype=torch.long)
        first[rows] = ends - lengths + self.prompt_lengths[rows] - 1
        place = first.to(device)[row] + position
        flat = torch.full((int(ends[-1]),), torch.nan, dtype=values.dtype, device=device).index_put((place,), values)
        offsets = torch.cat([ends.new_zeros(1), ends]).to(device)
        return torch.nested.nested_tensor_from_jagged(flat, offsets)


def _lengths(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths in tokens of each prompt and of each response."""
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        return prompts.offsets().diff().cpu(), responses.offsets().diff().cpu()
    mask, width = data["attention_mask"], prompts.shape[1]
    return mask[:, :width].sum(1).cpu(), mask[:, width:].sum(1).cpu()
