"""Features of verl's FSDP engine that shared prompts do not support."""

from typing import Any

import numpy as np
import torch

from espalier.errors import Error
from espalier.hf import images
from espalier.hf.model_parts import decoder_config
from espalier.hf.rollouts import Rollouts
from espalier.verl import refusals
from espalier.verl.batch import MiniBatch


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


def of_rows(model: torch.nn.Module, batch: MiniBatch) -> str:
    """The reason why images or position ids prevent sharing, or ""."""
    try:
        prepared = Rollouts(batch.rollouts(), decoder_config(model).vocab_size)
        prepared = prepared.with_images(images.of(model, prepared))
    except Error as problem:
        return f"the batch has images: {problem}" if any(batch.images()) else str(problem)
    found, counted = batch.data["position_ids"], refusals.counted_positions(batch)
    if found.dim() == 2:
        return "position ids of one dimension beside images" if prepared.images is not None and prepared.images.by_axes else refusals.of_positions(batch)
    wanted = counted.expand(4, -1)  # axes: text, then time, height and width
    if prepared.images is not None:
        axes = [torch.from_numpy(np.array(prepared.images.positions(i, 0, int(n)))) for i, n in enumerate(batch.lengths)]
        wanted = torch.cat([counted[None], torch.cat(axes, 1).expand(3, -1).to(counted)])
    return "" if torch.equal(found.values().to(counted.dtype), wanted) else "position ids that are not those of get_rope_index"
