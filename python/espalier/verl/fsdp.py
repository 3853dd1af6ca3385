"""verl's FSDP engine with shared prompts."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import FSDPEngineWithLMHead

from espalier import hf
from espalier.hf import verification
from espalier.rows.waves import Result, Scores, Wave
from espalier.verl import fsdp_refusals, own_forwards, refusals
from espalier.verl.batch import MiniBatch
from espalier.verl.sharing import Sharing, one_by_one


class SharedPromptsEngine(Sharing, FSDPEngineWithLMHead):
    """verl's engine, with `forward_backward_batch` over waves."""

    def _must_share(self) -> tuple[str, str, str] | None:
        if not fsdp_refusals.replays(self):
            return None
        return ("router_replay.mode=R3", "a batch that espalier.verl can share, because verl's FSDP engine has no replay",
                "router_replay.mode=disabled runs it without replay")

    def _refused(self, data: Any, loss_function: Callable[..., Any] | None) -> str:
        return (fsdp_refusals.of_engine(self) or refusals.of_loss(loss_function, data) or refusals.of_batch(data)
                or (fsdp_refusals.of_record(data) if fsdp_refusals.replays(self) else ""))

    def _refused_rows(self, batch: MiniBatch) -> str:
        with own_forwards.in_use(self.module):
            return fsdp_refusals.of_rows(self.module, batch)

    def _agreed(self, refused: bool, longest: int) -> tuple[bool, int]:
        everywhere = torch.tensor([refused, longest], device=get_device_id())
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MAX, self.get_data_parallel_group())
        told = everywhere.tolist()
        return bool(told[0]), told[1]

    def _checked(self, longest: int) -> None:
        with own_forwards.in_use(self.module):
            hf.check(self.module, longest=longest)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        wide = self._autocast_dtype in (torch.float32, torch.float64)
        return contextlib.nullcontext() if wide else torch.autocast(get_device_name(), self._autocast_dtype)

    def _scores(self, batch: MiniBatch, entropies: bool) -> Scores:
        with self._autocast(), own_forwards.in_use(self.module):
            return hf.score(self.module, batch.rollouts(fsdp_refusals.replays(self)), wave_tokens=self._wave_tokens(batch),
                            temperature=batch.temperature, entropies=entropies)

    def _step(self, batch: MiniBatch, loss: Callable[[Wave], torch.Tensor], plain: Callable[[Any], Any]) -> Result:
        replays, verifies = fsdp_refusals.replays(self), self.options.verify and verification.is_first(self.module)
        before = verification.begin(self.module) if verifies and not replays else None
        try:
            with self._autocast(), own_forwards.in_use(self.module):
                result = hf.phased_step(self.module, batch.rollouts(replays), loss, wave_tokens=self._wave_tokens(batch),
                                        trunk_state=self.options.trunk_state, schedule=self.options.schedule, temperature=batch.temperature,
                                        verify=verifies and replays)
        except BaseException:
            if before is not None:
                before.put_back()
            raise
        if before is None:
            return result
        table = before.compare(result.loss, lambda: plain(batch.data), lambda: plain(one_by_one(batch.data)))
        return dataclasses.replace(result, verification=table, verified=True)
