"""TRL's names mean TRL's formulas: `train` with them against the gradient of the real GRPOTrainer's own loss, in float64.

TRL's `_compute_loss` runs as installed; log-probs come from the oracle's model. What TRL does before it (advantages, weights of the
sampled policy) is written out here from its `_generate_and_score_completions`.
"""

import collections
import dataclasses
import types

import pytest
import torch
import transformers

import oracle
from comparison import Trained, assert_equal_gradients

trl = pytest.importorskip("trl", reason="TRL is not installed")

SEED = 21
SEQUENCE = {"importance_sampling_level": "sequence"}
CASES = {
    "epsilon": {"epsilon": 0.1},
    "epsilon_high": {"epsilon_high": 0.28},
    "delta": {"delta": 1.5},
    "delta_below_the_clip": {"delta": 1.05, "epsilon": 0.3},
    "beta": {"beta": 0.3},
    "beta_without_correction": {"beta": 0.3, "use_bias_correction_kl": False},
    **{kind: {"loss_type": kind} for kind in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")},
    "dr_grpo_of_64": {"loss_type": "dr_grpo", "max_completion_length": 64},
    "cispo_capped_at_5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo_temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "vespo_weights": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
    **{f"sequence_{kind}": {"loss_type": kind, **SEQUENCE} for kind in ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo")},
    "sequence_delta": {"delta": 1.02, **SEQUENCE},
    "sequence_beta": {"loss_type": "grpo", "beta": 0.3, **SEQUENCE},
    "scale_rewards_none": {"scale_rewards": "none"},
    "scale_rewards_batch": {"scale_rewards": "batch"},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.05},
    "off_policy_mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    **{f"sampled_{mode}": {"vllm_importance_sampling_mode": mode}
       for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    "sampled_between": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.7,
                        "vllm_importance_sampling_clip_max": 1.4},
    "sampled_vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "num_items_in_batch": {"loss_type": "dapo", "num_items_in_batch": 100},
    "num_items_in_batch_entropy": {"loss_type": "cispo", "num_items_in_batch": 100, "entropy_coef": 0.05},
    "together": {"loss_type": "grpo", "beta": 0.1, "epsilon_high": 0.28, "delta": 2.0, "scale_rewards": "batch",
                 "vllm_importance_sampling_mode": "sequence_truncate", "off_policy_mask_threshold": 0.2, "entropy_coef": 0.01},
}


def padded(series, dtype):
    longest = max(map(len, series))
    return torch.stack([torch.cat([torch.as_tensor(s, dtype=dtype), torch.zeros(longest - len(s), dtype=dtype)]) for s in series])


def trl_advantages(records, scale):
    rewards = torch.tensor([r["reward"] for r in records], dtype=torch.float64)
    members = [torch.tensor([r["group"] == other["group"] for other in records]) for r in records]
    centred = rewards - torch.stack([rewards[group].mean() for group in members])
    if scale == "none":
        return centred
    deviation = rewards.std() if scale == "batch" else torch.stack([rewards[group].std() for group in members])
    return centred / (deviation + 1e-4)


def sampling_ratio(args, old, sampled, mask):
    ratio = (old - sampled) * mask
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        ratio = ratio.sum(-1, keepdim=True)
    ratio = ratio.exp()
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    beyond = (ratio > high) | (ratio < (-torch.inf if low is None else low))
    return ratio.masked_fill(beyond, 0.0)


def trl_gradients(model, records, names, folder, pairs=None):
    """{name: gradient} of the installed trainer's loss of one accumulation window, whose micro-batches are equal parts of the records.
    Without num_items_in_batch the records are the trainer's part of a generation batch. `pairs`: log-probs and entropies of before,
    whose graph is kept."""
    names = dict(names)
    items = names.pop("num_items_in_batch", None)
    sampled = any(name.startswith("vllm_") for name in names)
    args = trl.GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[],
                          **{"per_device_train_batch_size": 8, "num_generations": 8, **names})
    parts = args.gradient_accumulation_steps
    assert len(records) % parts == 0
    model.zero_grad(set_to_none=True)
    kept = pairs is not None
    pairs = pairs or [oracle.response_logprobs(model, record) for record in records]
    mask = padded([r["loss_mask"] for r in records], torch.float64)
    old, ref, sampled_logprobs = (padded([r[name] for r in records], torch.float64)
                                  for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"))

    def stacked(part):
        longest = mask.shape[1]
        return torch.stack([torch.nn.functional.pad(pair[part], (0, longest - len(pair[part]))) for pair in pairs])

    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer = types.SimpleNamespace(
        args=args, model=model, beta=args.beta, loss_type=args.loss_type, epsilon_low=args.epsilon, epsilon_high=high,
        importance_sampling_level=args.importance_sampling_level, top_entropy_quantile=1.0,
        off_policy_mask_threshold=args.off_policy_mask_threshold, use_vllm=sampled,
        vllm_importance_sampling_correction=args.vllm_importance_sampling_correction,
        max_completion_length=args.max_completion_length, current_gradient_accumulation_steps=parts, aux_loss_enabled=False,
        _entropy_bonus_enabled=args.entropy_coef != 0, use_adaptive_entropy=False, entropy_coef=args.entropy_coef,
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, *_, **__: x, sync_gradients=True,
                                          gather_for_metrics=lambda x: x),
        _metrics={"train": collections.defaultdict(list)},
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask, get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda _, ids, *__, **___: (stacked(0)[ids[:, 0]], stacked(1)[ids[:, 0]], None))
    advantages = (padded([r["advantage"] for r in records], torch.float64) if "advantage" in records[0]
                  else trl_advantages(records, args.scale_rewards))
    items = items or mask.sum().item() * args.steps_per_generation / parts
    inputs = {"prompt_ids": torch.arange(len(records))[:, None], "prompt_mask": torch.ones(len(records), 1),
              "completion_ids": torch.zeros(mask.shape, dtype=torch.long), "completion_mask": mask,
              "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
    if sampled:
        inputs["sampling_per_token_logps"] = sampled_logprobs
        if args.vllm_importance_sampling_correction:
            inputs["importance_sampling_ratio"] = sampling_ratio(args, old, sampled_logprobs, mask)
    elif args.off_policy_mask_threshold is not None:  # what was recorded is what sampled
        inputs["sampling_per_token_logps"] = sampled_logprobs
    torch.set_default_dtype(torch.float64)  # TRL makes tensors of its temperatures, which would be rounded to float32
    try:
        size = len(records) // parts
        for begin in range(0, len(records), size):
            part = {name: values[begin:begin + size] for name, values in inputs.items()}
            part["num_items_in_batch"] = torch.tensor(items, dtype=torch.float64)
            last = begin + size == len(records)
            trl.GRPOTrainer._compute_loss(trainer, model.train(), part).backward(retain_graph=kept or not last)
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_train_has_the_trainers_gradient(case, espalier, prepared, tmp_path):
    directory, model, records, path = prepared
    exact = trl_gradients(model, records, CASES[case], tmp_path / "trl")
    run = Trained(espalier, directory, path, tmp_path, **{n.replace("_", "-"): v for n, v in CASES[case].items()})
    assert_equal_gradients(run.gradients, exact, SEED)


# What TRL's configuration has, all of it. Taken: as CASES show, or an option of ours with the same name and meaning.
TAKEN = {*(name for names in CASES.values() for name in names if name != "num_items_in_batch"), "vllm_importance_sampling_correction",
         "vllm_importance_sampling_cap", "vespo_lambda_pos", "vespo_k_neg", "temperature", "seed", "weight_decay", "max_grad_norm",
         "warmup_steps", "router_aux_loss_coef", "gradient_accumulation_steps", "steps_per_generation", "report_to", "lr_scheduler_type",
         # values that change nothing, as TRL's defaults; others are refused
         "top_entropy_quantile", "use_adaptive_entropy", "multi_objective_aggregation", "mask_truncated_completions"}
# They decide the update, and train has another word for them or nothing.
DECIDES = {
    "learning_rate": "--lr", "adam_beta1": "--betas", "adam_beta2": "--betas", "adam_epsilon": "--eps", "max_steps": "--steps",
    "num_train_epochs": "--epochs", "num_iterations": "--epochs", "per_device_train_batch_size": "--mini-batch-size",
    "generation_batch_size": "--mini-batch-size",
    "num_generations": "the records' groups", "reward_weights": "the records' reward",
    "bf16": "--dtype", "fp16": "", "lr_scheduler_type": "", "lr_scheduler_kwargs": "", "optim": "", "optim_args": "", "optim_target_modules": "",
    "disable_dropout": "", "cast_lm_head_to_fp32": "", "sync_ref_model": "", "ref_model_mixup_alpha": "", "ref_model_sync_steps": "",
    "entropy_coef_min": "", "entropy_coef_max": "", "entropy_coef_delta": "", "entropy_target": "", "neftune_noise_alpha": "",
    "label_smoothing_factor": "", "output_dir": "--out", "resume_from_checkpoint": "--resume", "save_steps": "--save-freq", "use_cpu": "--device",
}
# Sampling, serving, data loading, logging, saving, evaluation, parallelism: no part of an update on recorded rollouts.
NO_PART = ("model_init_kwargs trust_remote_code num_generations_eval ds3_gather_for_generation shuffle_dataset pad_to_multiple_of top_p top_k min_p "
           "generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl "
           "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
           "vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size max_tool_calling_iterations "
           "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo "
           "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged").split()
REFUSED_VALUES = {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "multi_objective_aggregation": "normalize_then_sum",
                  "mask_truncated_completions": True}


def configuration(folder):
    """{field: default} of TRL's configuration, and the fields of transformers' that it inherits."""
    made = trl.GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[])
    own = {f.name for f in dataclasses.fields(trl.GRPOConfig)} - {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    return {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}, own


def test_every_name_of_the_configuration_is_known_here(tmp_path):
    """A new version of TRL with a new name fails here until somebody has looked at it."""
    fields, own = configuration(tmp_path)
    assert own - TAKEN - set(DECIDES) == set(NO_PART)
    assert (TAKEN | set(DECIDES)) <= set(fields)


def test_train_takes_these_names_and_no_others(tmp_path):
    """What is neither an option of train nor one of TRL's names that it reads is refused as unknown."""
    from espalier import verbs
    fields, _ = configuration(tmp_path)
    known = {*verbs.options_of("train"), *verbs.names_of_trl("train")}
    assert set(fields) & known == TAKEN


def test_what_is_not_taken_is_refused_by_name(espalier, prepared, tmp_path):
    directory, _, _, path = prepared

    def refused(name, value):
        ran = espalier("train", "--model", directory, "--rollouts", path, "--gradients", tmp_path / "g", "--" + name.replace("_", "-"), value, expect=None)
        assert "--" + name in ran.stderr.replace(name.replace("_", "-"), name) and not (tmp_path / "g").exists(), (name, ran)
        return ran.status

    assert {name: refused(name, value) for name, value in REFUSED_VALUES.items()} == {name: 4 for name in REFUSED_VALUES}
    assert {name: refused(name, 1) for name in ("learning_rate", "sync_ref_model", "top_k")} == {"learning_rate": 2, "sync_ref_model": 2, "top_k": 2}


def test_every_case_is_another_update(prepared, tmp_path):
    """Otherwise a name that is accepted and ignored would pass above."""
    _, model, records, _ = prepared
    plain = torch.cat([g.flatten() for g in trl_gradients(model, records, {}, tmp_path).values()])
    for case, names in CASES.items():
        if case in ("dapo", "bnpo"):  # dapo is the default, and bnpo is it in one micro-batch
            continue
        other = torch.cat([g.flatten() for g in trl_gradients(model, records, names, tmp_path).values()])
        assert (other - plain).norm() > 1e-6 * plain.norm(), case
