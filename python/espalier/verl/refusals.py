"""Features of verl's engine that shared prompts do not support. They are named before anything runs."""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.utils.losses import ppo_loss

from espalier.errors import Error
from espalier.hf import images
from espalier.hf.checks import decoder_config
from espalier.hf.rollouts import Rollouts

if TYPE_CHECKING:
    from espalier.verl.batch import MiniBatch

# Losses that are sums over tokens or rollouts, divided by numbers of the whole mini-batch. verl's other losses depend on the whole micro-batch:
# geo_mean divides by its number of rollouts, clip_cov and kl_cov choose tokens in it.
ADDITIVE_LOSSES = {"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "bypass_mode"}


def of_engine(engine: Any) -> str:
    """The reason why this engine's configuration cannot share, or ""."""
    model, config = engine.model_config, engine.engine_config
    if config.ulysses_sequence_parallel_size > 1:
        return f"ulysses_sequence_parallel_size={config.ulysses_sequence_parallel_size} splits a prompt's heads over ranks; use 1"
    in_use = [name for name, on in (
        ("use_fused_kernels", model.use_fused_kernels), ("use_liger", model.use_liger),
        ("tiled_mlp", model.tiled_mlp.get("enabled", False)), ("enable_activation_offload", model.enable_activation_offload),
        ("mtp", model.mtp.enable), ("router_replay R2", config.router_replay.mode == "R2"),
        ("qat", config.qat.enable), ("float16", engine.scaler is not None)) if on]
    return f"{', '.join(in_use)} in use" if in_use else ""


def of_loss(loss_function: Any, data: Any) -> str:
    """The reason why a loss cannot be computed wave by wave, or ""."""
    if loss_function is None:
        return ""
    if not isinstance(loss_function, functools.partial) or loss_function.func is not ppo_loss or "config" not in loss_function.keywords:
        return f"the loss {getattr(loss_function, '__name__', None) or getattr(loss_function, 'func', loss_function)} is not verl's ppo_loss"
    config = loss_function.keywords["config"]
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode not in ADDITIVE_LOSSES:
        return f"policy_loss.loss_mode={mode} is not known to add up over parts of a mini-batch"
    if mode == "bypass_mode" and config.policy_loss.rollout_correction.get("rollout_is_batch_normalize", False):
        return "rollout_is_batch_normalize divides by a mean over the micro-batch"
    if config.loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None and data["response_mask"].is_nested:
        return "seq-mean-token-sum-norm without loss_scale_factor divides by the micro-batch's longest response"
    return ""


def replays(engine: Any) -> bool:
    """True if the engine replays recorded experts. verl's own FSDP engine does not."""
    return engine.engine_config.router_replay.mode == "R3"


def of_record(data: Any) -> str:
    """The reason why a batch's experts cannot be replayed, or ""."""
    record = data.get("routed_experts", None)
    if record is None:
        return "the batch has no routed_experts; set actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    if not record.is_nested or not torch.equal(record.offsets(), data["input_ids"].offsets()):
        return "routed_experts are not one entry for each token of input_ids"
    return ""


def of_rows(model: torch.nn.Module, batch: "MiniBatch") -> str:
    """The reason why images or position ids prevent sharing, or ""."""
    try:
        prepared = Rollouts(batch.rollouts(), decoder_config(model).vocab_size)
        prepared = prepared.with_images(images.of(model, prepared))
    except Error as problem:
        return f"the batch has images: {problem}" if any(batch.images()) else str(problem)
    ids, found = batch.data["input_ids"], batch.data["position_ids"]
    counted = torch.arange(ids.values().numel(), device=ids.device) - torch.repeat_interleave(ids.offsets()[:-1], ids.offsets().diff())
    if found.dim() == 2:
        if prepared.images is not None and prepared.images.by_axes:
            return "position ids of one dimension beside images"
        return "" if torch.equal(found.values().to(counted.dtype), counted) else "position ids that do not count from 0"
    wanted = counted.expand(4, -1)  # axes: text, then time, height and width
    if prepared.images is not None:
        axes = [torch.from_numpy(np.array(prepared.images.positions(i, 0, int(n)))) for i, n in enumerate(batch.lengths)]
        wanted = torch.cat([counted[None], torch.cat(axes, 1).expand(3, -1).to(counted)])
    return "" if torch.equal(found.values().to(counted.dtype), wanted) else "position ids that are not those of get_rope_index"


def of_batch(data: Any) -> str:
    """The reason why a mini-batch cannot be shared, or ""."""
    flag = lambda key: tu.get_non_tensor_data(data=data, key=key, default=False)
    if "prompts" not in data.keys() or "responses" not in data.keys():
        return "the batch has no prompts and responses"
    if tu.get_non_tensor_data(data=data, key="pad_mode", default=DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        return "the batch is padded"
    for key in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"):
        if flag(key):
            return key
    temperature = data["temperature"]
    if isinstance(temperature, torch.Tensor) and temperature.unique().numel() > 1:
        return "several temperatures"
    return ""
