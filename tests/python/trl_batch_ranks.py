"""One of two processes with the variables that torchrun sets, which accelerate finds: trl_batch_ranks.py FOLDER. Exit 0 where gradients of DPO,
reward and SFT trainers under DDP are the plain trainer's, the same on both ranks, and each rank ran the unique rows of its own batches."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)

from test_trl_batches import KINDS, compare, in_float64, settings_of  # noqa: E402
from trl_ranks import agreed, same_on_both  # noqa: E402


def main():
    notes = []
    logging.getLogger("espalier").addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: notes.append(record.getMessage())})())
    for kind in ("dpo", "reward", "sft"):
        plain_class, our_class, made = settings_of(kind, next(iter(KINDS[kind][-1])))
        folder, small = Path(sys.argv[1]) / kind, dict(per_device_train_batch_size=2)
        plain, ours = made(plain_class, folder / "plain", **small), made(our_class, folder / "ours", **small)
        assert dist.get_world_size() == 2 and ours.accelerator.num_processes == 2
        compare(plain, ours, lambda: made(plain_class, folder / "exact", **in_float64(kind, **small)), agreed)
        same_on_both(ours)
        assert ours.counts["run"] == ours.counts["unique"] < ours.counts["all"], (kind, ours.counts)
    assert not notes, notes


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
