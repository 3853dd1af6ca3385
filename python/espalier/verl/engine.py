"""The engine that verl uses for the vendor "espalier"."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

from espalier import hf, native
from espalier.errors import Unsupported
from espalier.hf import verification
from espalier.verl import own_forwards, refusals
from espalier.verl.batch import MiniBatch
from espalier.verl.options import Options

_log = logging.getLogger("espalier")
_options: dict[str, Options] = {}  # options of engines made from now on
_BACKENDS = ("fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel")


class SharedPromptsEngine(FSDPEngineWithLMHead):
    """verl's engine, with `forward_backward_batch` over waves. `shared_rows`: token rows run forward, and rows without sharing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared_rows = {"run": 0, "without_sharing": 0}
        self._noted: set[str] = set()
        self.options = _options["taken"]

    def _note(self, reason: str) -> None:
        if reason not in self._noted:
            self._noted.add(reason)
            if self.rank == 0:
                _log.warning("prompts are not shared: %s", reason)

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False) -> dict[str, Any]:
        batch, reason = self._batch(data, loss_function)
        if batch is None:
            if refusals.replays(self):
                raise Unsupported("router_replay.mode=R3", "a batch that espalier.verl can share, because verl's FSDP engine has no replay", reason,
                                  "router_replay.mode=disabled runs it without replay")
            self._note(reason)
            return super().forward_backward_batch(data, loss_function, forward_only)
        return self._log_probs(batch, loss_function) if forward_only else self._update(batch, loss_function)

    def _batch(self, data: Any, loss_function: Callable[..., Any] | None) -> tuple[MiniBatch | None, str]:
        """(mini-batch, "") or (None, the reason why it cannot be shared). All ranks get the same answer, because their calls of the model are collective."""
        batch: MiniBatch | None = None
        reason, longest = refusals.of_engine(self), 0
        if not reason:
            reason = refusals.of_loss(loss_function, data) or refusals.of_batch(data) or (refusals.of_record(data) if refusals.replays(self) else "")
        if not reason:
            try:
                batch = MiniBatch(data)
                longest = int(batch.lengths.max())
                with own_forwards.in_use(self.module):
                    reason = refusals.of_rows(self.module, batch)
            except ValueError as problem:
                reason = f"the batch has {problem}"
        everywhere = torch.tensor([bool(reason), longest], device=get_device_id())
        torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MAX, self.get_data_parallel_group())
        refused, longest = everywhere.tolist()
        if refused:
            return None, reason or "another rank cannot"
        try:
            with own_forwards.in_use(self.module):
                hf.check(self.module, longest=longest)
        except Unsupported as refusal:
            return None, str(refusal)
        return batch, ""

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        wide = self._autocast_dtype in (torch.float32, torch.float64)
        return contextlib.nullcontext() if wide else torch.autocast(get_device_name(), self._autocast_dtype)

    def _wave_tokens(self, batch: MiniBatch) -> int:
        """The number of rows that verl would run at once."""
        data = batch.data
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return int(data["max_token_len_per_gpu"])
        return int(data["micro_batch_size_per_gpu"]) * int(batch.lengths.max())

    def _count(self, run: int, batch: MiniBatch) -> None:
        self.shared_rows["run"] += run
        self.shared_rows["without_sharing"] += int(batch.lengths.sum())

    # ---- old and reference log-probs ------------------------------------------------------------------------------------

    def _log_probs(self, batch: MiniBatch, loss_function: Callable[..., Any] | None) -> dict[str, Any]:
        """Computes the mini-batch as one micro-batch, because only a few numbers per token stay in memory."""
        entropies = tu.get_non_tensor_data(data=batch.data, key="calculate_entropy", default=False)
        with self._autocast(), own_forwards.in_use(self.module):
            scores = hf.score(self.module, batch.rollouts(refusals.replays(self)), wave_tokens=self._wave_tokens(batch), temperature=batch.temperature,
                              entropies=entropies)
        self._count(scores.rows, batch)
        rows = list(range(len(batch.lengths)))
        row, position = batch.tokens()
        layout = lambda values: batch.layout(rows, row, position, torch.cat(values))
        output = {"log_probs": layout(scores.logprobs)}
        if entropies:
            output["entropy"] = layout(scores.entropies)
        if loss_function is None:
            return {"model_output": output, "loss": [1.0], "metrics": {}}
        self._global_numbers(batch.data)
        loss, metrics = self._loss(loss_function, output, batch, rows)
        return _result(output, [(loss, metrics)])

    # ---- the update -----------------------------------------------------------------------------------------------------

    def _update(self, batch: MiniBatch, loss_function: Callable[..., Any] | None) -> dict[str, Any]:
        data = batch.data
        self._global_numbers(data)
        with_entropy = tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False)
        returned = tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        done: list[tuple[torch.Tensor, Any]] = []
        outputs: list[tuple[Sequence[int], dict[str, torch.Tensor]]] = []
        seen: set[int] = set()

        def loss(wave: hf.Wave) -> torch.Tensor:
            layout = lambda values: batch.layout(wave.rollouts, wave.rollout, wave.position, values)
            output = {"log_probs": layout(wave.logprobs)}
            if with_entropy:
                output["entropy"] = layout(wave.entropies)
            value, metrics = self._loss(loss_function, output, batch, wave.rollouts)
            if seen.isdisjoint(wave.rollouts):  # the verification's dense runs see the same rollouts again
                done.append((value.detach(), metrics))
            if returned and seen.isdisjoint(wave.rollouts):
                outputs.append((wave.rollouts, {name: values.detach() for name, values in output.items()}))
            seen.update(wave.rollouts)
            return value

        replays, verifies = refusals.replays(self), self.options.verify and verification.is_first(self.module)
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
        table = result.verification
        if before is not None:
            table = before.compare(result.loss, lambda: self._plain(data, loss_function),
                                   lambda: self._plain(_one_by_one(data), loss_function))
        if table is not None and self.rank == 0:
            _log.warning("the first update against %s:\n%s", "the same step dense" if replays else "verl's own", table)
        self._count(result.rows, batch)
        answer = _result(_in_order(outputs) if returned else {}, done)
        for name, rows in (("run", result.rows), ("without_sharing", result.rows_without_sharing)):
            answer["metrics"][f"espalier/rows_{name}"] = Metric(AggregationType.SUM, rows)
        return answer

    def _global_numbers(self, data: Any) -> None:
        """Adds the denominators that verl's engine gives its losses: those of the mini-batch over all ranks."""
        tokens = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(tokens, torch.distributed.ReduceOp.SUM, self.get_data_parallel_group())
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())

    def _loss(self, loss_function: Callable[..., Any] | None, output: dict[str, Any], batch: MiniBatch, rows: Sequence[int]) -> Any:
        assert loss_function is not None  # verl gives one with every update
        return loss_function(model_output=output, data=batch.part(rows, get_device_id()), dp_group=self.get_data_parallel_group())

    def _plain(self, data: Any, loss_function: Callable[..., Any] | None) -> Any:
        return sum(super().forward_backward_batch(data, loss_function, False)["loss"])


def _one_by_one(data: Any) -> Any:
    return tu.assign_non_tensor(data.copy(), use_dynamic_bsz=False, micro_batch_size_per_gpu=1)


def _in_order(outputs: list[tuple[Sequence[int], dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Rows of all waves in the order of the mini-batch."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for rows, output in outputs:
        for name, values in output.items():
            found.setdefault(name, {}).update(zip(rows, values.unbind()))
    return {name: torch.nested.as_nested_tensor([of[i] for i in sorted(of)], layout=torch.jagged) for name, of in found.items()}


def _result(model_output: dict[str, Any], done: list[tuple[Any, Any]]) -> dict[str, Any]:
    """The object that verl's engines return. Metrics that verl adds up over micro-batches and ranks become one value per rank: verl expects the same
    number of values from every rank, and ranks have different numbers of waves."""
    metrics: dict[str, Any] = {}
    for _, values in done:
        append_to_dict(metrics, values)
    metrics = {name: Metric(value.aggregation, value.aggregate()) if isinstance(value, Metric) else value for name, value in metrics.items()}
    return {"model_output": model_output, "loss": [float(loss) for loss, _ in done], "metrics": metrics}


def register(vendor: str, taken: Options) -> None:
    """Registers the vendor: fsdp and fsdp2 with shared prompts; every other backend and device is refused by name. Critics stay verl's.
    `taken`: the Options of engines made from now on."""
    _options["taken"] = taken
    registered = EngineRegistry._engines.get("language_model", {})
    if ("cuda", vendor) in registered.get("fsdp2", {}):
        return
    native.library()
    own_forwards.remember()
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=vendor)(SharedPromptsEngine)
    for backends, devices in ((["fsdp", "fsdp2"], ["npu"]), (list(_BACKENDS), ["cuda", "npu", "cpu"])):
        EngineRegistry.register(model_type="language_model", backend=backends, device=devices, vendor=vendor)(_Refused)


class _Refused(BaseEngine):
    def __init__(self, *_: Any, engine_config: Any = None, **__: Any) -> None:
        raise Unsupported("VERL_ENGINE_VENDOR=espalier", "actor.strategy=fsdp or fsdp2 on a CUDA device",
                          f"{getattr(engine_config, 'strategy', 'another backend')} on {get_device_name()}", "Unset VERL_ENGINE_VENDOR")
