"""One of two processes with the variables that torchrun sets, which accelerate finds: trl_verify_ranks.py FOLDER. Exit 0 if `verify=True` of TRL's
trainers does under DDP what docs/python.md says, on both ranks. FSDP: trl_shard_ranks.py."""

import datetime
import itertools
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)

import pytest  # noqa: E402
import trl  # noqa: E402
from espalier.errors import Error, Unsupported  # noqa: E402
from espalier.trl import batches, window  # noqa: E402
from test_trl_trainer import compare, load_example, run, shared  # noqa: E402
from test_trl_verify import a_response_one_off, a_sequence_without_gradient, positions_one_off, prompts_without_gradient, started, verifying  # noqa: E402
from trl_ranks import agreed, same_on_both  # noqa: E402

RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[1])
example, numbers, notes = load_example(), itertools.count(), []
PATIENCE = datetime.timedelta(seconds=60)  # a rank that waits for longer is a failure


def grpo(trainer_class, **settings):
    settings = dict(max_completion_length=6, max_steps=2, num_generations=8, beta=.04) | settings  # a group has rows on both ranks
    return run(example, trainer_class, trl.GRPOConfig, FOLDER / str(next(numbers)), **settings)


def batch_trainer(kind):
    """(TRL's class, Espalier's class, a function that trains one for two steps)."""
    plain, ours, made = started(kind)
    return plain, ours, lambda trainer_class, **more: made(trainer_class, FOLDER / str(next(numbers)), **dict(per_device_train_batch_size=2) | more)


TRAINERS = {"grpo": (trl.GRPOTrainer, shared.GRPOTrainer, grpo), "sft": batch_trainer("sft"), "dpo": batch_trainer("dpo")}


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(p, others[name]) for name, p in some.items())


def agrees(kind):
    """Gradients are TRL's within rounding, and those without verify bit by bit."""
    plain_class, our_class, made = TRAINERS[kind]
    without, ours = made(our_class), made(verifying(our_class))
    assert type(ours.model_wrapped).__name__ == "DistributedDataParallel"
    assert same(weights(without), weights(ours)) and ours.verification.verdict == "pass" and ours.shared_rows == without.shared_rows
    assert ours.asked and len(ours._verified) == len(ours._verified_by_all) == 2, ours._verified  # the policy and the reference
    same_on_both(ours)
    if kind == "grpo":  # trl_batch_ranks.py does the same for the others
        compare(made(plain_class), ours, lambda: made(plain_class, attention="eager"), agreed)


def a_gradient_one_percent_off(patch):
    own = window.Prompt.gathered
    patch.setattr(window.Prompt, "gathered", lambda self: [x if i % 2 == 0 else 1.01 * x for i, x in enumerate(own(self))])


def nothing_shared_at_first(patch):
    own, calls = batches.Tree.of, itertools.count()
    patch.setattr(batches.Tree, "of", lambda *args: own(*args) if next(calls) else None)


def nothing(patch):
    pass


FAULTS = [("grpo", a_gradient_one_percent_off), ("grpo", prompts_without_gradient), ("grpo", a_response_one_off), ("sft", positions_one_off),
          ("sft", a_sequence_without_gradient)]


def fails_on_both(kind, fault, at, other=nothing):
    """A fault on rank `at` alone is raised on both, at the same pass: their next collective is the same one."""
    _, our_class, made = TRAINERS[kind]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Error) as wrong:
        (fault if RANK == at else other)(patch)
        made(verifying(our_class))
    assert wrong.value.kind == "verification" and wrong.value.exit_code == 6
    assert RANK == at or wrong.value.where == f"rank {at}", wrong.value
    dist.barrier()


def a_rank_may_compare_later():
    """Rank 1 runs TRL's own path in its first pass, and compares in its next window."""
    _, our_class, made = TRAINERS["sft"]
    with pytest.MonkeyPatch.context() as patch:
        (nothing_shared_at_first if RANK else nothing)(patch)
        trainer = made(verifying(our_class))
    assert trainer.verification.verdict == "pass" and len(trainer._verified_by_all) == 1
    same_on_both(trainer)
    notes.clear()  # rank 1's, of a batch that is not shared
    dist.barrier()


def found_not_to_share(patch):
    def refused(*args):
        raise Unsupported("a layer", "one that sees the batch's tree", "one that does not")
    patch.setattr(batches, "_run", refused)


def a_rank_may_find_that_it_cannot_share(kind):
    """Rank 1 runs TRL's own path instead, in the same pass, and rank 0 compares only later. Ranks exchange results once a pass: their next collective
    is the same one."""
    _, our_class, made = TRAINERS[kind]
    with pytest.MonkeyPatch.context() as patch:
        (found_not_to_share if RANK else nothing_shared_at_first)(patch)
        trainer = made(verifying(our_class))
    assert trainer.shared_rows["run"] == 0 if RANK else trainer.verification.verdict == "pass"
    same_on_both(trainer)
    assert len(notes) == 1, notes
    notes.clear()
    dist.barrier()


def main():
    logging.getLogger("espalier").addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: notes.append(record.getMessage())})())
    dist.init_process_group("gloo", timeout=PATIENCE)
    for kind in ("grpo", "dpo"):
        agrees(kind)
    assert not notes, notes
    for number, (kind, fault) in enumerate(FAULTS):
        fails_on_both(kind, fault, number % 2)
    a_rank_may_compare_later()
    a_rank_may_find_that_it_cannot_share("sft")
    fails_on_both("sft", positions_one_off, 0, nothing_shared_at_first)


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
