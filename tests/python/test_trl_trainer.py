"""The real TRL trainer, plain against shared: losses and gradients of three accumulation windows, float32. All other options:
test_trl_configurations.py.

Allowed is twice what plain float32 differs by between two of transformers' own attention functions (sdpa, eager), at least 4e-6: a
gradient here is a sum over some 1,000 to 4,000 token rows, each with roundings of 6e-8, and the root of 4,096 of them is 3.8e-6. A
loss is such a sum too, of ratios near 1 times advantages near 1.
"""

import logging
import os

import pytest
import torch
import transformers
from conftest import ROOT
from rank_processes import run_under_accelerate
from trl_recording import recorded
from transformers import AutoModelForCausalLM

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

EXAMPLES = ROOT / "examples"
LEAST_ALLOWED = 4e-6


@pytest.fixture(scope="module")
def example():
    return load_example()


def load_example():
    import importlib.util
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLES / "trl_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example, trainer_class, config_class, folder, attention=None, **settings):
    from datasets import Dataset

    class Recording(recorded(trainer_class)):
        rows = 0

        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
            Recording.rows += int(attention_mask.sum())
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)

    config = config_class(**dict(dict(
        output_dir=str(folder), use_cpu=True, bf16=False, fp16=False, report_to=[], save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, max_completion_length=10, learning_rate=.05, optim="sgd",
        lr_scheduler_type="constant", max_steps=3, seed=7, disable_tqdm=True, dataloader_pin_memory=False), **settings))
    prompts = [" ".join(f"w{3 + (7 * i + k) % 93}" for k in range(60 + 9 * (i % 4))) for i in range(8)]
    model = example.small_model()
    if config.beta != 0:  # the reference is loaded from where the model came from
        if os.environ.get("RANK", "0") == "0":
            model.save_pretrained(folder / "model")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=model.dtype)
    if attention:
        model.set_attn_implementation(attention)
    trainer = Recording(model=model, reward_funcs=example.reward, args=config, processing_class=example.tokenizer(),
                        train_dataset=Dataset.from_dict({"prompt": prompts}))
    trainer.train()
    return trainer


def distances(plain, other):
    """Relative L2 of each window's gradient."""
    assert len(plain.grads) == len(other.grads) == plain.args.max_steps
    for a, b in zip(plain.grads, other.grads):
        assert set(a) == set(b) and any(g.any() for g in a.values())
    return [float((sum((a[n] - b[n]).square().sum() for n in a) / sum(g.square().sum() for g in a.values())).sqrt())
            for a, b in zip(plain.grads, other.grads)]


def furthest(plain, other):
    """The largest distance of a window's gradient, and of a loss in units of the terms that it sums."""
    losses = zip(plain.losses, other.losses, strict=True)
    return max(distances(plain, other)), max(abs(a - b) / (1 + abs(a)) for a, b in losses)


def compare(plain, ours, eager, agreed=bool):
    """`eager()` runs TRL's trainer with transformers' other attention, where the least that is allowed is not enough. `agreed`: the same
    answer on every rank."""
    found = furthest(plain, ours)
    if agreed(max(found) > LEAST_ALLOWED):
        floor = furthest(plain, eager())
        assert all(x <= max(LEAST_ALLOWED, 2 * other) for x, other in zip(found, floor)), (found, floor)
    assert found[0] > 0, "not one bit differs: nothing was shared"
    assert ours.shared_rows["run"] < ours.shared_rows["without_sharing"] / 2
    assert ours.rows == plain.rows >= ours.shared_rows["without_sharing"]  # equal unless responses are masked as a whole


def plain_against_shared(example, plain_class, shared_class, config_class, folder, **settings):
    plain = run(example, plain_class, config_class, folder / "plain", **settings)
    ours = run(example, shared_class, config_class, folder / "ours", **settings)
    compare(plain, ours, lambda: run(example, plain_class, config_class, folder / "eager", attention="eager", **settings))


CASES = {
    "dapo": {}, "grpo with beta and a second iteration": dict(loss_type="grpo", beta=.04, num_iterations=2),
    "bnpo, shuffled over windows": dict(loss_type="bnpo", steps_per_generation=4),
    "sequence level": dict(importance_sampling_level="sequence", loss_type="grpo", num_iterations=2),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_plain_trainer_s(example, case, tmp_path):
    plain_against_shared(example, trl.GRPOTrainer, shared.GRPOTrainer, trl.GRPOConfig, tmp_path, **CASES[case])


def mixture():
    """Often says its last word, so that some responses are whole and some are cut off."""
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, experts_implementation="eager", initializer_range=.15, eos_token_id=1,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False))
    model.lm_head.weight.data[1] *= 3
    return model


@pytest.mark.parametrize("family,checkpointing", [("Qwen3.5", False), ("Qwen3.5", True), ("Mistral", False)])
def test_states_and_windows_pass_from_prompts_to_responses(example, family, checkpointing, tmp_path, monkeypatch, caplog):
    """Responses of several prompts in one call, each from its own prompt's states; checkpointed layers run again in TRL's backward."""
    from hf_layers import make
    monkeypatch.setattr(example, "small_model", lambda: make(family, torch.float32, vocab_size=96, eos_token_id=1))
    with caplog.at_level(logging.WARNING, "espalier"):
        plain_against_shared(example, trl.GRPOTrainer, shared.GRPOTrainer, trl.GRPOConfig, tmp_path,
                             gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs=dict(use_reentrant=False))
    assert not [record for record in caplog.records if "prompts are not shared" in record.message]


@pytest.mark.parametrize("settings", [dict(steps_per_generation=4), dict(mask_truncated_completions=True, loss_type="grpo")],
                         ids=["torn", "truncated"])
def test_a_router_s_loss_is_shared(example, tmp_path, monkeypatch, caplog, settings):
    """It counts every token of every rollout of a micro-batch, last tokens and prompts of masked completions too; so large here that
    it is most of the gradient."""
    monkeypatch.setattr(example, "small_model", mixture)
    settings = dict(settings, router_aux_loss_coef=3.0)
    with caplog.at_level(logging.WARNING, "espalier"):
        plain_against_shared(example, trl.GRPOTrainer, shared.GRPOTrainer, trl.GRPOConfig, tmp_path, **settings)
    assert not [record for record in caplog.records if "prompts are not shared" in record.message]
    without = run(example, trl.GRPOTrainer, trl.GRPOConfig, tmp_path / "without", max_steps=1, **dict(settings, router_aux_loss_coef=0.0))
    with_it = run(example, trl.GRPOTrainer, trl.GRPOConfig, tmp_path / "with", max_steps=1, **settings)
    change = sum((a - without.grads[0][n]).square().sum() for n, a in with_it.grads[0].items())
    assert change > sum(g.square().sum() for g in without.grads[0].values())


def test_rloo(example, tmp_path):
    plain_against_shared(example, trl.RLOOTrainer, shared.RLOOTrainer, trl.RLOOConfig, tmp_path)


@pytest.mark.parametrize("program", ["trl_ranks.py", "trl_batch_ranks.py"])
def test_two_processes_under_accelerate(program, tmp_path):
    """With torchrun's variables, which accelerate finds: DDP over gloo, groups torn over windows and over ranks."""
    run_under_accelerate(tmp_path, program)


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
