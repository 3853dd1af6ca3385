"""One of two gloo processes: hf_ranks.py FOLDER RANK all|brief|beside FAMILY... Writes to FOLDER/RANK.json how far gradients are from
the mean of both ranks' dense ones: {family: {kind: {case: largest relative distance of a parameter}}}. brief: two cases of each kind.
beside: one of three processes. The third is outside the device mesh, does something else and calls nothing."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
FOLDER, RANK = Path(sys.argv[1]), int(sys.argv[2])
BESIDE = sys.argv[3] == "beside"
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=3 if BESIDE else 2)

import espalier.hf as hf  # noqa: E402
from hf_layers import RECURRENT, make as make_layers  # noqa: E402
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make as make_model, shared_step, worst  # noqa: E402

BATCHES = [batch(seed=3), batch(seed=4, groups=((40, (6, 2)), (12, (5,)), (33, (9, 9, 9))), stem=0)]
LOSSES = [loss_of(rollouts) for rollouts in BATCHES]
BRIEF = sys.argv[3] != "all"
CUTS = ((16, "keep"), (30, "recompute")) if BRIEF else ((16, "keep"), (4096, "keep"), (30, "recompute"))


def make(family):
    return make_layers(family) if family in RECURRENT else make_model(family, num_hidden_layers=2)


def dense(family, which):
    model = make(family)
    for r in which:
        dense_step(model, BATCHES[r], LOSSES[r])
    return gradients(model)


def step(model, **how):
    return shared_step(model, BATCHES[RANK], LOSSES[RANK], **how)


def ddp(family, mean, own):
    model = make(family)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    out = {}
    for wave_tokens, trunk_state in CUTS:
        step(wrapped, wave_tokens=wave_tokens, trunk_state=trunk_state)
        out[f"{wave_tokens} {trunk_state}"] = worst(gradients(model), mean)[0]
    if BRIEF:
        return out
    hf.phased_step(wrapped, BATCHES[RANK], LOSSES[RANK], schedule="dense" if RANK else "shared")
    out["dense on one rank"] = worst(gradients(model), mean)[0]
    with wrapped.no_sync():
        step(wrapped)
    out["no_sync"] = worst(gradients(model), own)[0]
    return out


def two_ranks():
    from torch.distributed.device_mesh import DeviceMesh
    return DeviceMesh("cpu", [0, 1])


def fsdp2(family, mean, _):
    from torch.distributed.fsdp import fully_shard
    mesh, out = two_ranks(), {}

    def full():
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return found

    for reshard in (True, False):
        model = make(family)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        for wave_tokens, trunk_state in CUTS:
            step(model, wave_tokens=wave_tokens, trunk_state=trunk_state)
            out[f"{wave_tokens} {trunk_state} {reshard}"] = worst(full(), mean)[0]
        if BRIEF:
            return out
        hf.phased_step(model, BATCHES[RANK], LOSSES[RANK], schedule="dense" if RANK else "shared")
        out[f"dense on one rank {reshard}"] = worst(full(), mean)[0]
        values = hf.logprobs(model, BATCHES[RANK], wave_tokens=16)
        assert [len(v) for v in values] == [len(r["response_ids"]) for r in BATCHES[RANK]]
    return out


def fsdp1(family, mean, _):
    """FSDP1 keeps gradients in flat shards: what a step of SGD with rate 1 takes from the gathered weights is the whole gradient. The
    difference of two weights near 1 loses 1e-16 of them, 1e-13 of a gradient here."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    out = {}

    def weights(model):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}

    def run(case, how, strategy=ShardingStrategy.FULL_SHARD, run_step=step, **options):
        inner = make(family)
        model = FullyShardedDataParallel(inner, auto_wrap_policy=ModuleWrapPolicy({type(inner.model.layers[0])}), device_id=torch.device("cpu"),
                                         sharding_strategy=strategy, **options)
        before = weights(model)
        run_step(model, **how)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        after = weights(model)
        out[case] = worst({name: before[name] - after[name] for name in before}, mean)[0]
        return model

    def two_steps(model, **how):
        """Gradients add up over calls: each gives a half."""
        for _ in range(2):
            shared_step(model, BATCHES[RANK], lambda wave: LOSSES[RANK](wave) / 2, **how)

    for wave_tokens, trunk_state in CUTS:
        run(f"{wave_tokens} {trunk_state}", dict(wave_tokens=wave_tokens, trunk_state=trunk_state))
    if BRIEF:
        return out
    run("no gathering before the backward", dict(wave_tokens=16), ShardingStrategy.SHARD_GRAD_OP)
    run("not sharded", dict(wave_tokens=16), ShardingStrategy.NO_SHARD)
    run("added up", dict(wave_tokens=16), run_step=two_steps)
    run("added up, parameters of their own", dict(wave_tokens=16), run_step=two_steps, use_orig_params=True)
    run("verified", dict(wave_tokens=16, verify=True))
    model = run("verified, parameters of their own", dict(wave_tokens=16, verify=True), use_orig_params=True)
    run("dense on one rank", {}, run_step=lambda m: hf.phased_step(m, BATCHES[RANK], LOSSES[RANK], schedule="dense" if RANK else "shared"))
    values = hf.logprobs(model, BATCHES[RANK], wave_tokens=16)
    assert [len(v) for v in values] == [len(r["response_ids"]) for r in BATCHES[RANK]]
    return out


def main():
    found = {}
    if RANK == 2:
        two_ranks()  # every process of the world makes a group; only its members call it later
    for family in sys.argv[4:] if RANK < 2 else ():
        with all_float64():
            both, own = dense(family, (0, 1)), dense(family, (RANK,))
            mean = {name: g / 2 for name, g in both.items()}
            found[family] = {kind.__name__: kind(family, mean, own) for kind in ((fsdp2,) if BESIDE else (ddp, fsdp2, fsdp1))}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


main()
