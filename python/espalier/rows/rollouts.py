"""A step's rollouts as arrays, and their plan from the C++ core."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from espalier import native
from espalier.errors import Error
from espalier.rows import kept

_DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "bfloat16"}
_SECONDS_PER_CALL = 40e-6  # eager PyTorch, measured on small models: a kernel with its module call and its graph node


class Rollouts:
    """`prompts` and `responses` as int32 arrays; errors name the rollout."""

    def __init__(self, records: Iterable[Mapping[str, Any]], vocabulary: int) -> None:
        self.members: np.ndarray | None = None  # if this is a part of a step: the index of each rollout in the whole step
        self.records = listed = _listed(records)
        self.prompts: list[np.ndarray] = []
        self.responses: list[np.ndarray] = []
        self.kept: list[kept.KeptSets | None] = []
        for i, record in enumerate(listed):
            for field, out in (("prompt_ids", self.prompts), ("response_ids", self.responses)):
                if not isinstance(record, Mapping):
                    raise Error("input", f"rollouts[{i}]", "a dict with prompt_ids and response_ids", type(record).__name__, "", 3)
                if field not in record:
                    raise Error("input", f"rollouts[{i}]", f"a dict with {field}", ", ".join(map(str, record)) or "nothing", "", 3)
                out.append(native.token_ids(record[field], f"rollouts[{i}][{field!r}]"))
                if len(out[-1]) and out[-1].max() >= vocabulary:
                    raise Error("input", f"rollouts[{i}][{field!r}]", f"ids below the vocabulary's {vocabulary}", str(out[-1].max()), "", 3)
            if not len(self.prompts[-1]):
                raise Error("input", f"rollouts[{i}]['prompt_ids']", "at least one token", "none", "", 3)
            self.kept.append(kept.of_record(record, self.responses[-1], f"rollouts[{i}]", vocabulary))
        self.lengths = np.array([len(p) + len(r) for p, r in zip(self.prompts, self.responses)])
        self.images: Any = None
        self.routes: Any = None
        self.keys, self.response_keys = self.prompts, self.responses  # ids for the planner, which images and recorded experts replace

    def part(self, members: Sequence[int]) -> Self:
        """The rollouts with these indices, as rollouts of their own."""
        if len(members) == len(self):
            return self
        out = copy.copy(self)
        out.members = np.asarray(members)
        out.prompts, out.responses, out.keys, out.response_keys = (
            [of[i] for i in members] for of in (self.prompts, self.responses, self.keys, self.response_keys))
        out.kept = [self.kept[i] for i in members]
        out.lengths = self.lengths[out.members]
        return out

    def places(self, rollouts: Any) -> Any:
        """The indices of these rollouts in the whole step."""
        return rollouts if self.members is None else self.members[rollouts]

    def __len__(self) -> int:
        return len(self.prompts)

    def tokens(self, rollout: int, begin: int, end: int) -> np.ndarray:
        """Tokens [begin, end) of prompt + response."""
        prompt = self.prompts[rollout]
        if end <= len(prompt):
            return prompt[begin:end]
        return np.concatenate([prompt[begin:], self.responses[rollout][max(0, begin - len(prompt)):end - len(prompt)]])

    def sets_of(self, rollout: np.ndarray, position: np.ndarray, device: Any) -> kept.EdgeSets | None:
        """The kept sets of edges, which are tokens `position` of these rollouts' responses. None if no edge has one."""
        return kept.of_edges(self.kept, rollout, position, device)

    def with_images(self, images: Any) -> Self:
        """These rollouts with their Images, or None."""
        if images is not None:
            self.images, self.keys, self.response_keys = images, images.keys, images.response_keys
        return self

    def with_routes(self, routes: Any) -> Self:
        """These rollouts with their Routes, or None; after their images."""
        if routes is not None:
            self.routes, self.keys, self.response_keys = routes, routes.keys, routes.response_keys
        return self

    def targets(self, ids: np.ndarray) -> np.ndarray:
        """The tokens that the planner's ids represent."""
        for named in (self.routes, self.images):
            ids = ids if named is None else named.targets(ids)
        return ids

    def planned(self, shape: Mapping[str, int], like: torch.Tensor, *, wave_tokens: int, trunk_state: str, gradients: bool) -> native.Plan:
        """The plan of a step on a model of this shape (espalier_shape), whose parameters have the type and device of `like`."""
        return native.Plan(self.keys, self.response_keys, shape, wave_tokens=wave_tokens,
                           trunk_state="recompute" if trunk_state == "recompute" else "keep",
                           dtype=_DTYPES.get(like.dtype, "float32"), gradients=gradients,
                           device="cuda" if like.device.type == "cuda" else "cpu", threads=torch.get_num_threads(),
                           seconds_per_call=_SECONDS_PER_CALL)


def _listed(records: Any) -> list[Mapping[str, Any]]:
    if isinstance(records, (Mapping, str, bytes)) or not isinstance(records, Iterable):
        raise Error("input", "rollouts", "a list of dicts with prompt_ids and response_ids", type(records).__name__, "", 3)
    records = list(records)
    if not records:
        raise Error("input", "rollouts", "at least one rollout", "none", "Skip the step for an empty batch", 3)
    return records
