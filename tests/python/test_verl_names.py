"""verl's names mean verl's formulas: `train` with them against the gradient of the installed verl's own functions, in float64.

verl's `ppo_loss`, advantage estimators and rollout correction run as installed; log-probs come from the oracle's model. Every name
that verl has registered, and every field of its actor's and rollout correction's configuration, is either among the cases or
refused by name: a newer verl with a new name fails here.
"""

import dataclasses
import inspect
import re
import types

import numpy as np
import pytest
import torch

import oracle
from comparison import FLOAT64_RELATIVE, Trained, relative_errors

pytest.importorskip("verl", reason="verl is not installed (tools/requirements-verl.txt)")
from verl.trainer.config import RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS, compute_rollout_correction_and_rejection_mask  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

SEED = 31
SEQUENCE_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
LOSSES = {"vanilla": {}, "gspo": SEQUENCE_MEAN, "cispo": {}, "sapo": SEQUENCE_MEAN, "gpg": {}, "dppo_tv": {},
          "dppo_kl": {"clip_ratio_low": .01, "clip_ratio_high": .02}}  # verl's sapo knows this aggregation only
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
KL_TYPES = [name + end for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+")]
CASES = {
    **{f"loss_{name}": {"policy_loss": name, **more} for name, more in LOSSES.items()},
    **{f"loss_{name}_clipped": {"policy_loss": name, "clip_ratio_low": .1, "clip_ratio_high": .28, **more}
       for name, more in LOSSES.items() if name in ("vanilla", "gspo", "cispo", "dppo_tv")},
    "dual_clip": {"clip_ratio_c": 1.5}, "sapo_temperatures": {"policy_loss": "sapo", "tau_pos": 2.0, "tau_neg": .5, **SEQUENCE_MEAN},
    **{mode: {"loss_agg_mode": mode} for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
                                                  "seq-mean-token-sum-norm")},
    "norm_of_64": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64},
    "gspo_token_mean": {"policy_loss": "gspo", "loss_agg_mode": "token-mean"},
    "entropy": {"entropy_coeff": .05}, "entropy_by_sequence": {"entropy_coeff": .05, **SEQUENCE_MEAN},
    **{f"kl_{kind}": {"kl_loss_coef": .3, "kl_loss_type": kind} for kind in KL_TYPES},
    **{f"adv_{name}": {"adv_estimator": name} for name in ESTIMATORS if name != "gae"}, "adv_dr_grpo": {"adv_estimator": "dr_grpo"},
    **{f"is_{level}": {"rollout_is": level, "rollout_is_threshold": 1.5} for level in ("token", "sequence")},
    "is_between": {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_floor": .5, "rollout_is_threshold": 1.7},
    **{f"rs_{word}": {"rollout_rs": word, "rollout_rs_threshold": bound} for word, bound in (
        ("token_k1", "0.7_2.5"), ("token_k2", "0.4"), ("token_k3", "0.4"), ("seq_sum_k1", "0.2_3"), ("seq_sum_k2", "3"), ("seq_sum_k3", "4"),
        ("seq_mean_k1", "1.3"), ("seq_mean_k2", "0.6"), ("seq_mean_k3", "0.8"), ("seq_max_k2", "2"), ("seq_max_k3", "3"))},
    "rs_two": {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.4_2.5,0.8", **SEQUENCE_MEAN},
    "rs_is": {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.4", "rollout_is": "sequence", "rollout_is_threshold": 3.0},
    "rs_whitened": {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.4", "adv_estimator": "reinforce_plus_plus_baseline"},
    "is_gspo": {"policy_loss": "gspo", "rollout_is": "token", **SEQUENCE_MEAN},
    "together": {"policy_loss": "gspo", "entropy_coeff": .01, "kl_loss_coef": .1, "kl_loss_type": "k3+", "rollout_is": "sequence",
                 "adv_estimator": "rloo", **SEQUENCE_MEAN},
}
# Of the actor's configuration: names that an update's formula does not read (how it is run, what is measured), and those refused.
RUNNING = {"strategy", "rollout_n", "engine", "optim", "checkpoint", "profiler", "qat", "model_config", "fsdp_config", "policy_loss",
           "global_batch_info", "extra", "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
           "ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu", "ppo_infer_micro_batch_size_per_gpu", "freeze_vision_tower",
           "calculate_entropy", "calculate_sum_pi_squared", "use_prefix_grouper", "use_torch_compile", "ppo_epochs", "shuffle",
           "data_loader_seed", "use_fused_kernels", "grad_clip", "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking",
           "entropy_from_logits_chunk_size", "entropy_checkpointing", "pad_to_length", "use_remove_padding", "use_rollout_log_probs"}
REFUSED = {"clip_ratio": "0.1", "use_kl_loss": "true"}  # verl reads clip_ratio only where low and high are null


def padded(series, dtype=torch.float64):
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(s, dtype=dtype) for s in series], batch_first=True)


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def verl_advantages(records, mask, name):
    rewards = torch.zeros_like(mask)
    for i, record in enumerate(records):
        last = max((t for t, m in enumerate(record["loss_mask"]) if m), default=len(record["loss_mask"]) - 1)
        rewards[i, last] = record["reward"]
    more = {"norm_adv_by_std_in_grpo": False} if name == "dr_grpo" else {}
    if name == "reinforce_plus_plus":
        more["config"] = types.SimpleNamespace(gamma=1.0)
    function = core_algos.get_adv_estimator_fn("grpo" if name == "dr_grpo" else name)
    return function(token_level_rewards=rewards, response_mask=mask, index=np.array([r["group"] for r in records]), **more)[0]


def verl_gradients(model, records, names):
    """{name: gradient} of verl's ppo_loss over one mini-batch."""
    names = dict(names)
    correction = {name: names.pop(name) for name in list(names) if name.startswith("rollout_")}
    estimator, kind = names.pop("adv_estimator", "grpo"), names.pop("policy_loss", "vanilla")
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=4, use_dynamic_bsz=True, use_kl_loss="kl_loss_coef" in names,
                             policy_loss=PolicyLossConfig(loss_mode=kind), **names)
    model.zero_grad(set_to_none=True)
    pairs = [oracle.response_logprobs(model, record) for record in records]
    whole = lambda part: jagged([torch.nn.functional.pad(pair[part], (len(r["prompt_ids"]) - 1, 1)) for pair, r in zip(pairs, records)])
    mask = padded([r["loss_mask"] for r in records])
    old, ref, sampled = (padded([r[name] for r in records]) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"))
    weights = None
    if correction:  # before advantages, as in verl's trainers
        high = correction.get("rollout_is_threshold", 2.0)
        bounds = f"{correction['rollout_is_floor']}_{high}" if "rollout_is_floor" in correction else high
        found, mask, _ = compute_rollout_correction_and_rejection_mask(
            old, sampled, mask, rollout_is=correction.get("rollout_is"), rollout_is_threshold=bounds,
            rollout_rs=correction.get("rollout_rs"), rollout_rs_threshold=correction.get("rollout_rs_threshold"))
        weights = found and found.batch["rollout_is_weights"]
        records = [{**r, "loss_mask": [int(m) for m in row][:len(r["loss_mask"])]} for r, row in zip(records, mask.tolist())]
    fields = dict(prompts=jagged([torch.tensor(r["prompt_ids"]) for r in records]), old_log_probs=old, ref_log_prob=ref, response_mask=mask,
                  responses=jagged([torch.tensor(r["response_ids"]) for r in records]), advantages=verl_advantages(records, mask, estimator))
    if weights is not None:
        fields["rollout_is_weights"] = weights
    data = tu.get_tensordict(fields, dict(dp_size=1, batch_num_tokens=float(mask.sum()), global_batch_size=len(records)))
    output = {"log_probs": whole(0)}
    if config.entropy_coeff:
        output["entropy"] = whole(1)
    torch.set_default_dtype(torch.float64)  # verl adds its 1e-8 to whole numbers of tokens, which float32 would round away
    try:
        ppo_loss(config, output, data)[0].backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_train_has_verl_s_gradient(case, espalier, prepared, tmp_path):
    directory, model, records, path = prepared
    exact = verl_gradients(model, records, CASES[case])
    errors = relative_errors(Trained(espalier, directory, path, tmp_path, **CASES[case]).gradients, exact)
    worst = max(errors, key=errors.get)
    # verl whitens with sums over tokens + 1e-8, once in the mean and twice in the variance; here the mean is the mean.
    whitened = 3e-8 / sum(sum(r["loss_mask"]) for r in records) if CASES[case].get("adv_estimator", "").startswith("reinforce") else 0.0
    assert errors[worst] <= FLOAT64_RELATIVE + whitened, f"seed {SEED}: {worst} is off by {errors[worst]:.3e} relative"


def test_every_case_is_another_update(prepared):
    """Otherwise a name that is accepted and ignored would pass above."""
    _, model, records, _ = prepared
    plain = torch.cat([g.flatten() for g in verl_gradients(model, records, {}).values()])
    for case, names in CASES.items():
        if case in ("loss_vanilla", "token-mean", "adv_grpo"):  # verl's defaults
            continue
        other = torch.cat([g.flatten() for g in verl_gradients(model, records, names).values()])
        assert (other - plain).norm() > 1e-6 * plain.norm(), case


def refused(espalier, prepared, folder, option, value):
    directory, _, _, path = prepared
    outcome = espalier("train", "--model", directory, "--rollouts", path, "--out", folder / "out", f"--{option.replace('_', '-')}", value,
                       expect=2)
    assert option.replace("_", "-") in outcome.stderr.replace("_", "-")
    return outcome.stderr


def test_registered_policy_losses(espalier, prepared, tmp_path):
    assert set(LOSSES) < set(core_algos.POLICY_LOSS_REGISTRY)
    for name in set(core_algos.POLICY_LOSS_REGISTRY) - set(LOSSES):
        assert f'"{name}"' in refused(espalier, prepared, tmp_path, "policy_loss", name)


def test_registered_advantage_estimators(espalier, prepared, tmp_path):
    registered = {getattr(name, "value", name) for name in core_algos.ADV_ESTIMATOR_REGISTRY}
    assert set(ESTIMATORS) < registered
    for name in registered - set(ESTIMATORS):
        assert f'"{name}"' in refused(espalier, prepared, tmp_path, "adv_estimator", name)


def test_aggregations_are_verl_s_list():
    checked = inspect.getsource(FSDPActorConfig.__mro__[1].__post_init__)
    assert set(re.findall(r'"((?:token|seq)-[a-z-]+)"', checked)) == {case for case in CASES if case.startswith(("token-", "seq-"))}


def test_kl_types_are_verl_s_list(espalier, prepared, tmp_path):
    known = set(re.findall(r'"(\w+)"', "".join(re.findall(r"kl_penalty (?:in|==) .*", inspect.getsource(core_algos.kl_penalty_forward)))))
    assert known == {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"}
    refused(espalier, prepared, tmp_path, "kl_loss_type", "full")


def test_options_of_the_actor(espalier, prepared, tmp_path):
    taken = {name for case in CASES.values() for name in case}
    fields = {field.name for field in dataclasses.fields(FSDPActorConfig) if not field.name.startswith("_")}
    assert fields - taken - RUNNING == set(REFUSED), "a name of verl's that is neither compared nor refused"
    for name, value in REFUSED.items():
        refused(espalier, prepared, tmp_path, name, value)
    for field in dataclasses.fields(PolicyLossConfig):  # constants of losses that are refused
        if field.name not in ("loss_mode", "rollout_correction") and not field.name.startswith("_"):
            refused(espalier, prepared, tmp_path, field.name, "0.1")


def test_options_of_the_rollout_correction(espalier, prepared, tmp_path):
    fields = {field.name for field in dataclasses.fields(RolloutCorrectionConfig) if not field.name.startswith("_")}
    values = {"rollout_is_batch_normalize": "true", "bypass_mode": "true", "loss_type": "reinforce"}
    assert fields - {"rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"} == set(values)
    for name, value in values.items():
        refused(espalier, prepared, tmp_path, name, value)
    refused(espalier, prepared, tmp_path, "rollout_is_threshold", "0.5_5.0")


def test_words_of_rejection_are_verl_s_list(espalier, prepared, tmp_path):
    assert SUPPORTED_ROLLOUT_RS_OPTIONS == {name["rollout_rs"] for case, name in CASES.items() if case.startswith("rs_") and case[3:] == name["rollout_rs"]}
    told = refused(espalier, prepared, tmp_path, "rollout_rs", "seq_max_k1")
    assert all(word in told for word in SUPPORTED_ROLLOUT_RS_OPTIONS)
