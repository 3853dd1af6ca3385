"""One rank of verl's real engine, plain beside shared: verl_ranks.py FOLDER RANK WORLD. Writes what differs to FOLDER/RANK.json.

FSDP2 and FSDP1 on gloo. Float64 throughout where `WIDE` says so: verl's own precisions end at float32, so "fp64" is taught to it here.
"""

import copy
import dataclasses
import functools
import json
import logging
import os
import sys
from pathlib import Path

FOLDER, RANK, WORLD = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).resolve().parent), str(ROOT / "python")]
os.environ.update(ESPALIER_SCHEDULE="shared", VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_cpu,espalier.verl", VERL_USE_EXTERNAL_PLUGINS="none",
                  VERL_ENGINE_VENDOR="espalier", HF_HUB_OFFLINE="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import _init_utils  # noqa: E402

torch.set_num_threads(1)
_init_utils._check_module_states_for_sync_module_states = lambda states: None  # verl broadcasts weights at the start, which FSDP1 allows on GPUs only
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=WORLD)

import verl_actor  # noqa: E402
from hf_models import all_float64, worst  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.metric import AggregationType, Metric  # noqa: E402
from verl.utils.torch_dtypes import PrecisionType  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import no_padding_2_padding  # noqa: E402
import espalier.verl  # noqa: E402
from espalier.errors import Error  # noqa: E402
from espalier.rows.trunk import Trunk  # noqa: E402

narrow = PrecisionType.to_dtype
PrecisionType.to_dtype = staticmethod(lambda precision: torch.float64 if precision == "fp64" else narrow(precision))
WIDE = dict(model_dtype="fp64", mixed_precision={"param_dtype": "fp64", "reduce_dtype": "fp64", "buffer_dtype": "fp64"})
BFLOAT = dict(mixed_precision={"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"})

SEQUENCES = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = {
    "vanilla": {}, "clip": dict(clip_ratio_low=.05, clip_ratio_high=.1, clip_ratio_c=1.2),
    **{mode: dict(loss_agg_mode=mode) for mode in ("token-sum", *SEQUENCES)},
    "norm_of_100": dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=100),
    "entropy": dict(entropy_coeff=.1), "entropy_by_sequence": dict(entropy_coeff=.1, loss_agg_mode="seq-mean-token-mean"),
    **{f"kl_{kind}": dict(use_kl_loss=True, kl_loss_coef=.3, kl_loss_type=kind) for kind in ("low_var_kl", "k3+", "k2", "abs", "kl")},
    **{kind: dict(loss_mode=kind) for kind in ("cispo", "sapo", "gpg", "dppo_tv", "dppo_kl")},
    "gspo": dict(loss_mode="gspo", loss_agg_mode="seq-mean-token-mean"), "dro": dict(loss_mode="dro", dro_beta=.5),
    "gspo_all": dict(loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", entropy_coeff=.1, use_kl_loss=True, kl_loss_coef=.3),
    "bypass": dict(loss_mode="bypass_mode", rollout_correction=dict(bypass_mode=True, loss_type="reinforce", rollout_is="token")),
}
SMOOTH = dict(loss_mode="gpg", entropy_coeff=.1)  # no clip, whose side a rounding can change
SETTINGS = {"temperature": dict(temperature=.7), "fixed_micro_batches": dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=3),
            "small_waves": dict(max_token_len_per_gpu=170), "weights": dict(weights=True), "masked": dict(masked=True)}


def actor(loss_mode="vanilla", dro_beta=None, rollout_correction=None, **options):
    from verl.trainer.config import RolloutCorrectionConfig
    correction = {} if rollout_correction is None else dict(rollout_correction=RolloutCorrectionConfig(**rollout_correction))
    return FSDPActorConfig(strategy="fsdp2", rollout_n=6, use_dynamic_bsz=True,
                           policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=dro_beta, **correction), **options)


def mini_batch(dtype, weights=False, masked=False, **settings):
    """This rank's part of rollouts whose groups are torn over ranks and micro-batches; no wave holds a whole group."""
    rows = verl_actor.rollouts(n=8, response=40)
    data = verl_actor.mini_batch(rows, dtype, **{**dict(calculate_entropy=True, use_dynamic_bsz=True, max_token_len_per_gpu={1: 250, 2: 170}[WORLD],
                                                        use_remove_padding=False), **settings})
    if weights:
        generator = torch.Generator().manual_seed(9)
        data["rollout_is_weights"] = torch.rand(data["response_mask"].shape, generator=generator, dtype=torch.float64).to(dtype) + .5
    if masked:  # tokens of a tool inside responses, and a response without any token of the loss
        data["response_mask"][:, 1] = 0
        data["response_mask"][4] = 0
        data["loss_mask"] = data["response_mask"]
    per_rank = len(rows) // WORLD
    return tu.index_select_tensor_dict(data, torch.arange(RANK * per_rank, (RANK + 1) * per_rank))


def engines(**changes):
    out = []
    for kind in (FSDPEngineWithLMHead, EngineRegistry.get_engine_cls("language_model", changes.get("strategy", "fsdp2"))):
        engine = kind(**verl_actor.configurations(FOLDER / "model", **changes))
        engine.initialize()
        if changes.get("lora_rank"):
            torch.manual_seed(3)
            for name, p in sorted(engine.module.named_parameters()):
                if "lora_" in name:
                    p.data.normal_(std=.1)
        out.append(engine)
    return out


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def update(engine, data, loss):
    """Loss, metrics that add up, gradients by name."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        result = engine.forward_backward_batch(data, loss)
        grads = {name: full(p.grad).clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    sums = {name: value.aggregate() for name, value in result["metrics"].items()
            if isinstance(value, Metric) and value.aggregation == AggregationType.SUM and not name.startswith("espalier/")}
    return sum(result["loss"]), sums, grads, result["metrics"]


def compare(pair, dtype, options, settings):
    loss = functools.partial(ppo_loss, config=actor(**options))
    (plain, plain_sums, wanted, _), (shared, shared_sums, found, metrics) = (update(e, mini_batch(dtype, **settings), loss) for e in pair)
    relative = lambda a, b: abs(a - b) / max(abs(b), 1e-30)
    if set(plain_sums) != set(shared_sums):
        raise AssertionError(f"metrics {sorted(plain_sums)}, shared {sorted(shared_sums)}")
    error, name = worst(found, wanted)
    return dict(gradient=error, parameter=name, loss=relative(shared, plain), nonzero=float(sum(g.norm() for g in wanted.values())),
                metrics=max(relative(shared_sums[name], plain_sums[name]) for name in plain_sums),
                rows=[int(metrics[f"espalier/rows_{kind}"].aggregate()) for kind in ("run", "without_sharing")])


def log_probs(pair, dtype, **settings):
    """The largest distance of a response token's log-prob and entropy."""
    found = []
    for engine in pair:
        data = mini_batch(dtype, **settings)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]
        found.append([no_padding_2_padding(output[name], data) for name in ("log_probs", "entropy")])
    distance = [float((a - b).abs().max()) for a, b in zip(*found)]
    return dict(log_probs=distance[0], entropies=distance[1], largest=float(found[0][0].abs().max()))


def rounding(pair, exact, options, **settings):
    """How far plain and shared of a narrower type are from the float64 gradient, over all parameters."""
    loss = functools.partial(ppo_loss, config=actor(**options))
    size = sum(g.square().sum() for g in exact.values())
    out = {}
    for kind, engine in zip(("plain", "shared"), pair):
        found = update(engine, mini_batch(torch.float32, **settings), loss)[2]
        out[kind] = float((sum((found[n] - exact[n]).square().sum() for n in exact) / size).sqrt())
    return out


class Notes(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def fsdp1(kind, pair):
    """Some of the cases above under FSDP1, in which a prompt's activations are always recomputed."""
    cases = {name: LOSSES[name] for name in ("vanilla", "gspo_all", "seq-mean-token-mean")}
    out = {f"{kind}_{name}": compare(pair, torch.float64, options, {}) for name, options in cases.items()}
    out[f"{kind}_small_waves"] = compare(pair, torch.float64, dict(entropy_coeff=.1), dict(SETTINGS["small_waves"]))
    out[f"{kind}_log_probs"] = log_probs(pair, torch.float64)
    out[f"{kind}_steps"] = steps(pair)
    return out


def verified(pair, notes, **changes):
    """ESPALIER_VERIFY: the table of a first update, then an update whose prompts lose half their gradients (waves are small, so that no
    plan without trunks is as fast)."""
    pair[1].options = dataclasses.replace(pair[1].options, verify=True)
    loss = functools.partial(ppo_loss, config=actor())
    wanted, found = (update(engine, mini_batch(torch.float32, **SETTINGS["small_waves"]), loss)[2] for engine in pair)
    out = dict(table=[line for line in notes.lines if "the first update" in line], gradient=worst(found, wanted)[0], rows=pair[1].shared_rows)
    espalier.verl.register(verify=True)  # options of engines that are made from now on
    other = engines(**changes)[1]
    espalier.verl.register()
    gathered = Trunk.gathered
    Trunk.gathered = lambda self: [x / 2 if i % 4 == 1 else x for i, x in enumerate(gathered(self))]
    try:
        update(other, mini_batch(torch.float32, **SETTINGS["small_waves"]), loss)
    except Error as error:
        out["error"] = [error.kind, str(error)[:200]]
    finally:
        Trunk.gathered = gathered
    return out


def steps(pair):
    """Weights after two whole steps of verl's train_batch: clipping and the optimizer are verl's."""
    weights = lambda engine: {name: full(p).detach().clone() for name, p in engine.module.named_parameters()}
    begin = weights(pair[0])
    for engine in pair:
        for seed in (6, 7):
            with engine.train_mode():
                engine.train_batch(mini_batch(torch.float64, seed=seed), functools.partial(ppo_loss, config=actor()))
    return dict(weights=worst(weights(pair[1]), weights(pair[0]))[0], moved=worst(weights(pair[0]), begin)[0])


def plain_with_a_note(pair, notes):
    """What cannot be shared: the note, and whether the gradient is verl's own to the last bit."""
    out = {}
    cases = {"geo_mean": (dict(loss_mode="geo_mean"), {}), "kl_cov": (dict(loss_mode="kl_cov"), {}),
             "batch_normalize": (dict(loss_mode="bypass_mode", rollout_correction=dict(bypass_mode=True, rollout_is="token",
                                                                                      rollout_is_batch_normalize=True)), {}),
             "sum_pi_squared": ({}, dict(calculate_sum_pi_squared=True)), "temperatures": ({}, dict(temperature=torch.tensor([.5, 1.0]))),
             "positions": ({}, dict(shifted=True))}
    for case, (options, settings) in cases.items():
        notes.lines.clear()
        loss = functools.partial(ppo_loss, config=actor(**options))
        grads = []
        for engine in pair:
            data = mini_batch(torch.float64, **{k: v for k, v in settings.items() if k not in ("temperature", "shifted")})
            if "temperature" in settings:
                tu.assign_non_tensor(data, temperature=None)
                data["temperature"] = settings["temperature"].repeat(len(data) // 2 + 1)[:len(data)]
            if "shifted" in settings and RANK == WORLD - 1:  # on one rank only: all must fall back
                data["position_ids"] = torch.nested.nested_tensor_from_jagged(data["position_ids"].values() + 1, data["position_ids"].offsets())
            grads.append(update(engine, data, loss)[2])
        out[case] = dict(notes=list(notes.lines), same=all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0]))
    return out


def main():
    notes = Notes()
    logging.getLogger("espalier").addHandler(notes)
    if RANK == 0:
        verl_actor.write_model(FOLDER / "model")
    dist.barrier()
    results = {}
    with all_float64():
        pair = engines(**WIDE)
        for name, options in LOSSES.items():
            results[name] = compare(pair, torch.float64, options, {})
        for name, settings in SETTINGS.items():
            results[name] = compare(pair, torch.float64, dict(entropy_coeff=.1), copy.copy(settings))
        usual, pair[1].options = pair[1].options, dataclasses.replace(pair[1].options, trunk_state="recompute")
        results["recompute"] = compare(pair, torch.float64, dict(entropy_coeff=.1), dict(max_token_len_per_gpu=170))
        pair[1].options = usual
        results["log_probs"] = log_probs(pair, torch.float64)
        results["plain"] = plain_with_a_note(pair, notes)
        results["lora"] = compare(engines(lora_rank=4, lora_alpha=8, **WIDE), torch.float64, {}, {})
        results["steps"] = steps(pair)
        for kind, options in {"fsdp1": {}, "fsdp1_own_parameters": dict(use_orig_params=True)}.items():
            results.update(fsdp1(kind, engines(strategy="fsdp", **options, **WIDE)))
        results["fsdp1_lora"] = compare(engines(strategy="fsdp", lora_rank=4, lora_alpha=8, **WIDE), torch.float64, {}, {})
        loss = functools.partial(ppo_loss, config=actor(**SMOOTH))
        # FSDP1 has one flat parameter for what FSDP2 has by name.
        exact = {kind: update(engines(strategy=kind, **WIDE)[0], mini_batch(torch.float64), loss)[2] for kind in ("fsdp2", "fsdp")}
    pair = engines()
    results["verified"] = verified(pair, notes)
    notes.lines.clear()
    results["verified_fsdp1"] = verified(engines(strategy="fsdp"), notes, strategy="fsdp")
    for name, other in {"float32": pair, "checkpointing": engines(enable_gradient_checkpointing=True), "bfloat16": engines(**BFLOAT),
                        "fsdp1_bfloat16": engines(strategy="fsdp", enable_gradient_checkpointing=True, **BFLOAT)}.items():
        results[name] = rounding(other, exact["fsdp" if name.startswith("fsdp1") else "fsdp2"], SMOOTH)
        results[name]["checkpointing"] = any(getattr(module, "gradient_checkpointing", False) for module in other[1].module.modules())
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results, default=float))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
