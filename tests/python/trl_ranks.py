"""One of two processes with the variables that torchrun sets, which accelerate finds: trl_ranks.py FOLDER. Exit 0 where every rank's
gradients of three accumulation windows are the plain trainer's under DDP, and the same on both."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)

import trl  # noqa: E402
from test_trl_trainer import compare, load_example, run, shared  # noqa: E402

CASES = {
    "dapo": {},
    "grpo, beta, two iterations": dict(loss_type="grpo", beta=.04, num_iterations=2),
    "bnpo, shuffled over windows": dict(loss_type="bnpo", steps_per_generation=4),
    "sequence level": dict(importance_sampling_level="sequence", loss_type="grpo", num_iterations=2),
    "groups cut by ranks": dict(num_generations=8, loss_type="dr_grpo"),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    **{kind: dict(loss_type=kind) for kind in ("sapo", "luspo", "vespo")},
    "rloo": None,
}


def agreed(wanted):
    anywhere = torch.tensor([wanted], dtype=torch.int32)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    return bool(anywhere)


def same_on_both(trainer):
    for grads in trainer.grads:
        for name, own in grads.items():
            first = own.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, own), name


def main():
    notes = []
    logging.getLogger("espalier").addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: notes.append(record.getMessage())})())
    example, folder = load_example(), Path(sys.argv[1])
    for number, (case, settings) in enumerate(CASES.items()):
        plain, ours, config = (trl.GRPOTrainer, shared.GRPOTrainer, trl.GRPOConfig) if settings is not None else (
            trl.RLOOTrainer, shared.RLOOTrainer, trl.RLOOConfig)
        one = lambda name, trainer_class, attention=None: run(example, trainer_class, config, folder / f"{number}-{name}", attention=attention,
                                                              max_completion_length=6, **settings or {})
        ranks = one("plain", plain), one("ours", ours)
        assert dist.get_world_size() == 2 and ranks[1].accelerator.num_processes == 2
        compare(*ranks, lambda: one("eager", plain, "eager"), agreed)
        same_on_both(ranks[1])
    assert not notes, notes


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
