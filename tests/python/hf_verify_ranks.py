"""One of two gloo processes: hf_verify_ranks.py FOLDER RANK. phased_step with verify=True under DDP, FSDP2 and FSDP1, both ranks with prompts of
their own. Writes to FOLDER/RANK.json {wrapper: {case: "pass", or the error's kind and place}}."""

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
FOLDER, RANK = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=2, timeout=datetime.timedelta(seconds=60))

import espalier.hf  # noqa: E402
import pytest  # noqa: E402
from espalier.errors import Error  # noqa: E402
from espalier.hf import attention, verification  # noqa: E402
from espalier.rows.trunk import Trunk  # noqa: E402
from hf_models import batch, loss_of, make, shared_step  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402

OWN = [batch(seed=3, groups=((20, (5, 4)), (9, (3,))), stem=0), batch(seed=4, groups=((11, (3, 5, 4)), (14, (4,))), stem=0)]
LONGER = [OWN[0], batch(seed=6, groups=((60, (3, 5)),), stem=0)]  # rank 1's step is of another regime, rank 0's is not


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def fsdp2(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp1(model):
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}), device_id=torch.device("cpu"),
                                    use_orig_params=True)


def a_gradient_one_percent_off(patch):
    own = Trunk.gathered
    patch.setattr(Trunk, "gathered", lambda self: [x if i % 2 == 0 else 1.01 * x for i, x in enumerate(own(self))])


def a_response_that_sees_its_neighbour(patch):
    own = attention.Phase.of_runs

    def wrong(*args):
        phase = own(*args)
        for rows in phase.sets:
            for i, (begin, length, end) in enumerate(rows.runs):
                if end < rows.end:  # the rows of the next run see this one
                    rows.runs[i] = (begin, length, next(run[2] for run in rows.runs if run[0] == end))
                    break
        return phase

    patch.setattr(attention.Phase, "of_runs", wrong)


def a_shard_one_percent_off(patch):
    """The gradients that this rank holds are wrong; under FSDP no other rank holds their part."""
    own = verification._Comparison.compare

    def wrong(self, *args, **kwargs):
        for grad in [p.grad for _, p in self.named if p.grad is not None]:
            getattr(grad, "to_local", lambda: grad)().mul_(1.01)
        return own(self, *args, **kwargs)

    patch.setattr(verification._Comparison, "compare", wrong)


def nothing(patch):
    pass


def result(model, batches, fault=nothing, at=None, verify=True):
    """The step's verdict, or its error; with a fault on rank `at`."""
    with pytest.MonkeyPatch.context() as patch:
        (fault if at == RANK else nothing)(patch)
        try:
            out = shared_step(model, batches[RANK], loss_of(batches[RANK]), wave_tokens=12, verify=verify)
        except Error as found:
            return f"{found.kind}, {found.where}"
    dist.barrier()  # both ranks have passed, or one of them waits here in vain
    return out.verification.verdict if out.verification is not None else "not compared"


def cases(wrap):
    new = lambda: wrap(make("Qwen3", torch.float32, num_hidden_layers=2))
    model, other = new(), new()
    out = {"first": result(model, OWN), "again": result(model, OWN), "longer": result(model, LONGER)}
    for at in (0, 1):
        for fault in (a_gradient_one_percent_off, a_response_that_sees_its_neighbour):
            out[f"{fault.__name__} on {at}"] = result(new(), OWN, fault, at)
    out["a_shard_one_percent_off on 0"] = result(new(), OWN, a_shard_one_percent_off, 0)
    out["before a fault"] = result(other, OWN)
    out["a fault of a longer one on 1"] = result(other, LONGER, a_gradient_one_percent_off, 1)
    model = new()
    espalier.hf.logprobs(model, OWN[RANK])  # FSDP2 leaves whole parameters in the place of shards
    out["a_gradient_one_percent_off behind log-probs on 0"] = result(model, OWN, a_gradient_one_percent_off, 0)
    out["nobody looks"] = result(new(), OWN, a_gradient_one_percent_off, 1, verify=False)
    return out


found = {wrap.__name__: cases(wrap) for wrap in (ddp, fsdp2, fsdp1)}
(FOLDER / f"{RANK}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
