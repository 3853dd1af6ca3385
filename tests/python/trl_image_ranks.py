"""One of two processes with the variables that torchrun sets, which accelerate finds: trl_image_ranks.py FOLDER VERSION FAMILY. Exit 0 if TRL's GRPOTrainer
with shared prompts, on batches with images and a model that FSDP (1 or 2) shards over both ranks, gives the gradients of TRL's own trainer under the same
FSDP, in float64."""

import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)

import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from espalier import trl as shared  # noqa: E402
from espalier.errors import Unsupported  # noqa: E402
from espalier.hf import ranks  # noqa: E402
from espalier.trl import rollouts as ours_of_rollouts  # noqa: E402
from hf_models import all_float64  # noqa: E402
from test_hf_images import batch, make, tool_batch  # noqa: E402
from test_trl_images import micro_batch, trainer_of, window  # noqa: E402
from test_trl_trainer import load_example  # noqa: E402
from test_trl_verify import verifying  # noqa: E402
from trl_recording import recorded  # noqa: E402
from trl_shard_ranks import PATIENCE, distances_of_parameters, is_sharded, sharded  # noqa: E402
from trl_sharding import sharding_on_a_cpu  # noqa: E402

RANK, FOLDER, VERSION, FAMILY = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ALLOWED = 1e-10  # as in test_trl_images.py
# TRL's head sums its weight's gradient in float32, here over less than 128 rows of both ranks. Behind an update, everything has a part of that: losses,
# whose gradient's norm is below 20, move by less, because the update is .05 of a gradient that is clipped to the norm 1.
OF_HEAD = 128 ** .5 * torch.finfo(torch.float32).eps / 2
DECODER, BLOCKS = f"{FAMILY}{'TextD' if FAMILY == 'Qwen3VL' else 'D'}ecoderLayer", f"{FAMILY}VisionBlock"
# Rollouts (their places in `batch`) of each rank's two micro-batches in each of two windows, as many on both ranks. 7 and 8 have no images.
WITH_IMAGES = [[[[0, 3, 5, 1], [4, 2, 6, 7]], [[7, 8, 0, 1], [3, 4, 3]]],
               [[[0, 1, 2, 8], [5, 7, 8, 6]], [[3, 5, 6, 5], [4, 6, 4]]]]
ONE_WITHOUT = [[[[0, 3, 5, 1], [7, 8]], [[7, 8, 7], [3, 4]]],
               [[[8, 7, 8, 7], [5, 6]], [[3, 5, 6], [4, 4]]]]
AGAIN = [[[[0, 3, 5, 1], [0, 2, 4]], [[3, 4], [4, 3]]], [[[0, 1, 2, 8], [8, 2, 0]], [[5, 6], [6, 5]]]]  # no new prompt in second micro-batches
IN_RESPONSES = [[[[0, 3, 5], [4, 1]], [[5, 7], [2, 6]]], [[[0, 1, 2], [5, 7]], [[3, 5], [6, 4]]]]  # of `tool_batch`, where 4 and 7 have none there
notes, number = [], iter(range(100))


class Gathered(trl.GRPOTrainer):
    """TRL's own, with the head's gradient averaged over ranks (ranks.gather_head)."""

    def training_step(self, model, *args, **kwargs):
        ranks.gather_head(model)
        return super().training_step(model, *args, **kwargs)


def run(trainer_class, places, wrapped):
    """A trainer whose micro-batches are given, after two windows."""
    drawn = tool_batch(FAMILY) if places is IN_RESPONSES else batch(FAMILY)
    given = iter([micro_batch(FAMILY, [drawn[i] for i in part], seed) for seed, part in enumerate(sum(places[RANK], []))])

    class Given(recorded(trainer_class)):

        def _prepare_inputs(self, inputs):
            return next(given)

    example = load_example()
    config = trl.GRPOConfig(**dict(output_dir=str(FOLDER / f"{RANK}_{next(number)}"), use_cpu=True, bf16=False, report_to=[], save_strategy="no", seed=7,
                                   per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2, max_completion_length=12,
                                   loss_type="grpo", max_steps=2, learning_rate=.05, optim="sgd", lr_scheduler_type="constant", disable_tqdm=True,
                                   gradient_checkpointing=False, dataloader_pin_memory=False), **sharded(layer=wrapped[0]))
    config.fsdp_config["transformer_layer_cls_to_wrap"] = list(wrapped)
    trainer = Given(model=make(FAMILY), reward_funcs=example.reward, args=config, processing_class=example.tokenizer(),
                    train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * 32}))
    trainer.train()
    return trainer


def check(wanted, found, updated=False):
    """`updated`: the weights are those after an update."""
    errors, norms = distances_of_parameters(wanted, found)
    whole = sum(x * x for x in norms.values()) ** .5
    assert any("visual" in n and x > 1e-12 * whole for n, x in norms.items())
    for name, error in errors.items():
        allowed = OF_HEAD if updated or name.endswith(("lm_head.weight", "embed_tokens.weight")) else ALLOWED
        assert error <= allowed * max(norms[name], 1e-2 * whole), (name, error, norms[name], whole)


def compare(places, wrapped, shares=True, trainer_class=shared.GRPOTrainer):
    with sharding_on_a_cpu(), all_float64():
        plain, ours = run(Gathered, places, wrapped), run(trainer_class, places, wrapped)
    assert is_sharded(ours) and len(plain.losses) == len(ours.losses) == 4
    for number, (a, b) in enumerate(zip(plain.losses, ours.losses)):
        assert abs(a - b) <= (ALLOWED if number < 2 else OF_HEAD) * (1 + abs(a)), (plain.losses, ours.losses)
    assert (ours.shared_rows["run"] < .9 * ours.shared_rows["without_sharing"]) == shares, ours.shared_rows
    for number, (wanted, found) in enumerate(zip(plain.grads, ours.grads, strict=True)):
        check(wanted, found, updated=number > 0)
    return ours


def mean_over_ranks(places):
    """The gradients of the first window by TRL's own trainer in one process, the mean of both ranks' micro-batches."""
    drawn, out = batch(FAMILY), {}
    for parts in (of_rank[0] for of_rank in places):
        with all_float64():
            trainer = trainer_of(trl.GRPOTrainer, FAMILY, FOLDER / f"{RANK}_alone")
            _, found = window(trainer, [micro_batch(FAMILY, [drawn[i] for i in part], seed) for seed, part in enumerate(parts)])
        out = {name: out.get(name, 0) + g / len(places) for name, g in found.items()}
    return out


def refused_at_first(*_):
    raise Unsupported("images", "a fault", "one")


def main():
    logging.getLogger("espalier").addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: notes.append(record.getMessage())})())
    dist.init_process_group("gloo", timeout=PATIENCE)
    ours = compare(WITH_IMAGES, (DECODER, BLOCKS))
    if VERSION == 2:  # whole gradients, which FSDP1's flat shards do not give
        check(mean_over_ranks(WITH_IMAGES), {name: g.full_tensor() for name, g in ours.grads[0].items()})
    compare(ONE_WITHOUT, (DECODER,))
    compare(AGAIN, (DECODER,))
    compare(IN_RESPONSES, (DECODER, BLOCKS))
    assert not notes, notes
    ours = compare(WITH_IMAGES, (DECODER,), trainer_class=verifying(shared.GRPOTrainer))
    assert ours.verification.verdict == "pass" and not notes, notes
    own = ours_of_rollouts.images.of
    if RANK == 1:  # one rank cannot share its batch, so both run TRL's own path
        ours_of_rollouts.images.of = refused_at_first
    compare(WITH_IMAGES, (DECODER, BLOCKS), shares=False)
    ours_of_rollouts.images.of = own
    assert len(notes) == (RANK == 1) and all("a fault" in note for note in notes), notes
    notes.clear()
    compared = ours_of_rollouts.check_images
    if RANK == 1:  # one rank finds that its first images cannot be shared
        ours_of_rollouts.check_images = lambda *args: compared(*args) or refused_at_first()
    compare(WITH_IMAGES, (DECODER, BLOCKS), shares=False)
    assert len(notes) == 1 and "a fault" in notes[0], notes


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in trl_shard_ranks.py
