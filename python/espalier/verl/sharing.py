"""The part of the engines that is the same for all of verl's backends: batches become rollouts, waves become verl's micro-batches."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.utils.py_functional import append_to_dict

from espalier.errors import Unsupported
from espalier.rows.waves import Result, Scores, Wave
from espalier.verl import refusals
from espalier.verl.batch import MiniBatch
from espalier.verl.options import Options

_log = logging.getLogger("espalier")
options_of_new_engines: dict[str, Options] = {}


class Sharing:
    """Stands before one of verl's engines among a class's bases. `shared_rows`: token rows run forward, and rows without sharing.

    A backend defines `_refused`, `_refused_rows`, `_agreed`, `_checked`, `_scores` and `_step`.
    """
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared_rows = {"run": 0, "without_sharing": 0}
        self._noted: set[str] = set()
        self.options = options_of_new_engines["taken"]

    # ---- what a backend defines -----------------------------------------------------------------------------------------

    def _refused(self, data: Any, loss_function: Callable[..., Any] | None) -> str:
        """The reason why the engine's configuration, a loss or a batch cannot share, or ""."""
        raise NotImplementedError

    def _refused_rows(self, batch: MiniBatch) -> str:
        """The reason why rows of a batch cannot be shared, or ""."""
        raise NotImplementedError

    def _agreed(self, refused: bool, longest: int) -> tuple[bool, int]:
        """Both numbers, the largest of all ranks whose calls of the model are collective."""
        raise NotImplementedError

    def _checked(self, longest: int) -> None:
        """Raises `Unsupported` if the model cannot share."""
        raise NotImplementedError

    def _scores(self, batch: MiniBatch, entropies: bool) -> Scores | None:
        """Log-probs of a batch, or None if verl's own path is as fast."""
        raise NotImplementedError

    def _step(self, batch: MiniBatch, loss: Callable[[Wave], torch.Tensor], plain: Callable[[Any], Any]) -> Result | None:
        """Gradients of a batch, or None if verl's own path is as fast. `plain(data)` is that path; it returns the loss."""
        raise NotImplementedError

    @property
    def context_ranks(self) -> int:
        """The number of ranks that have parts of the same rollouts."""
        return 1

    @property
    def _has_outputs(self) -> bool:
        """True if this rank has the last layer."""
        return True

    def _must_share(self) -> tuple[str, str, str] | None:
        """(place, expectation, remedy) of the error for a batch that cannot be shared if verl's own path would do something else."""
        return None

    # ---- a batch --------------------------------------------------------------------------------------------------------

    def _note(self, reason: str) -> None:
        if reason not in self._noted:
            self._noted.add(reason)
            if torch.distributed.get_rank() == 0:
                _log.warning("prompts are not shared: %s", reason)

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False) -> dict[str, Any]:
        own = lambda: super(Sharing, self).forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        refusals.check_sets(data)
        batch, reason = self._batch(data, loss_function)
        if batch is None:
            must = self._must_share()
            if must is not None:
                raise Unsupported(must[0], must[1], reason, must[2])
            self._note(reason)
            return own()
        answer = self._log_probs(batch, loss_function) if forward_only else self._update(batch, loss_function)
        return own() if answer is None else answer

    def _batch(self, data: Any, loss_function: Callable[..., Any] | None) -> tuple[MiniBatch | None, str]:
        """(mini-batch, "") or (None, the reason why it cannot be shared). All ranks get the same answer, because their calls of the model are collective."""
        batch: MiniBatch | None = None
        reason, longest = self._refused(data, loss_function), 0
        if not reason:
            try:
                batch = MiniBatch(data)
                longest = int(batch.lengths.max())
                reason = self._refused_rows(batch)
            except ValueError as problem:
                reason = f"the batch has {problem}"
        refused, longest = self._agreed(bool(reason), longest)
        if refused:
            return None, reason or "another rank cannot"
        try:
            self._checked(longest)
        except Unsupported as refusal:
            return None, str(refusal)
        return batch, ""

    def _wave_tokens(self, batch: MiniBatch) -> int:
        """The number of rows that verl would run at once on a rank."""
        data = batch.data
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return int(data["max_token_len_per_gpu"])
        return -(-int(data["micro_batch_size_per_gpu"]) * int(batch.lengths.max()) // self.context_ranks)

    def _count(self, run: int, batch: MiniBatch) -> None:
        self.shared_rows["run"] += run
        self.shared_rows["without_sharing"] += int(batch.lengths.sum())

    # ---- old and reference log-probs ------------------------------------------------------------------------------------

    def _log_probs(self, batch: MiniBatch, loss_function: Callable[..., Any] | None) -> dict[str, Any] | None:
        """Computes the mini-batch as one micro-batch, because only a few numbers per token stay in memory."""
        entropies = tu.get_non_tensor_data(data=batch.data, key="calculate_entropy", default=False)
        scores = self._scores(batch, entropies)
        if scores is None:
            return None
        self._count(scores.rows, batch)
        if loss_function is not None:
            self._global_numbers(batch.data)
        if not self._has_outputs:
            return {}
        rows = list(range(len(batch.lengths)))
        row, position = batch.tokens()
        layout = lambda values: batch.layout(rows, row, position, torch.cat(values))
        output = {"log_probs": layout(scores.logprobs)}
        if entropies:
            output["entropy"] = layout(scores.entropies)
        if loss_function is None:
            return {"model_output": output, "loss": [1.0], "metrics": {}}
        loss, metrics = self._loss(loss_function, output, batch, rows)
        return _result(output, [(loss, metrics)])

    # ---- the update -----------------------------------------------------------------------------------------------------

    def _update(self, batch: MiniBatch, loss_function: Callable[..., Any] | None) -> dict[str, Any] | None:
        data = batch.data
        self._global_numbers(data)
        with_entropy = tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False)
        returned = tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        done: list[tuple[torch.Tensor, Any]] = []
        outputs: list[tuple[Sequence[int], dict[str, torch.Tensor]]] = []
        seen: set[int] = set()

        def loss(wave: Wave) -> torch.Tensor:
            layout = lambda values: batch.layout(wave.rollouts, wave.rollout, wave.position, values)
            output = {"log_probs": layout(wave.logprobs)}
            if with_entropy:
                output["entropy"] = layout(wave.entropies)
            value, metrics = self._loss(loss_function, output, batch, wave.rollouts)
            if seen.isdisjoint(wave.rollouts):  # a verification's runs see the same rollouts again
                done.append((value.detach(), metrics))
            if returned and seen.isdisjoint(wave.rollouts):
                outputs.append((wave.rollouts, {name: values.detach() for name, values in output.items()}))
            seen.update(wave.rollouts)
            return value

        own = super().forward_backward_batch  # type: ignore[misc]
        result = self._step(batch, loss, lambda data: sum(own(data, loss_function, False).get("loss", [0.0])))
        if result is None:
            return None
        if result.verification is not None and torch.distributed.get_rank() == 0:
            _log.warning("the first update against verl's own:\n%s", result.verification)
        self._count(result.rows, batch)
        if not self._has_outputs:
            return {}
        answer = _result(_in_order(outputs) if returned else {}, done)
        for name, rows in (("run", result.rows), ("without_sharing", result.rows_without_sharing)):
            answer["metrics"][f"espalier/rows_{name}"] = Metric(AggregationType.SUM, rows)
        return answer

    def _global_numbers(self, data: Any) -> None:
        """Adds the denominators that verl's engine gives its losses: the denominators of the mini-batch over all ranks."""
        mask = data["loss_mask"]
        tokens = (mask.values().sum() if mask.is_nested else mask.sum()).to(get_device_id())
        torch.distributed.all_reduce(tokens, torch.distributed.ReduceOp.SUM, self.get_data_parallel_group())  # type: ignore[attr-defined]
        tu.assign_non_tensor(data, sp_size=self.context_ranks, batch_num_tokens=tokens.item(),
                             dp_size=self.get_data_parallel_size())  # type: ignore[attr-defined]

    def _loss(self, loss_function: Callable[..., Any] | None, output: dict[str, Any], batch: MiniBatch, rows: Sequence[int]) -> Any:
        assert loss_function is not None  # verl gives one with every update
        group = self.get_data_parallel_group()  # type: ignore[attr-defined]
        return loss_function(model_output=output, data=batch.part(rows, get_device_id()), dp_group=group)


def one_by_one(data: Any) -> Any:
    """The same mini-batch in micro-batches of one rollout."""
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
