"""`verify=True` of TRL's trainers: right passes agree, and what is wrong in values or in gradients alone ends the run before it trains."""

import functools
import logging

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

import hf_models  # noqa: E402
from rank_processes import run_under_accelerate  # noqa: E402
from espalier.errors import Error  # noqa: E402
from espalier.trl import batches, rollouts, window  # noqa: E402
from test_trl_batches import KINDS, settings_of  # noqa: E402
from test_trl_tree import Holder, batch  # noqa: E402
from test_trl_trainer import load_example, mixture, run  # noqa: E402

example = load_example()


def verifying(trainer_class):
    """The class with verify=True; `tables` collects what it found, in order."""

    class Verifying(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, verify=True, **kwargs)

        def _to_verify(self, model):
            wanted = super()._to_verify(model)
            self.asked.append((wanted, torch.is_grad_enabled()))
            return wanted

    Verifying.asked = []
    return Verifying


def started(kind):
    return settings_of(kind, next(iter(KINDS[kind][-1])))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_batches_agrees_and_trains_as_without(kind, tmp_path, caplog):
    """Every model of it: the policy with gradients, references and teachers without."""
    _, ours, made = started(kind)
    with caplog.at_level(logging.WARNING, "espalier"):
        without, trainer = made(ours, tmp_path / "without"), made(verifying(ours), tmp_path / "with")
    assert not [record for record in caplog.records if "not shared" in record.message]
    assert trainer.losses == without.losses
    assert all(torch.equal(a[n], b[n]) for a, b in zip(without.grads, trainer.grads) for n in a)
    models = {"dpo": [True, False], "kto": [True, False, False], "reward": [True], "sft": [True], "distillation": [True, False], "gkd": [True, False]}[kind]
    assert sorted(gradients for wanted, gradients in trainer.asked if wanted) == sorted(models)
    assert trainer.verification.verdict == "pass" and trainer.shared_rows == without.shared_rows


@pytest.mark.parametrize("settings", [dict(beta=.1, num_iterations=2), dict(entropy_coef=.1), dict(router_aux_loss_coef=.5), dict(gradient_checkpointing=True)],
                         ids=["reference", "entropy", "router", "checkpointing"])
def test_grpo_agrees_and_trains_as_without(settings, tmp_path, caplog, monkeypatch):
    if "router_aux_loss_coef" in settings:
        monkeypatch.setattr(example, "small_model", mixture)
    both = []
    with caplog.at_level(logging.WARNING, "espalier"):
        for trainer_class in (shared.GRPOTrainer, verifying(shared.GRPOTrainer)):
            both.append(run(example, trainer_class, trl.GRPOConfig, tmp_path / trainer_class.__name__, max_completion_length=6, **settings))
    assert not [record for record in caplog.records if "not shared" in record.message]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(both[0].grads, both[1].grads) for n in a)
    assert (True, True) in both[1].asked and both[1].verification.verdict == "pass"
    assert both[0].shared_rows == both[1].shared_rows


class Shared(shared.SharedBatches, Holder):
    pass


@pytest.mark.parametrize("family, seed", [(family, seed) for seed, family in enumerate(hf_models.FAMILIES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_agrees(family, seed, dtype):
    """Rounding alone never ends a run: the floor holds in both types."""
    model = hf_models.make(family).to(dtype)
    _, ids, mask = batch(seed + 1)
    trainer = Shared(model, verify=True)
    with trainer._shared_backbones():
        model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    if trainer.shared_rows["run"]:
        assert trainer.verification.verdict == "pass" and len(trainer.verification.parameters) > 4


def positions_one_off(monkeypatch):
    made = batches.Tree.of

    def wrong(*args):
        tree = made(*args)
        tree.positions[tree.place[0]] += 1
        return tree

    monkeypatch.setattr(batches.Tree, "of", wrong)


def a_sequence_without_gradient(monkeypatch):
    run_tree = batches._run

    def wrong(*args):
        out = run_tree(*args)
        first, *rest = out.last_hidden_state
        out.last_hidden_state = torch.stack([first.detach(), *rest])
        return out

    monkeypatch.setattr(batches, "_run", wrong)


@pytest.mark.parametrize("fault", [positions_one_off, a_sequence_without_gradient])
def test_a_wrong_batch_ends_the_run(fault, tmp_path, monkeypatch):
    fault(monkeypatch)
    _, ours, made = started("sft")
    with pytest.raises(Error) as wrong:
        made(verifying(ours), tmp_path)
    assert wrong.value.kind == "verification"
    made(ours, tmp_path / "without")  # nobody looks


def prompts_without_gradient(monkeypatch):
    monkeypatch.setattr(window.Prompt, "gathered", lambda self: [])


def a_response_one_off(monkeypatch):
    position = rollouts._Rows.positions
    monkeypatch.setattr(rollouts._Rows, "positions", lambda self, row, begin, end: position(self, row, begin, end) + (row == 1 and begin > 0))


@pytest.mark.parametrize("fault", [prompts_without_gradient, a_response_one_off])
def test_a_wrong_rollout_ends_the_run(fault, tmp_path, monkeypatch):
    fault(monkeypatch)
    made = functools.partial(run, example, config_class=trl.GRPOConfig, max_completion_length=6, max_steps=1)
    with pytest.raises(Error) as wrong:
        made(trainer_class=verifying(shared.GRPOTrainer), folder=tmp_path / "with")
    assert wrong.value.kind == "verification"
    made(trainer_class=shared.GRPOTrainer, folder=tmp_path / "without")


def test_two_processes(tmp_path):
    """DDP: agreement, and faults on one rank that end the run on both. FSDP2 and FSDP1: TRL's own path, and one note."""
    run_under_accelerate(tmp_path, "trl_verify_ranks.py")
