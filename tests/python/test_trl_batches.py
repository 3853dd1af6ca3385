"""TRL's real DPO, KTO, reward, SFT, distillation and GKD trainers, plain against shared: losses and gradients of two accumulation windows, float32.

Where the two differ by more than 4e-6, the shared trainer may be at most twice as far from the plain trainer in float64 as the plain one is.
"""

import logging

import pytest
import torch

trl = pytest.importorskip("trl")
pytest.importorskip("datasets")
shared = pytest.importorskip("espalier.trl")
gkd = pytest.importorskip("trl.experimental.gkd")

import trl_batches as data  # noqa: E402
from test_trl_trainer import LEAST_ALLOWED, mixture  # noqa: E402
from trl_batches import example, run  # noqa: E402

DPO_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
              "discopop", "sft", "sigmoid_norm")
SMOOTHED = {"exo_pair": .1, "robust": .1, "aot": .1, "aot_unpaired": .1}
DPO = {**{loss: dict(loss_type=[loss], label_smoothing=SMOOTHED.get(loss, 0)) for loss in DPO_LOSSES},
       "two losses": dict(loss_type=["sigmoid", "sft"], loss_weights=[.8, .2]), "weighting": dict(use_weighting=True), "ld_alpha": dict(ld_alpha=.5),
       "precomputed reference": dict(precompute_ref_log_probs=True), "cut to 34": dict(max_length=34),
       **{f"f_divergence {kind}": dict(f_divergence_type=kind, f_alpha_divergence_coef=.5) for kind in ("forward_kl", "js_divergence", "alpha_divergence")},
       "checkpointing": dict(gradient_checkpointing=True), "autocast": dict(bf16=True), "padded to 64": dict(pad_to_multiple_of=64)}
KTO = {"kto": {}, "apo_zero_unpaired": dict(loss_type="apo_zero_unpaired"), "weights": dict(desirable_weight=1.3, undesirable_weight=.7),
       "precomputed reference": dict(precompute_ref_log_probs=True)}
REWARD = {"pairs": {}, "centred": dict(center_rewards_coefficient=.1), "margin": dict(dataset=data.margins), "checkpointing": dict(gradient_checkpointing=True)}
SFT = {"nll": {}, "dft": dict(loss_type="dft"), "all tokens": dict(completion_only_loss=False), "texts": dict(dataset=data.texts),
       "checkpointing": dict(gradient_checkpointing=True), "autocast": dict(bf16=True), "cut to 40": dict(max_length=40),
       "padded to 64": dict(pad_to_multiple_of=64), "shuffled": dict(shuffle_dataset=True),
       "another field": dict(dataset=data.stories, dataset_text_field="story"), "assistants": dict(dataset=data.chats, chat=True, assistant_only_loss=True)}
DISTILLATION = {"reverse": {}, "forward": dict(beta=0.0), "jsd": dict(beta=.5, temperature=.7), "checkpointing": dict(gradient_checkpointing=True),
                "autocast": dict(bf16=True), "padded to 64": dict(pad_to_multiple_of=64), "short answers": dict(max_completion_length=4),
                "disable_dropout": dict(disable_dropout=True), "in order": dict(shuffle_dataset=False)}
GKD = {"jsd": {}, "forward": dict(beta=0.0, gradient_checkpointing=True), "reverse": dict(beta=1.0), "temperature": dict(temperature=2.0),
       "autocast": dict(bf16=True), "padded to 64": dict(pad_to_multiple_of=64), "cut to 40": dict(max_length=40), "on policy": dict(lmbda=1.0),
       "teacher's answers": dict(seq_kd=True), "dropout kept": dict(disable_dropout=False)}
# Of SFT's, distillation's and GKD's options those that have no part in what a batch computes, with the reason.
NO_PART = {
    "chat_template_path dataset_kwargs dataset_num_proc eos_token pad_token model_init_kwargs trust_remote_code teacher_model_init_kwargs "
    "teacher_model_name_or_path teacher_model_revision chat_template_kwargs": "how models, tokenizers and data are loaded",
    "eval_packing log_completions log_unique_prompts num_completions_to_print": "evaluation and logs",
    "activation_offloading": "needs a GPU",
    "packing packing_strategy padding_free": "batches without sharing: test_packed_batches_run_plain_with_one_note",
    "router_aux_loss_coef": "test_a_router_s_loss_is_the_plain_trainer_s",
    "truncation_mode": "keep_end cuts the tokens that rows share: test_rows_cut_at_their_start_run_as_trl_s",
    "cache_implementation ds3_gather_for_generation generation_kwargs max_new_tokens max_tool_calling_iterations min_p repetition_penalty top_k top_p "
    "use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size": "how answers are sampled"}
KINDS = {
    "dpo": (trl.DPOTrainer, shared.DPOTrainer, trl.DPOConfig, dict(dataset=data.preferences, reference=True), DPO),
    "kto": (trl.KTOTrainer, shared.KTOTrainer, trl.KTOConfig, dict(dataset=data.unpaired, reference=True, per_device_train_batch_size=4), KTO),
    "reward": (trl.RewardTrainer, shared.RewardTrainer, trl.RewardConfig,
               dict(dataset=data.preferences, make=data.scorer, per_device_train_batch_size=2, disable_dropout=True), REWARD),
    "sft": (trl.SFTTrainer, shared.SFTTrainer, trl.SFTConfig, dict(dataset=data.answers), SFT),
    "distillation": (data.answering(trl.DistillationTrainer), data.answering(shared.DistillationTrainer), trl.DistillationConfig,
                     dict(dataset=data.prompts, teacher=data.teacher, max_completion_length=8), DISTILLATION),
    "gkd": (data.sampling(gkd.GKDTrainer), data.sampling(shared.GKDTrainer), gkd.GKDConfig, dict(dataset=data.chats, teacher=data.teacher, chat=True, lmbda=0.0), GKD),
}
CASES = [(kind, case) for kind, (*_, cases) in KINDS.items() for case in cases]


def settings_of(kind, case):
    plain, ours, config, common, cases = KINDS[kind]
    settings = {**common, **cases[case]}
    return plain, ours, lambda trainer, folder, **more: run(trainer, config, settings["dataset"], folder, **{
        name: value for name, value in {**settings, **more}.items() if name != "dataset"})


def distance(plain, other):
    """The largest relative distance of a window's gradient, and of a loss in units of its terms."""
    assert len(plain.grads) == len(other.grads) == 2 and len(plain.losses) == len(other.losses) == 4
    worst = 0.0
    for a, b in zip(plain.grads, other.grads):
        assert set(a) == set(b) and any(g.any() for g in a.values())
        off = sum((a[n] - b[n]).double().square().sum() for n in a) / sum(g.double().square().sum() for g in a.values())
        worst = max(worst, float(off) ** .5)
    return worst, max(abs(a - b) / (1 + abs(a)) for a, b in zip(plain.losses, other.losses))


def compare(plain, ours, exact, agreed=bool):
    """`exact()` runs TRL's trainer in float64, where the least that is allowed is not enough. `agreed`: the same answer on every rank."""
    found = distance(plain, ours)
    if agreed(max(found) > LEAST_ALLOWED):
        truth = exact()
        off, own = distance(truth, ours), distance(truth, plain)
        assert max(off) <= 2 * max(own), (found, off, own)  # a loss is one number, and may by chance be exact in one of the two
    assert found[0] > 0, "not one bit differs: nothing was shared"


def in_float64(kind, **more):
    """Settings for the same run without rounding."""
    make = more.get("make", KINDS[kind][3].get("make", example.small_model))
    return {**more, "make": lambda: make().double(), "bf16": False}


@pytest.mark.parametrize("kind, case", CASES, ids=[" ".join(pair) for pair in CASES])
def test_gradients_are_the_plain_trainer_s(kind, case, tmp_path, caplog):
    plain_class, our_class, made = settings_of(kind, case)
    with caplog.at_level(logging.WARNING, "espalier"):
        plain, ours = made(plain_class, tmp_path / "plain"), made(our_class, tmp_path / "ours")
    assert not [record.message for record in caplog.records if "not shared" in record.message]
    compare(plain, ours, lambda: made(plain_class, tmp_path / "exact", **in_float64(kind)))
    counts = ours.counts
    assert counts["run"] == counts["unique"] < .75 * counts["all"] == .75 * plain.counts["all"], counts
    assert ours.shared_rows["run"] >= counts["run"]  # a reference that was computed ahead comes on top


def test_every_loss_of_the_configurations_is_here():
    """A loss that a new version of TRL brings fails here until somebody has looked at it."""
    import re
    known = lambda config: config.__dataclass_fields__["loss_type"].metadata
    assert set(re.findall(r"'(\w+)'", known(trl.DPOConfig)["help"])) == set(DPO_LOSSES)
    assert known(trl.KTOConfig)["choices"] == ["kto", "apo_zero_unpaired"]
    assert known(trl.SFTConfig)["choices"] == ["nll", "dft", "chunked_nll"]  # the last is another name of the first


def test_every_option_of_the_configurations_is_here():
    """An option that a new version of TRL brings fails here until somebody has looked at it."""
    import dataclasses
    import transformers
    inherited = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    no_part = {name for names in NO_PART for name in names.split()}
    for kind in ("sft", "distillation", "gkd"):
        _, _, config, common, cases = KINDS[kind]
        run_here = set(common) | {option for settings in cases.values() for option in settings}
        own = {f.name for f in dataclasses.fields(config)} - inherited
        # GKD's loss is its own: SFT's options of losses and texts are there because it inherits them.
        of_sft = {"loss_type", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "shuffle_dataset"} if kind == "gkd" else set()
        assert own - no_part - run_here - of_sft == set(), kind


def test_rows_cut_at_their_start_run_as_trl_s(tmp_path):
    """With truncation_mode keep_end rows lose the tokens that they share."""
    plain_class, our_class, made = settings_of("sft", "nll")
    more = dict(max_length=40, truncation_mode="keep_end")
    plain, ours = made(plain_class, tmp_path / "plain", **more), made(our_class, tmp_path / "ours", **more)
    assert max(distance(plain, ours)) <= LEAST_ALLOWED


def test_the_user_s_attention_is_kept_outside_of_shared_calls(tmp_path):
    """Generation and evaluation run what the user chose."""
    seen = []

    def watched(trainer):
        forward = trainer.model.forward
        trainer.model.forward = lambda *args, **kwargs: (seen.append(trainer.model.config._attn_implementation), forward(*args, **kwargs))[1]

    _, ours, made = settings_of("dpo", "sigmoid")
    trainer = made(ours, tmp_path, attention="eager", prepare=watched)
    assert set(seen) == {"eager"} and trainer.model.config._attn_implementation == trainer.ref_model.config._attn_implementation == "eager"
    assert trainer.shared_rows["run"] < trainer.shared_rows["without_sharing"]


@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_a_router_s_loss_is_the_plain_trainer_s(kind, tmp_path):
    """transformers computes it from the router's logits of every token, shared ones included; so large here that it is most of the
    gradient."""
    plain_class, our_class, made = settings_of(kind, next(iter(KINDS[kind][-1])))
    more = dict(make=mixture, router_aux_loss_coef=3.0)
    plain, ours = made(plain_class, tmp_path / "plain", **more), made(our_class, tmp_path / "ours", **more)
    compare(plain, ours, lambda: made(plain_class, tmp_path / "exact", **in_float64(kind, **more)))
    without = made(plain_class, tmp_path / "without", **{**more, "router_aux_loss_coef": 0.0})
    assert distance(without, plain)[0] > .5 and ours.counts["run"] == ours.counts["unique"] < ours.counts["all"]


@pytest.mark.parametrize("case, why", [(dict(packing=True, max_length=64), "cu_seq_lens_q"), (dict(padding_free=True), "cu_seq_lens_q")],
                         ids=["packing", "padding-free"])
def test_packed_batches_run_plain_with_one_note(case, why, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "espalier"):
        trainer = settings_of("sft", "nll")[2](shared.SFTTrainer, tmp_path, max_steps=1, max_length=None, **case) if "packing" not in case else (
            settings_of("sft", "nll")[2](shared.SFTTrainer, tmp_path, max_steps=1, **case))
    notes = [record.message for record in caplog.records if "not shared" in record.message]
    assert len(notes) == 1 and why in notes[0] and trainer.shared_rows["run"] == 0, notes


def without_sharing():
    """A model whose layers say that they look ahead."""
    model = example.small_model()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def test_a_model_that_turns_out_not_to_share_runs_plain_with_one_note(tmp_path, caplog):
    plain_class, our_class, made = settings_of("dpo", "sigmoid")
    with caplog.at_level(logging.WARNING, "espalier"):
        plain, ours = made(plain_class, tmp_path / "plain", make=without_sharing), made(our_class, tmp_path / "ours", make=without_sharing)
    notes = [record.message for record in caplog.records if "not shared" in record.message]
    assert 1 <= len(notes) <= 2 and ours.shared_rows["run"] == 0 and ours.losses == plain.losses, notes
    assert all(torch.equal(a[n], b[n]) for a, b in zip(plain.grads, ours.grads) for n in a)


def test_switched_off(tmp_path):
    class Off(shared.SFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, shared_prompts=False, **kwargs)

    plain, _, made = settings_of("sft", "nll")
    assert made(Off, tmp_path / "off").losses == made(plain, tmp_path / "plain").losses
