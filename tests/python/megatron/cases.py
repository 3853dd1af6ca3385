"""The layouts and models that the tests of espalier.megatron run, by the number of ranks. `models.configuration` takes most of a case; `ranks.py` takes
the rest: `kind`, `more` of the rollouts, `wave` (rows of a wave), `tied`, `position`."""

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])

CASES = {
    1: {
        "dense": dict(),
        "tied": dict(tied=True, wave=6),
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
        "one_wave": dict(kind="flat", wave=4096),
        "per_token": dict(calculate_per_token_loss=True),
        "float32": dict(dtype="float32"),
    },
    2: {
        "tp": dict(tp=2, qk_layernorm=True),
        "tp_sp": dict(tp=2, sp=True),
        "tp_sp_tied_qk_norm_recompute": dict(tp=2, sp=True, qk_layernorm=True, tied=True, **FULL),
        "tp_sp_selective": dict(tp=2, sp=True, **SELECTIVE),
        "tp_sp_sinks": dict(tp=2, sp=True, softmax_type="learnable"),
        "pp": dict(pp=2),
        "pp_tied_recompute": dict(pp=2, tied=True, kind="flat", wave=6, **FULL),
        "pp_per_token": dict(pp=2, calculate_per_token_loss=True, kind="flat"),
        "vpp": dict(pp=2, vpp=2),
        "vpp_tied_recompute": dict(pp=2, vpp=2, tied=True, **FULL),
    },
}
# Run with every version and in every share of the tests.
DAILY = {1: ("dense",), 2: ("tp_sp_tied_qk_norm_recompute", "vpp_tied_recompute")}
# Run with the oldest version, too.
OLDEST = {1: ("dense", "selective_recompute", "window_every_second"), 2: ("tp_sp_tied_qk_norm_recompute", "vpp_tied_recompute", "pp_per_token")}
