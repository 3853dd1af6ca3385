"""TRL's trainers whose model is sharded: FSDP2 and FSDP1 on two processes share, DeepSpeed's engine and accelerate's other layouts run TRL's own path
with a reason that names them."""

import logging
import types

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

import trl_batches as data  # noqa: E402
from rank_processes import run_under_accelerate  # noqa: E402
from test_trl_batches import settings_of  # noqa: E402
from test_trl_trainer import run  # noqa: E402
from test_trl_tree import Holder, batch  # noqa: E402
from test_trl_verify import verifying  # noqa: E402


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("part", ["every_trainer", "ranks_differ", "verify_true", "evaluation_and_saving"])
def test_fsdp(version, part, tmp_path):
    run_under_accelerate(tmp_path, "trl_shard_ranks.py", version, part)


@pytest.mark.rounding
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("part", ["rollouts_options", "adapters", "mixed_precision", "checkpointing"])
def test_options_under_fsdp(version, part, tmp_path):
    run_under_accelerate(tmp_path, "trl_shard_ranks.py", version, part)


def test_a_head_that_is_a_unit_of_its_own_has_the_mean_gradient(tmp_path):
    """FSDP2, where TRL's own trainer leaves each rank its own loss's gradient."""
    run_under_accelerate(tmp_path, "trl_shard_ranks.py", 2, "lone_head")


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_images_under_fsdp(version, family, tmp_path):
    run_under_accelerate(tmp_path, "trl_image_ranks.py", version, family)


def reasons(caplog):
    return [record.message for record in caplog.records if "not shared" in record.message]


def partitioned(make):
    """A model whose parameters are marked as those that ZeRO-3 divides."""
    def made():
        model = make()
        for number, p in enumerate(model.parameters()):
            p.ds_id = number
        return model

    return made


@pytest.mark.parametrize("kind", ["grpo", "sft", "reward"])
def test_zero_3_runs_trl_s_own_path_with_one_reason(kind, tmp_path, caplog, monkeypatch):
    """No weight differs, no call of the model is added, and nothing is compared."""
    monkeypatch.setattr(data.example, "small_model", partitioned(data.example.small_model))
    more = dict(make=partitioned(data.scorer)) if kind == "reward" else {}
    if kind == "grpo":
        plain_class, our_class = trl.GRPOTrainer, shared.GRPOTrainer
        made = lambda trainer_class, folder: run(data.example, trainer_class, trl.GRPOConfig, folder, max_completion_length=6, max_steps=1)
    else:
        plain_class, our_class, made = settings_of(kind, "nll" if kind == "sft" else "pairs")
    with caplog.at_level(logging.WARNING, "espalier"):
        plain, ours = made(plain_class, tmp_path / "plain", **more), made(verifying(our_class), tmp_path / "ours", **more)
    assert plain.losses == ours.losses and all(torch.equal(a[n], b[n]) for a, b in zip(plain.grads, ours.grads) for n in a)
    assert ours.shared_rows["run"] == 0 and ours.verification is None
    reason, = reasons(caplog)
    assert "DeepSpeed" in reason and "TRL's own path" in reason and "nothing to compare" in reason


class DeepSpeedEngine(torch.nn.Module):
    """Has the name and the attribute look-up of DeepSpeed's."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Shared(shared.SharedBatches, Holder):
    pass


@pytest.mark.parametrize("of_trainer", [False, True])
def test_a_deepspeed_engine_is_left_alone(of_trainer, caplog):
    model = data.example.small_model()
    _, ids, mask = batch(1)
    ids = ids % 96
    with caplog.at_level(logging.WARNING, "espalier"):
        trainer = Shared(model if of_trainer else DeepSpeedEngine(model))
        trainer.is_deepspeed_enabled, trainer._noted = of_trainer, set()
        caplog.clear()
        wanted = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        with trainer._shared_backbones():
            found = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(found, wanted) and trainer.shared_rows["run"] == 0
    assert len(reasons(caplog)) == 1 and "DeepSpeed" in reasons(caplog)[0]


def test_sharded_sequences_are_left_alone(caplog):
    model = data.example.small_model()
    trainer = Shared(model)
    trainer.accelerator = types.SimpleNamespace(parallelism_config=types.SimpleNamespace(tp_enabled=False, cp_enabled=True, sp_enabled=False))
    with caplog.at_level(logging.WARNING, "espalier"):
        assert not trainer._sharing(model, 10)
    assert "parallelism_config" in reasons(caplog)[0] and "(cp)" in reasons(caplog)[0]
