"""One of two gloo processes: hf_ranks.py ddp|fsdp2 STORE RANK. Exit 0 where the gradients are the mean of both ranks' dense ones."""

import sys

import torch
import torch.distributed as dist

torch.set_num_threads(1)
kind, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

import espalier.hf as hf  # noqa: E402
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, worst  # noqa: E402

BATCHES = [batch(seed=3), batch(seed=4, groups=((40, (6, 2)), (12, (5,)), (33, (9, 9, 9))), stem=0)]
LOSSES = [loss_of(rollouts) for rollouts in BATCHES]


def dense(which):
    model = make("Qwen3")
    for r in which:
        dense_step(model, BATCHES[r], LOSSES[r])
    return gradients(model)


def full(model):
    found = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def close(found, wanted, what):
    error, name = worst(found, wanted)
    assert error <= 1e-10, f"{what}: {name} {error:.1e}"


def ddp(mean, own):
    model = make("Qwen3")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for wave_tokens, trunk_state in ((16, "keep"), (4096, "keep"), (30, "recompute")):
        hf.phased_step(wrapped, BATCHES[rank], LOSSES[rank], wave_tokens=wave_tokens, trunk_state=trunk_state)
        close(gradients(model), mean, f"ddp {wave_tokens} {trunk_state}")
    with wrapped.no_sync():
        hf.phased_step(wrapped, BATCHES[rank], LOSSES[rank])
    close(gradients(model), own, "ddp no_sync")


def fsdp2(mean, own):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for reshard in (True, False):
        model = make("Qwen3")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        for wave_tokens, trunk_state in ((16, "keep"), (4096, "keep"), (30, "recompute")):
            hf.phased_step(model, BATCHES[rank], LOSSES[rank], wave_tokens=wave_tokens, trunk_state=trunk_state)
            close(full(model), mean, f"fsdp2 {wave_tokens} {trunk_state} reshard {reshard}")
        values = hf.logprobs(model, BATCHES[rank], wave_tokens=16)
        assert [len(v) for v in values] == [len(r["response_ids"]) for r in BATCHES[rank]]


with all_float64():
    both, own = dense((0, 1)), dense((rank,))
    {"ddp": ddp, "fsdp2": fsdp2}[kind]({name: g / 2 for name, g in both.items()}, own)
dist.barrier()
dist.destroy_process_group()
