"""Features of verl's batches and losses that shared prompts do not support. They are named before anything runs."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.utils.losses import ppo_loss

from espalier.errors import Unsupported

if TYPE_CHECKING:
    from espalier.verl.batch import MiniBatch

# Losses that are sums over tokens or rollouts, divided by numbers of the whole mini-batch. verl's other losses depend on the whole micro-batch:
# geo_mean divides by its number of rollouts, clip_cov and kl_cov choose tokens in it.
ADDITIVE_LOSSES = {"vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "bypass_mode"}


def check_sets(data: Any) -> None:
    """Raises `Unsupported` for a batch with kept sets of the sampler: verl's log-probs, and so its losses, are over the whole vocabulary."""
    found = [name for name in ("kept_ids", "sampling_mask", "rollout_top_p_token_ids") if name in data.keys()]
    if found:
        raise Unsupported(found[0], "a batch without the kept sets of top-p and top-k, which verl's losses do not use", "a field of the batch",
                          "espalier train and espalier.hf.phased_step train over kept sets; leave the field out to train over the whole vocabulary")


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


def of_positions(batch: "MiniBatch") -> str:
    """The reason why the position ids of a batch of texts prevent sharing, or ""."""
    found, counted = batch.data["position_ids"], counted_positions(batch)
    return "" if found.dim() == 2 and torch.equal(found.values().to(counted.dtype), counted) else "position ids that do not count from 0"


def counted_positions(batch: "MiniBatch") -> torch.Tensor:
    """Positions of all rows, end to end, counted from 0 in each."""
    ids = batch.data["input_ids"]
    return torch.arange(ids.values().numel(), device=ids.device) - torch.repeat_interleave(ids.offsets()[:-1], ids.offsets().diff())


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
