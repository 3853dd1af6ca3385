"""TRL's GRPO and RLOO trainers through every option that has a part in an update, by name: plain against shared, two updates on one
generation, so that ratios are not 1 in the second. What is allowed: test_trl_trainer.py.

Models are held in float64 where TRL lets them: advantages of a group cancel, so a gradient may be small beside what it sums.
"""

import functools
import logging

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")

from test_trl_names import NO_PART, configuration  # noqa: E402
from test_trl_trainer import LEAST_ALLOWED, distances, load_example, run  # noqa: E402

example = load_example()
plain_model = example.small_model


def often_ending(dtype=torch.float64):
    """Some responses are whole and some are cut off."""
    model = plain_model().to(dtype)
    model.lm_head.weight.data[1] *= 3
    return model
LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
# A small step: no ratio of the second window comes to the edge of a clip, where rounding decides whether a response has a gradient at all.
ROUNDED = {"bf16": True, "learning_rate": 1e-4}
BOTH = {
    "beta": {"beta": .1}, "num_iterations": {"num_iterations": 1}, "epsilon": {"epsilon": .02}, "epsilon_high": {"epsilon_high": .01},
    "mask_truncated_completions": {"mask_truncated_completions": True, "max_completion_length": 16}, "temperature": {"temperature": .7},
    "sync_ref_model": {"beta": .1, "sync_ref_model": True, "ref_model_mixup_alpha": .5, "ref_model_sync_steps": 1},
    "steps_per_generation": {"steps_per_generation": 2}, "generation_batch_size": {"generation_batch_size": 8},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2}, "num_generations": {"num_generations": 2},
    "max_completion_length": {"max_completion_length": 3}, "pad_to_multiple_of": {"pad_to_multiple_of": 64}, "reward_weights": {"reward_weights": [2.0]},
    "gradient_checkpointing": {"gradient_checkpointing": True}, "bf16": ROUNDED, "max_grad_norm": {"max_grad_norm": .01},
    "disable_dropout": {"disable_dropout": True}, "use_transformers_continuous_batching": {"use_transformers_continuous_batching": True},
}
GRPO = {
    **{loss: {"loss_type": loss} for loss in LOSSES}, **{f"{loss}, beta": {"loss_type": loss, "beta": .1} for loss in ("grpo", "cispo", "vespo")},
    **{f"{loss} by sequence": {"loss_type": loss, "importance_sampling_level": "sequence"} for loss in ("grpo", "sapo", "luspo")},
    "delta": {"delta": 1.02}, "use_bias_correction_kl": {"beta": .1, "use_bias_correction_kl": False},
    "scale_rewards batch": {"scale_rewards": "batch"}, "scale_rewards none": {"scale_rewards": "none"},
    "multi_objective_aggregation": {"multi_objective_aggregation": "normalize_then_sum"},
    "top_entropy_quantile": {"top_entropy_quantile": .5}, "entropy_coef": {"entropy_coef": .1},
    "use_adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": .1, "entropy_target": 9.0, "entropy_coef_delta": .05,
                             "entropy_coef_min": .01, "entropy_coef_max": 1.0},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.0}, "cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True},
    "sapo_temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": .5},
    "vespo_weights": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    **BOTH,
}
RLOO = {"plain": {}, "normalize_advantages": {"normalize_advantages": True}, "reward_clip_range": {"reward_clip_range": (-.1, .4)}, **BOTH,
        "epsilon": {"epsilon": .3}}  # of a whole response's ratio
TRAINERS = {"grpo": (trl.GRPOTrainer, shared.GRPOTrainer, trl.GRPOConfig, GRPO), "rloo": (trl.RLOOTrainer, shared.RLOOTrainer, trl.RLOOConfig, RLOO)}
CASES = [(kind, name) for kind, (*_, cases) in TRAINERS.items() for name in cases]
COMMON = dict(learning_rate=.003, gradient_accumulation_steps=1, num_iterations=2, max_steps=2, max_completion_length=6)


@pytest.mark.parametrize("kind, name", CASES, ids=[" ".join(pair) for pair in CASES])
def test_gradients_are_the_plain_trainer_s(kind, name, tmp_path, caplog):
    plain_class, our_class, config, cases = TRAINERS[kind]
    made = lambda trainer, **more: run(example, trainer, config, tmp_path / trainer.__module__ / str(len(more)), **{**COMMON, **cases[name], **more})
    example.small_model = functools.partial(often_ending, torch.float32) if "bf16" in cases[name] else often_ending
    with caplog.at_level(logging.WARNING, "espalier"):
        plain, ours = made(plain_class), made(our_class)
    assert not [record.message for record in caplog.records if "not shared" in record.message]
    found = max(distances(plain, ours))
    if found > LEAST_ALLOWED:
        assert found <= 2 * max(distances(plain, made(plain_class, attention="eager")))
    assert ours.shared_rows["run"] < ours.shared_rows["without_sharing"]
    assert ours.model.config._attn_implementation == plain.model.config._attn_implementation == "sdpa"


def test_every_option_of_the_configurations_is_here(tmp_path):
    """A name that a new version of TRL brings fails here until somebody has looked at it."""
    import dataclasses
    import transformers
    inherited = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    _, of_grpo = configuration(tmp_path)
    of_rloo = {f.name for f in dataclasses.fields(trl.RLOOConfig)} - inherited
    mixtures = {"router_aux_loss_coef"}  # test_trl_trainer.py
    sampler = {name for name in of_grpo if name.startswith("vllm_importance_sampling")}  # vLLM's log-probs: test_trl_pairs.py
    for own, cases in ((of_grpo, GRPO), (of_rloo, RLOO)):
        run_here = {option for settings in cases.values() for option in settings}
        assert own - set(NO_PART) - mixtures - sampler - run_here == set()
