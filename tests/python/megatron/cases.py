"""The layouts and models that the tests of espalier.megatron run, by the number of ranks. `models.configuration` takes most of a case; `ranks.py` takes
the rest: `refused` (the place of an error), `kind`, `more` of the rollouts, `wave` (rows of a wave), `tied`, `position`, `lora` (its rank), `ddp` (optimizers.py), `fault` (faults.py).
`tolerance`: where Megatron rounds to float32 itself, here counts of tokens that are masked."""

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_router_dtype="fp64", moe_ffn_hidden_size=24, moe_router_load_balancing_type="none")
RECORDED = dict(recorded=True, moe_enable_routing_replay=True, **EXPERTS)
ROUTED = {**EXPERTS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": .5, "moe_z_loss_coeff": .3}
LATENT = dict(mla=True)
ALLGATHER = dict(moe_token_dispatcher_type="allgather")

CASES = {
    1: {
        "dense": dict(),
        "tied": dict(tied=True, wave=6),
        "trunk_with_tokens_of_the_loss": dict(kind="stem", wave=6),
        "qk_norm": dict(qk_layernorm=True, kind="flat"),
        "full_recompute": dict(**FULL),
        "block_recompute": dict(**BLOCK),
        "selective_recompute": dict(**SELECTIVE),
        "window": dict(window_size=(3, 0)),
        "window_every_second": dict(window_size=(3, 0), window_attn_skip_freq=2, softmax_type="learnable"),
        "sinks": dict(softmax_type="learnable", **FULL),
        "off_by_one": dict(softmax_type="off-by-one", kind="flat"),
        "yarn": dict(position="yarn", kind="flat"),
        "mrope": dict(position="mrope", mrope_section=[1, 1, 2], kind="flat"),
        "learned_positions": dict(position="learned_absolute", kind="flat"),
        "nothing_shared": dict(kind="apart"),
        "several_groups": dict(kind="groups"),
        "one_wave": dict(kind="flat", wave=4096),
        "per_token": dict(calculate_per_token_loss=True),
        "float32": dict(dtype="float32"),
        "experts": dict(**EXPERTS),
        "router_losses": dict(**ROUTED),
        "router_losses_per_token_recompute": dict(calculate_per_token_loss=True, **ROUTED, **FULL),
        "router_losses_sigmoid_bias": dict(**{**ROUTED, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        "recorded_experts": dict(**RECORDED),
        "recorded_experts_recompute": dict(kind="stem", wave=6, **RECORDED, **FULL),
        "verify": dict(verify=True),
        "verify_recorded_experts": dict(verify=True, recorded=True, **{**EXPERTS, "moe_router_dtype": "fp32"}),
        "trainer": dict(trainer=True),
        "trainer_padded_rows": dict(trainer="padded rows"),
        "slime": dict(package="slime"),
        "miles": dict(package="miles"),
        "recipe_nemo_rl": dict(recipe="NeMo-RL", module="nemo_rl.models.megatron.train"),
        "recipe_megatron_bridge": dict(recipe="Megatron-Bridge", module="megatron.bridge.training.train"),
        "trainer_verify": dict(trainer=True, verify=True),
        "trainer_one_micro_batch": dict(trainer=True, size=100, values=2),
        "trainer_nothing_shared": dict(trainer=True, apart=True),
        "trainer_router_losses": dict(trainer=True, **ROUTED),
        "lora": dict(lora=4),
        "lora_recompute": dict(lora=4, kind="flat", **FULL),
        "latent": dict(**LATENT),
        "latent_recompute": dict(kind="flat", **LATENT, **FULL),
        "latent_selective": dict(kind="flat", **LATENT, **SELECTIVE),
        "latent_yarn": dict(rope_type="yarn", kind="flat", **LATENT),
        "delta_net": dict(gdn=True),
        "delta_net_deterministic": dict(gdn=True, kind="flat", deterministic_mode=True),
        "delta_net_recompute": dict(gdn=True, kind="stem", wave=6, **FULL),
        "delta_net_experts": dict(gdn=True, attention_output_gate=True, qk_layernorm=True, **ROUTED),
        "delta_net_float32": dict(gdn=True, dtype="float32"),
        "mamba": dict(pattern="M-*-M-"),
        "hybrid_router_losses": dict(pattern="M*EGE", kind="flat", **ROUTED),
        "hybrid_recorded_experts": dict(pattern="ME*E", **RECORDED),
        "mamba_one_response": dict(pattern="M*M", kind="flat", wave=1),
        "mamba_recompute": dict(pattern="*-G-M-", kind="stem", wave=6, **FULL),
        "mamba_float32": dict(pattern="M-*-M-", dtype="float32"),
        "trainer_delta_net": dict(trainer=True, gdn=True),
        "trainer_padded_rows_mamba": dict(trainer="padded rows", pattern="M-*-"),
        "verify_hybrid": dict(verify=True, pattern="*-G-M-"),
    },
    2: {
        "tp": dict(tp=2, qk_layernorm=True),
        "tp_sp": dict(tp=2, sp=True),
        "tp_sp_tied_qk_norm_recompute": dict(tp=2, sp=True, qk_layernorm=True, tied=True, **FULL),
        "tp_sp_trunk_with_tokens_of_the_loss": dict(tp=2, sp=True, kind="stem", wave=6),
        "tp_sp_selective": dict(tp=2, sp=True, **SELECTIVE),
        "tp_sp_sinks": dict(tp=2, sp=True, softmax_type="learnable"),
        "pp": dict(pp=2),
        "pp_tied_recompute": dict(pp=2, tied=True, kind="flat", wave=6, **FULL),
        "pp_per_token": dict(pp=2, calculate_per_token_loss=True, kind="flat"),
        "vpp": dict(pp=2, vpp=2),
        "vpp_trunk_with_tokens_of_the_loss": dict(pp=2, vpp=2, kind="stem", wave=6, calculate_per_token_loss=True),
        "vpp_tied_recompute": dict(pp=2, vpp=2, tied=True, **FULL),
        "ddp": dict(ddp="plain", more=2),
        "ddp_overlap": dict(ddp="overlap"),
        "distributed": dict(ddp="distributed"),
        "distributed_overlap_tied": dict(ddp="both", tied=True),
        "distributed_overlap_per_token": dict(ddp="both", calculate_per_token_loss=True, more=2),
        "distributed_overlap_recompute": dict(ddp="both", kind="flat", **FULL),
        "ddp_overlap_pp_tied": dict(ddp="overlap", pp=2, tied=True),
        "distributed_overlap_tp_sp": dict(ddp="both", tp=2, sp=True, qk_layernorm=True),
        "lora_pp_recompute": dict(lora=4, pp=2, kind="flat", **FULL),
        "lora_distributed_overlap": dict(ddp="both", lora=4),
        "ep": dict(ep=2, **EXPERTS),
        "ep_unequal": dict(ep=2, more=3, **EXPERTS),
        "ep_unequal_recompute": dict(ep=2, more=3, **EXPERTS, **FULL),
        "recorded_experts_pp": dict(pp=2, kind="flat", wave=6, **RECORDED),
        "recorded_experts_ep": dict(ep=2, more=2, **RECORDED),
        "ep_latent": dict(ep=2, kind="flat", **EXPERTS, **LATENT),
        "ep_distributed_overlap_unequal": dict(ddp="both", ep=2, more=3, **EXPERTS),
        "router_losses_ep": dict(ep=2, **ROUTED),
        "router_losses_vpp_recompute": dict(pp=2, vpp=2, **ROUTED, **FULL),
        "router_losses_cp": dict(cp=2, **ROUTED),
        "router_losses_cp_per_token": dict(cp=2, wave=3, calculate_per_token_loss=True, **{**ROUTED, "moe_z_loss_coeff": None}),
        "router_losses_ep_distributed_overlap_per_token": dict(ddp="both", ep=2, calculate_per_token_loss=True, **ROUTED),
        "trainer_pp": dict(trainer=True, pp=2, values=2),
        "trainer_pp_per_token_recompute": dict(trainer=True, pp=2, calculate_per_token_loss=True, **FULL),
        "trainer_vpp": dict(trainer=True, pp=2, vpp=2),
        "trainer_tp_sp": dict(trainer=True, tp=2, sp=True),
        "trainer_ep": dict(trainer=True, ep=2, **EXPERTS),
        "trainer_distributed_overlap": dict(trainer=True, ddp="both"),
        "verify_tp_sp": dict(verify=True, tp=2, sp=True),
        "verify_vpp": dict(verify=True, pp=2, vpp=2),
        "verify_distributed_overlap": dict(verify=True, ddp="both", tied=True),
        "verify_ep": dict(verify=True, ep=2, **{**EXPERTS, "moe_router_dtype": "fp32"}),
        "verify_cp": dict(verify=True, cp=2),
        "another_order": dict(tp=2, another_order=True),
        "refused_lengths_pp": dict(pp=2, variable_seq_lengths=False, refused="config.variable_seq_lengths"),
        "refused_dispatcher_ep": dict(ep=2, refused="config.moe_token_dispatcher_type", **EXPERTS, **ALLGATHER),
        "refused_mrope_cp": dict(cp=2, position="mrope", mrope_section=[1, 1, 2], refused="position_embedding_type"),
        "router_losses_tp_sp": dict(tp=2, sp=True, padding_mask=True, tolerance=2.0**-23, **{**ROUTED, "moe_z_loss_coeff": None}),
        "tp_sp_experts": dict(tp=2, sp=True, **EXPERTS),
        "tp_sp_latent": dict(tp=2, sp=True, **LATENT),
        "pp_latent": dict(pp=2, **LATENT),
        "cp": dict(cp=2),
        "cp_waves": dict(cp=2, kind="flat", wave=6, qk_layernorm=True, tied=True),
        "cp_window_recompute": dict(cp=2, window_size=(3, 0), **FULL),
        "cp_trunk_with_tokens_of_the_loss": dict(cp=2, kind="stem", wave=3),
        "cp_latent": dict(cp=2, **LATENT),
        "cp_latent_yarn": dict(cp=2, kind="flat", wave=6, rope_type="yarn", **LATENT),
        "cp_experts": dict(cp=2, **EXPERTS),
        "cp_per_token": dict(cp=2, calculate_per_token_loss=True, kind="flat"),
        "hybrid_tp_sp": dict(tp=2, sp=True, pattern="*-G-M-"),
        "hybrid_cp": dict(cp=2, pattern="*-G-M-"),
        "delta_net_cp_recompute": dict(cp=2, gdn=True, kind="stem", wave=3, **FULL),
        "hybrid_tp": dict(tp=2, pattern="G-M-", kind="stem", wave=6),
        "hybrid_pp_recompute": dict(pp=2, pattern="*-G-|M-*-", **FULL),
        "hybrid_distributed_overlap": dict(ddp="both", pattern="*-G-M-"),
        "delta_net_vpp": dict(pp=2, vpp=2, gdn=True, kind="flat"),
        "delta_net_tp_sp_ep": dict(tp=2, sp=True, ep=2, gdn=True, kind="flat", **EXPERTS),
    },
    4: {
        "pp": dict(pp=4, tied=True, num_layers=4),
        "vpp": dict(pp=4, vpp=2, num_layers=8),
        "pp_tp_sp": dict(pp=2, tp=2, sp=True, qk_layernorm=True),
        "distributed_overlap_pp_per_token": dict(ddp="both", pp=2, calculate_per_token_loss=True),
        "distributed_overlap_vpp": dict(ddp="both", pp=2, vpp=2),
        "ep_tp_sp_unequal": dict(ep=2, tp=2, sp=True, more=3, **EXPERTS),
        "ep_pp_unequal": dict(ep=2, pp=2, more=3, **EXPERTS),
        "cp_tp_sp": dict(cp=2, tp=2, sp=True),
        "hybrid_pp_tp_sp": dict(pp=2, tp=2, sp=True, pattern="*-G-|M-*-", kind="stem", wave=6),
        "cp_pp_recompute": dict(cp=2, pp=2, **FULL),
    },
}
# Run with every version and in every share of the tests.
DAILY = {1: ("dense", "delta_net"), 2: ("tp_sp_tied_qk_norm_recompute", "vpp_tied_recompute", "distributed_overlap_tied")}
# Run with the oldest version, too.
OLDEST = {1: ("dense", "selective_recompute", "window_every_second", "delta_net", "recorded_experts"), 2: ("tp_sp_tied_qk_norm_recompute", "vpp_tied_recompute", "distributed_overlap_tied", "pp_per_token")}
# Cases that Megatron-Core before 0.17 cannot run, or not beside one rank.
SINCE_0_17 = {"trainer_delta_net": "its GatedDeltaNet takes no packed rows", "delta_net_cp_recompute": "its GatedDeltaNet has no context parallelism",
              "router_losses_cp_per_token": "it weighs router losses per token by the rank's own tokens, so that context parallelism changes them"}
# Faults of faults.py, each in a small step: (ranks, case).
_STEM, _STATES = dict(kind="stem", wave=6), dict(kind="stem", wave=6, pattern="M-*-G-")
FAULTS = {
    **{name: (1, _STEM) for name in (
        "injection_missing_in_one_layer", "gradients_of_values_dropped", "gradients_added_twice", "positions_from_zero",
        "values_of_trunks_begin_with_ones", "closed_before_the_last_wave", "gradients_of_keys_lost", "zeros_of_close_are_ones")},
    **{name: (1, _STATES) for name in (
        "state_of_the_wrong_fork", "tail_of_the_convolution_lost", "gradient_of_a_state_lost", "gradient_of_a_tail_lost", "states_not_carried")},
    "recorded_experts_left_out": (1, dict(kind="flat", wave=6, **RECORDED)),
    "order_of_one_rank_swapped": (2, dict(kind="even", wave=6, pp=2)),
}
for _name, (_ranks, _case) in FAULTS.items():
    CASES[_ranks][f"fault_{_name}"] = dict(fault=_name, **_case)


def in_order(ranks, names):
    """The names with cases of one layout beside each other, which use the same groups of processes (layouts.py)."""
    return sorted(names, key=lambda name: repr([CASES[ranks][name].get(what) for what in ("tp", "pp", "cp", "ep", "vpp")]))
