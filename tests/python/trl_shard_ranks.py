"""One of two processes with the variables that torchrun sets, which accelerate finds: trl_shard_ranks.py FOLDER VERSION PART. Exit 0 if TRL's trainers
with shared prompts, whose model FSDP (1 or 2) shards over both ranks, give the gradients of TRL's own trainers under the same FSDP, and both ranks
reach the end. PART: one of PARTS, at the end."""

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

import accelerate.utils.fsdp_utils  # noqa: E402
import pytest  # noqa: E402
import trl  # noqa: E402
import trl_batches as data  # noqa: E402
from datasets import Dataset  # noqa: E402
from espalier.errors import Error, Unsupported  # noqa: E402
from espalier.hf import attention, probe  # noqa: E402
from espalier.trl import batches, rollouts, window  # noqa: E402
from test_trl_batches import KINDS  # noqa: E402
from test_trl_head import all_float64  # noqa: E402
from test_trl_trainer import LEAST_ALLOWED, mixture, run, shared  # noqa: E402
from test_trl_verify import a_response_one_off, a_sequence_without_gradient, positions_one_off, prompts_without_gradient, verifying  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: E402
from trl_sharding import sharding_on_a_cpu  # noqa: E402

RANK, FOLDER, VERSION = int(os.environ["RANK"]), Path(sys.argv[1]), int(sys.argv[2])
ALLOWED = 1e-10  # as in test_trl_head.py
PATIENCE = datetime.timedelta(seconds=60)  # a rank that waits for longer is a failure
example, numbers, notes = data.example, itertools.count(), []


def sharded(**more):
    layers = dict(version=VERSION, transformer_layer_cls_to_wrap=[more.pop("layer", "Qwen3DecoderLayer")], sync_module_states=False, use_orig_params=True)
    return dict(fsdp=True, fsdp_config=layers | more)


def grpo(trainer_class, config=trl.GRPOConfig, **settings):
    settings = sharded(**settings.pop("fsdp_config", {})) | dict(max_completion_length=6, max_steps=2, gradient_checkpointing=False) | settings
    return run(example, trainer_class, config, FOLDER / str(next(numbers)), **settings)


def rloo(trainer_class, **settings):
    return grpo(trainer_class, trl.RLOOConfig, **settings)


def of_batches(kind):
    plain, ours, config, common, _ = KINDS[kind]

    def made(trainer_class, **more):
        settings = sharded(**more.pop("fsdp_config", {})) | common | dict(per_device_train_batch_size=2) | OWN.get(kind, {}) | more
        return data.run(trainer_class, config, settings.pop("dataset"), FOLDER / str(next(numbers)), **settings)

    return plain, ours, made


# TRL's KTO gathers numbers that are float32 on a rank without a label of one kind, and of the model's type elsewhere.
OWN = {"kto": dict(dataset=lambda: data.unpaired(16), per_device_train_batch_size=4, train_sampling_strategy="sequential")}
TRAINERS = {"grpo": (trl.GRPOTrainer, shared.GRPOTrainer, grpo), "rloo": (trl.RLOOTrainer, shared.RLOOTrainer, rloo),
            **{kind: of_batches(kind) for kind in KINDS}}


def wide(make):
    return lambda: make().double()


def in_float64(kind, patch):
    """The models of this kind's trainers in float64."""
    patch.setattr(example, "small_model", wide(example.small_model))
    common = KINDS[kind][3] if kind in KINDS else {}
    return {name: wide(common[name]) for name in ("make", "teacher") if name in common}


def distances_of_parameters(a, b):
    """({name: norm of the difference}, {name: norm of a's}) of two dicts of sharded gradients."""
    assert set(a) == set(b)
    local = lambda x: getattr(x, "to_local", lambda: x)().double()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(a))  # FSDP1 leaves no gradient where a rank has nothing of a parameter
    names = sorted(set().union(*everyone))
    squares = torch.tensor([[float((local(a[n]) - local(b[n])).square().sum()), float(local(a[n]).square().sum())] if n in a else [0., 0.] for n in names],
                           dtype=torch.float64)
    dist.all_reduce(squares)
    return ({n: float(row[0]) ** .5 for n, row in zip(names, squares)}, {n: float(row[1]) ** .5 for n, row in zip(names, squares)})


def distance(plain, other):
    """The largest relative distance of a window's gradient over all ranks, and of a loss on any."""
    assert len(plain.grads) == len(other.grads) == 2 and len(plain.losses) == len(other.losses) >= 2
    norm = lambda x: sum(each * each for each in x.values()) ** .5
    found = []
    for a, b in zip(plain.grads, other.grads):
        errors, norms = distances_of_parameters(a, b)
        assert norm(norms) > 0
        found.append(norm(errors) / norm(norms))
    losses = torch.tensor([max(abs(a - b) / (1 + abs(a)) for a, b in zip(plain.losses, other.losses))], dtype=torch.float64)
    dist.all_reduce(losses, dist.ReduceOp.MAX)
    return max(found), float(losses)


def is_sharded(trainer):
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in trainer.model.parameters())
    whole = torch.tensor(held)
    dist.all_reduce(whole)
    return held < .6 * whole


def nothing(patch):
    pass


def gradients_are_trl_s(kind, shares=(True, True), fault=nothing, trainer_class=None, **more):
    """In float64. `shares`: whether each rank shares rows. `fault` changes Espalier's trainer."""
    plain_class, our_class, made = TRAINERS[kind]
    with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch, all_float64():
        more = in_float64(kind, patch) | more
        plain = made(plain_class, **more)
        fault(patch)
        ours = made(trainer_class or our_class, **more)
        assert is_sharded(ours), kind
        found = distance(plain, ours)
        assert max(found) <= ALLOWED, (kind, more, found)
        assert (ours.shared_rows["run"] < .8 * ours.shared_rows["without_sharing"]) == shares[RANK], (kind, ours.shared_rows)
        return plain, ours


def noted(*words):
    """Exactly one note was logged, with these words."""
    assert len(notes) == 1 and all(word in notes[0] for word in words), notes
    notes.clear()


def within_rounding(kind, **more):
    """In float32 or bfloat16: not further from TRL's trainer in float64 than twice what TRL's own is."""
    plain_class, our_class, made = TRAINERS[kind]
    with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
        plain, ours = made(plain_class, **more), made(our_class, **more)
        found = distance(plain, ours)
        if max(found) > LEAST_ALLOWED:
            exact = dict(bf16=False, gradient_checkpointing=False, fsdp_config=dict(more.get("fsdp_config", {}), activation_checkpointing=False))
            with all_float64():
                truth = made(plain_class, **in_float64(kind, patch) | more | exact)
            off, own = distance(truth, ours), distance(truth, plain)
            assert max(off) <= 2 * max(own), (kind, more, found, off, own)
    assert found[0] > 0 and ours.shared_rows["run"] < .8 * ours.shared_rows["without_sharing"]


# ---- ranks that differ --------------------------------------------------------------------------------------------------

def texts_of_their_own(count=16):
    """Rows that have a beginning in common, two by two with rows that do not: per_device_train_batch_size=2 gives each rank one kind."""
    own = [data.words(40 + i, 1) + data.words(70 + i, 9 + i) for i in range(count)]
    return Dataset.from_dict({"text": [text if i % 4 < 2 else own[i] for i, text in enumerate(data.texts(count)["text"])]})


def no_prompts_at_times(patch):
    """On rank 1 every third batch of rollouts cannot be shared."""
    own, calls = rollouts._Rows.__init__, itertools.count()

    def made(self, *args):
        own(self, *args)
        self.can_share &= next(calls) % 3 != 0

    if RANK == 1:
        patch.setattr(rollouts._Rows, "__init__", made)


def refused_in_a_layer(patch):
    """Rank 1 finds in the midst of its second shared pass that a layer cannot be shared."""
    own, calls = attention._phase_attention, itertools.count()

    def refused(module, *args):
        if module.layer_idx == 0 and not probe.running() and next(calls) >= 2:
            raise Unsupported("attention layer 0", "a fault", "one")
        return own(module, *args)

    if RANK == 1:
        patch.setattr(attention, "_phase_attention", refused)


def refused_after_a_call(patch):
    def refused(*args):
        raise Unsupported("a layer", "a fault", "one")

    if RANK == 1:
        patch.setattr(batches, "check_captured", refused)
        patch.setattr(window, "check_captured", refused)


def ranks_differ():
    gradients_are_trl_s("sft", (True, False), dataset=texts_of_their_own, train_sampling_strategy="sequential")
    gradients_are_trl_s("grpo", fault=no_prompts_at_times, beta=.04)
    assert not notes, notes
    for kind in ("grpo", "sft", "dpo"):
        for fault in (refused_in_a_layer, refused_after_a_call):
            plain_class, our_class, made = TRAINERS[kind]
            with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch, all_float64():
                more = in_float64(kind, patch)
                plain = made(plain_class, **more)
                fault(patch)
                ours = made(our_class, **more)
                found = distance(plain, ours)
            assert max(found) <= ALLOWED, (kind, fault, found)
            assert ours._refused and len(notes) == 1 and ("rank 1: " in notes[0]) == (RANK == 0), (kind, fault, notes)
            notes.clear()


# ---- options, verify, evaluation, saving --------------------------------------------------------------------------------

def with_adapters(kind):
    import peft
    plain = example.small_model

    def make():
        return peft.get_peft_model(plain().double(), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "small_model", make)
        patch.setattr(sys.modules[__name__], "wide", lambda make: make)
        gradients_are_trl_s(kind, **dict(reference=False) if kind == "dpo" else {})


def rollouts_options():
    for more in (dict(beta=.04, num_iterations=2), dict(steps_per_generation=4, num_generations=8), dict(gradient_accumulation_steps=1)):
        gradients_are_trl_s("grpo", **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "small_model", mixture)
        within_rounding("grpo", router_aux_loss_coef=3.0, fsdp_config=dict(layer="Qwen3MoeDecoderLayer"))


def adapters():
    for kind in ("grpo", "sft", "dpo"):
        with_adapters(kind)


def mixed_precision():
    for kind in ("grpo", "sft", "dpo"):
        within_rounding(kind, bf16=True)


def checkpointing():
    """accelerate's own around layers, and transformers' inside of them."""
    for kind in ("grpo", "sft"):
        within_rounding(kind, fsdp_config=dict(activation_checkpointing=True))
        within_rounding(kind, gradient_checkpointing=True)


def every_trainer():
    for kind in TRAINERS:
        gradients_are_trl_s(kind)


def saved(trainer):
    """What a checkpoint holds. On a CPU, torch's FSDP1 frees the weights before they are copied (a crash of TRL's own trainer): there, the weights."""
    if VERSION == 2:
        return trainer.accelerator.get_state_dict(trainer.model)
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def evaluated_and_saved(kind):
    """Evaluation gives TRL's numbers, and what is saved is whole and TRL's."""
    plain_class, our_class, made = TRAINERS[kind]
    numbers, weights = [], []
    with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch, all_float64():
        more = in_float64(kind, patch)
        for trainer_class in (plain_class, our_class):
            trainer = made(trainer_class, fsdp_config=dict(state_dict_type="FULL_STATE_DICT"), **more)
            trained = dict(trainer.shared_rows) if trainer_class is our_class else None
            torch.manual_seed(5)
            numbers.append({name: value for name, value in trainer.evaluate(trainer.train_dataset).items() if name.startswith("eval_")})
            weights.append(saved(trainer))
    for name, value in numbers[0].items():
        if not any(word in name for word in ("runtime", "per_second")):
            assert abs(value - numbers[1][name]) <= ALLOWED * (1 + abs(value)), (kind, name, value, numbers[1][name])
    assert trainer.shared_rows["run"] > trained["run"]
    assert weights[0].keys() == weights[1].keys() and (RANK or weights[0])
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=ALLOWED)


def evaluation_and_saving():
    for kind in ("grpo", "sft", "dpo"):
        evaluated_and_saved(kind)


# ---- verify=True --------------------------------------------------------------------------------------------------------

def verified(kind, models):
    """Comparing changes nothing, and every pass of `models` models is compared once, on both ranks. In float32."""
    plain_class, our_class, made = TRAINERS[kind]
    with sharding_on_a_cpu():
        without, ours = made(our_class), made(verifying(our_class))
        assert ours.verification.verdict == "pass" and len(ours._verified_by_all) == models, (kind, ours._verified_by_all)
        found = distance(without, ours)
    assert max(found) <= LEAST_ALLOWED and ours.shared_rows["run"] < .9 * ours.shared_rows["without_sharing"], (kind, found, ours.shared_rows)


def fails_on_both(kind, fault, at):
    """A fault on one rank alone is an error on both, with the same verdict."""
    _, our_class, made = TRAINERS[kind]
    with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch, pytest.raises(Error) as wrong:
        (fault if RANK == at else nothing)(patch)
        made(verifying(our_class))
    assert wrong.value.kind == "verification" and wrong.value.exit_code == 6
    both = [None, None]
    dist.all_gather_object(both, (wrong.value.where, wrong.value.expected))
    assert both[0] == both[1]


def without_sharing_at_first(patch):
    own, calls = batches.Tree.of, itertools.count()
    patch.setattr(batches.Tree, "of", lambda *args: own(*args) if next(calls) else None)


def verify_true():
    for kind, models in dict(grpo=1, sft=1, dpo=2, reward=1, distillation=2).items():
        verified(kind, models)
    for number, (kind, fault) in enumerate([("grpo", prompts_without_gradient), ("grpo", a_response_one_off), ("sft", positions_one_off),
                                            ("sft", a_sequence_without_gradient)]):
        fails_on_both(kind, fault, number % 2)
    with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch:  # rank 1 has nothing to compare in the first pass, rank 0 has
        (without_sharing_at_first if RANK else nothing)(patch)
        _, our_class, made = TRAINERS["sft"]
        assert made(verifying(our_class)).verification.verdict == "pass"
    notes.clear()  # rank 1's, of that batch
    _, our_class, made = TRAINERS["sft"]
    with sharding_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
        refused_after_a_call(patch)
        trainer = made(verifying(our_class))
    assert trainer.verification is None and trainer.shared_rows["run"] == 0
    noted("a fault")


def lone_head():
    """accelerate makes the head a unit of its own, as in vision-language models; TRL's own trainer has it in one with the last norm."""
    def alone(patch):
        patch.setattr(accelerate.utils.fsdp_utils, "_find_final_norm", lambda model: None)

    for kind in TRAINERS:
        gradients_are_trl_s(kind, fault=alone)


def main():
    logging.getLogger("espalier").addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: notes.append(record.getMessage())})())
    dist.init_process_group("gloo", timeout=PATIENCE)
    PARTS[sys.argv[3]]()
    assert not notes, notes


PARTS = {part.__name__: part for part in (every_trainer, ranks_differ, rollouts_options, adapters, mixed_precision, checkpointing, evaluation_and_saving,
                                          verify_true, lone_head)}

if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's end, where a thread of FSDP1's or gloo's that still runs ends the process by SIGABRT
