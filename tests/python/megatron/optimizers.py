"""Steps of Megatron's DDP and optimizers: how far the weights of a model move."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from models import global_name


def wrapped(chunks, kind):
    """(chunks in DDP, their optimizer). `kind`: "plain", "overlap" of the reduction, "distributed" optimizer, or "both". Buckets are small, so that
    there are several."""
    config = chunks[0].config
    distributed, overlap = kind in ("distributed", "both"), kind in ("overlap", "both")
    ddp = [DistributedDataParallel(config, DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, use_distributed_optimizer=distributed, overlap_param_gather=kind == "both", bucket_size=2000 if overlap else None),
        chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    one = lambda functions: functions[0] if len(functions) == 1 else functions
    if overlap:
        config.no_sync_func = one([chunk.no_sync for chunk in ddp])
        if config.pipeline_model_parallel_size > 1:
            config.grad_sync_func = one([chunk.start_grad_sync for chunk in ddp])
    # Without moments a step is g / (|g| + 1), which follows the gradient's size.
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", adam_eps=1.0, adam_beta1=0.0, adam_beta2=0.0, lr=1.0, clip_grad=0.0, use_distributed_optimizer=distributed,
        overlap_param_gather=kind == "both", weight_decay=0.0, params_dtype=torch.float64), ddp)
    return ddp, optimizer


def moves(chunks, kind, steps):
    """The change of the weights by one optimizer step behind each of `steps`, functions of the wrapped chunks. Every step starts from the same weights."""
    ddp, optimizer = wrapped(chunks, kind)
    weights = {global_name(chunk, name): p for chunk in chunks for name, p in chunk.named_parameters()}
    out = []
    for step in steps:
        before = {name: p.detach().clone() for name, p in weights.items()}
        for chunk in ddp:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        step(ddp)
        optimizer.step()
        if kind == "both":
            for chunk in ddp:
                chunk.start_param_sync(force_sync=True)
        out.append({name: before[name] - p.detach() for name, p in weights.items()})
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(before[name])
        optimizer.reload_model_params()
    return out
