"""The real TRL trainer, plain against shared: losses and gradients of three accumulation windows, float32.

Two plain float32 runs that add in another order differ by about 1e-6 of the gradient's norm here (two layers, head dimension 16, some
2,000 token rows: roundings of 6e-8 each, growing as the root of the rows a sum has); 2e-5 is allowed because the second and third
windows start from weights that AdamW's first steps, +-lr whatever the gradient's size, moved apart where a gradient is near zero.
"""

import logging
import os

import pytest
from conftest import ROOT

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

EXAMPLES = ROOT / "examples"
ALLOWED = 2e-5


@pytest.fixture(scope="module")
def example():
    import importlib.util
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLES / "trl_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example, trainer_class, config_class, folder, **settings):
    from datasets import Dataset

    class Recording(trainer_class):
        losses, grads = [], []

        def training_step(self, *args, **kwargs):
            out = super().training_step(*args, **kwargs)
            self.losses.append(out.item())
            if self.accelerator.sync_gradients:
                self.grads.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
            return out

    Recording.losses, Recording.grads = [], []
    config = config_class(**dict(dict(
        output_dir=str(folder), use_cpu=True, bf16=False, fp16=False, report_to=[], save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, max_completion_length=10, learning_rate=1e-3,
        lr_scheduler_type="constant", max_steps=3, seed=7, disable_tqdm=True, dataloader_pin_memory=False), **settings))
    prompts = [" ".join(f"w{3 + (7 * i + k) % 93}" for k in range(60 + 9 * i)) for i in range(4)]
    trainer = Recording(model=example.small_model(), reward_funcs=example.reward, args=config, processing_class=example.tokenizer(),
                        train_dataset=Dataset.from_dict({"prompt": prompts}))
    trainer.train()
    return trainer


def compare(plain, ours):
    assert len(plain.grads) == len(ours.grads) == 3
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4, abs=1e-5)
    for a, b in zip(plain.grads, ours.grads):
        assert set(a) == set(b)
        error = (sum((a[n] - b[n]).square().sum() for n in a) / sum(g.square().sum() for g in a.values())).sqrt()
        assert 0 < error <= ALLOWED
    assert ours.shared_rows["run"] < ours.shared_rows["without_sharing"] / 2


CASES = {
    "dapo": {}, "grpo with beta and a second iteration": dict(loss_type="grpo", beta=.04, num_iterations=2),
    "bnpo, shuffled over windows": dict(loss_type="bnpo", steps_per_generation=4), "dr_grpo": dict(loss_type="dr_grpo"),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0), "sapo": dict(loss_type="sapo"),
    "sequence level": dict(importance_sampling_level="sequence", loss_type="grpo", num_iterations=2),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_plain_trainer_s(example, case, tmp_path):
    plain = run(example, trl.GRPOTrainer, trl.GRPOConfig, tmp_path / "plain", **CASES[case])
    ours = run(example, shared.GRPOTrainer, trl.GRPOConfig, tmp_path / "ours", **CASES[case])
    compare(plain, ours)


def test_rloo(example, tmp_path):
    plain = run(example, trl.RLOOTrainer, trl.RLOOConfig, tmp_path / "plain")
    compare(plain, run(example, shared.RLOOTrainer, trl.RLOOConfig, tmp_path / "ours"))


def test_what_cannot_be_shared_runs_plain_with_one_note(example, tmp_path, caplog):
    """Attention dropout: refused by check, so TRL's own path runs."""
    make = example.small_model

    def with_dropout():
        model = make()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = .1
        return model

    example.small_model = with_dropout
    try:
        with caplog.at_level(logging.WARNING, "espalier"):
            trainer = run(example, shared.GRPOTrainer, trl.GRPOConfig, tmp_path, max_steps=1)
    finally:
        example.small_model = make
    notes = [record.message for record in caplog.records if "prompts are not shared" in record.message]
    assert len(notes) == 1 and "attention_dropout = 0.1" in notes[0] and trainer.shared_rows["run"] == 0


def test_switched_off(example, tmp_path):
    trainer = run(example, type("Off", (shared.GRPOTrainer,), {"__init__": without_sharing}), trl.GRPOConfig, tmp_path, max_steps=1)
    assert trainer.shared_rows["run"] == 0 and not trainer.shared_prompts


def without_sharing(self, *args, **kwargs):
    shared.GRPOTrainer.__init__(self, *args, shared_prompts=False, **kwargs)
