"""verl's Megatron engine with shared prompts."""

from collections.abc import Callable
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from espalier import megatron
from espalier.errors import Unsupported
from espalier.megatron.checks import check_config, has_router_losses
from espalier.megatron.run import Prepared
from espalier.megatron.schedule import inner_of
from espalier.rows.waves import Result, Scores, Wave
from espalier.verl import refusals
from espalier.verl.batch import MiniBatch
from espalier.verl.sharing import Sharing, one_by_one


class SharedMegatronEngine(Sharing, MegatronEngineWithLMHead):
    """verl's engine, with `forward_backward_batch` over waves through Megatron's schedules."""

    def initialize(self) -> None:
        super().initialize()
        self._refusal = self._of_configuration()
        if not self._refusal:
            try:
                megatron.install(self.module, verify=self.options.verify)
            except Unsupported as refusal:
                self._refusal = str(refusal)

    @property
    def context_ranks(self) -> int:
        return self.engine_config.context_parallel_size

    @property
    def _has_outputs(self) -> bool:
        return any(inner_of(chunk).post_process for chunk in self.module)

    def _of_configuration(self) -> str:
        """The reason why this engine's configuration cannot share, or ""."""
        model, config = self.model_config, self.engine_config
        in_use = [name for name, on in (
            ("use_fused_kernels", config.use_fused_kernels or model.use_fused_kernels), ("mtp", model.mtp.enable),
            (f"router_replay {config.router_replay.mode}", config.router_replay.mode != "disabled"),
            ("dynamic_context_parallel", config.dynamic_context_parallel), ("qat", config.qat.enable), ("use_megatron_fsdp", config.use_megatron_fsdp),
            ("trunk_state=recompute (Megatron's recompute_granularity decides)", self.options.trunk_state != "keep")) if on]
        return f"{', '.join(in_use)} in use" if in_use else ""

    def _refused(self, data: Any, loss_function: Callable[..., Any] | None) -> str:
        return self._refusal or refusals.of_loss(loss_function, data) or refusals.of_batch(data)

    def _refused_rows(self, batch: MiniBatch) -> str:
        return "the batch has images" if any(batch.images()) else refusals.of_positions(batch)

    def _agreed(self, refused: bool, longest: int) -> tuple[bool, int]:
        everywhere = torch.tensor([refused, longest], device=get_device_id())
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MAX)
        told = everywhere.tolist()
        return bool(told[0]), told[1]

    def _checked(self, longest: int) -> None:
        for chunk in self.module:
            check_config(inner_of(chunk))

    def _prepared(self, batch: MiniBatch, gradients: bool) -> Prepared | None:
        """The step of a batch, or None if no rank's plan runs fewer rows than verl's own path."""
        if self.options.schedule == "dense":
            return None
        batches = None
        if gradients and has_router_losses(inner_of(self.module[0]).config):
            batches = self._micro_batches(batch.data)
        prepared = Prepared(self.module, batch.rollouts(), self._wave_tokens(batch), gradients=gradients, micro_batches=batches)
        return prepared if self.options.schedule == "shared" or self._agreed(prepared.shares, 0)[0] else None

    def _micro_batches(self, data: Any) -> list[list[int]]:
        """The rollouts of each of verl's own micro-batches, whose router losses are computed together."""
        tu.assign_non_tensor(data, sp_size=self.context_ranks)
        parts, indices = prepare_micro_batches(data=data, dp_group=self.get_data_parallel_group(), num_batches_divided_by=self._batches_divided_by,
                                               same_micro_num_in_dp=True, min_num_micro_batch=None)
        if indices is not None:
            return [list(part) for part in indices]
        size = len(data) // len(parts)
        return [list(range(at, at + size)) for at in range(0, len(data), size)]

    @property
    def _batches_divided_by(self) -> int | None:
        return self.tf_config.microbatch_group_size_per_vp_stage if len(self.module) > 1 else None

    def _scores(self, batch: MiniBatch, entropies: bool) -> Scores | None:
        with torch.no_grad():
            prepared = self._prepared(batch, False)
            return None if prepared is None else megatron.scored(prepared, batch.temperature, entropies)

    def _step(self, batch: MiniBatch, loss: Callable[[Wave], torch.Tensor], plain: Callable[[Any], Any]) -> Result | None:
        prepared = self._prepared(batch, True)
        if prepared is None:
            return None
        tokens = None
        if self.tf_config.calculate_per_token_loss:  # Megatron divides by the rows of the step: its loss is a sum that this division makes verl's mean
            lengths = batch.lengths.tolist()
            rows = torch.tensor(sum(lengths), device=get_device_id())
            torch.distributed.all_reduce(rows, group=self.get_data_parallel_group())
            tokens, own, scale = (lambda wave: sum(lengths[i] for i in wave.rollouts)), loss, rows.item() / self.get_data_parallel_size()
            loss = lambda wave: own(wave) * scale
        divided_by = self._batches_divided_by or 1
        again = one_by_one(batch.data) if len(batch.lengths) % divided_by == 0 else batch.data
        return megatron.stepped(prepared, loss, batch.temperature, tokens, plain=lambda: float(plain(batch.data)), again=lambda: float(plain(again)))
