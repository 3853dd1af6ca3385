"""One of two gloo processes that share a model with images: hf_image_ranks.py FOLDER RANK FAMILY... Writes to FOLDER/RANK.json how far gradients
and log-probs are from the dense ones: {family: {wrapper and ranks' batches: {gradient: [largest relative distance, parameter], log_probs}}}."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
FOLDER, RANK = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=2)

import espalier.hf as hf  # noqa: E402
from espalier.errors import Unsupported  # noqa: E402
from hf_models import all_float64, gradients, loss_of, worst  # noqa: E402
from test_hf_images import batch, make, plain_call, plain_step, tool_batch  # noqa: E402


def layers_of(model):
    return [*model.model.visual.blocks, *model.model.language_model.layers]


def fsdp2(model):
    from torch.distributed.fsdp import fully_shard
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)

    def step(run):
        run(model)
        return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}

    return model, step


def fsdp1(inner, **options):
    """As in hf_ranks.py: what a step of SGD with rate 1 takes from the weights is the gradient."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    model = FullyShardedDataParallel(inner, auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers_of(inner)}), device_id=torch.device("cpu"),
                                     **options)

    def weights():
        with FullyShardedDataParallel.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}

    def step(run):
        before = weights()
        run(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        after = weights()
        return {name: before[name] - after[name] for name in before}

    return model, step


def dense(family, batches):
    model = make(family)
    for rollouts in batches:
        plain_step(model, rollouts, loss_of(rollouts))
    return {name: g / len(batches) for name, g in gradients(model).items()}


def main():
    found = {}
    for family in sys.argv[3:]:
        whole, seen = batch(family), tool_batch(family)
        cases = {"images on both": (whole[:5], whole[3:]), "images on one": (whole[:7], whole[7:]), "images in responses": (seen[:4], seen[3:])}
        for name, wrap in {"fsdp2": fsdp2, "fsdp1": fsdp1, "fsdp1 own parameters": lambda m: fsdp1(m, use_orig_params=True)}.items():
            for case, batches in cases.items():
                own = batches[RANK]
                with all_float64():
                    wanted = dense(family, batches)
                    alone = make(family)
                    with torch.no_grad():
                        scores = [plain_call(alone, r).log_softmax(-1).gather(1, torch.tensor(r["response_ids"])[:, None])[:, 0] for r in own]
                    model, step = wrap(make(family))
                    log_probs = hf.logprobs(model, own, wave_tokens=30)
                    gradient = step(lambda model: hf.phased_step(model, own, loss_of(own), wave_tokens=30))
                distance = max(float((a - b).abs().max()) for a, b in zip(log_probs, scores))
                found.setdefault(family, {})[f"{name}, {case}"] = dict(gradient=worst(gradient, wanted), log_probs=distance)
                if name == "fsdp2":
                    try:
                        hf.phased_step(model, own, loss_of(own), schedule="dense")
                        found[family]["dense"] = "runs"
                    except Unsupported as refusal:
                        found[family]["dense"] = str(refusal)
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
