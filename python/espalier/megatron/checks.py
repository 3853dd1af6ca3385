"""Refuses by name, before anything runs, what would give wrong gradients without an error, or an error from the depths of Megatron."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from espalier.errors import Unsupported
from espalier.megatron import mixers

_CORES = ("TEDotProductAttention",)  # of megatron.core.extensions, which only a machine with Transformer Engine imports
_UNKNOWN_ROWS = "a step's calls have other rows and another number than its micro-batches"

# (field of the config, what is refused, what is expected, why). A field that a version of Megatron lacks is not in use.
_ALWAYS: list[tuple[str, Any, str, str]] = [
    ("fp8", bool, "None", "scales of a call depend on its rows"),
    ("fp4", bool, "None", "scales of a call depend on its rows"),
    ("enable_cuda_graph", bool, "False", _UNKNOWN_ROWS),
    ("external_cuda_graph", bool, "False", _UNKNOWN_ROWS),
    ("cuda_graph_impl", lambda value: value not in (None, "none"), "none", _UNKNOWN_ROWS),
    ("tp_comm_overlap", bool, "False", "its buffers have one number of rows"),
    ("overlap_moe_expert_parallel_comm", bool, "False", "it replaces the schedule's forward"),
    ("delay_wgrad_compute", bool, "False", "gradients of weights are computed behind the backward"),
    ("defer_embedding_wgrad_compute", bool, "False", "gradients of the head are computed behind the backward"),
    ("hybrid_context_parallel", bool, "False", "the trainer lays rows out by its own plan"),
    ("dynamic_context_parallel", bool, "False", "the trainer lays rows out by its own plan"),
    ("num_microbatches_with_partial_activation_checkpoints", bool, "None", _UNKNOWN_ROWS),
    ("mtp_num_layers", bool, "None or 0", "predictions of later tokens read across the end of a prompt"),
    ("fine_grained_activation_offloading", bool, "False", "the order of forwards and backwards is another one"),
    ("moe_paged_stash", bool, "False", "the order of forwards and backwards is another one"),
    ("cpu_offloading", bool, "False", "the order of forwards and backwards is another one"),
    ("qk_clip", bool, "False", "it needs the largest attention logits, which the kernels do not return"),
    ("log_max_attention_logit", bool, "False", "it needs the largest attention logits, which the kernels do not return"),
    ("experimental_attention_variant", lambda value: value not in (None, "gated_delta_net"), "None or gated_delta_net",
     "its layers choose keys over a whole call"),
    ("moe_expert_capacity_factor", lambda value: value is not None, "None", "which tokens are dropped depends on the call"),
    ("moe_expert_rank_capacity_factor", lambda value: value is not None, "None", "which tokens are dropped depends on the call"),
    ("moe_token_dropping", bool, "False", "which tokens are dropped depends on the call"),
    ("moe_input_jitter_eps", bool, "None", "noise differs from rollout to rollout"),
    ("moe_router_force_load_balancing", bool, "False", "random choices differ from rollout to rollout"),
    ("moe_router_force_biased", lambda value: value is not None, "None", "random choices differ from rollout to rollout"),
    ("moe_enable_routing_replay", bool, "False, and give rollouts with routed_experts", "its records are read in the order of forwards"),
    ("moe_ncclep_static_shape", bool, "False", "its buffers have one number of rows"),
]
_BALANCING = {"sinkhorn": "assignments depend on the whole call", "quantile_balancing": "assignments depend on the whole call",
              "seq_aux_loss": "its sequences are those of a call", "global_aux_loss": "its counts run over calls"}


def check(chunks: Any) -> None:
    """Raises `espalier.Unsupported` with the name of anything that cannot be shared exactly, and the setting that would do. `chunks`: a built model, or
    the list of its chunks on this rank."""
    for chunk in chunks if isinstance(chunks, (list, tuple)) else [chunks]:
        _check_wrapper(chunk)
        inner = _inner(chunk)
        check_config(inner)
        _check_modules(inner)


def check_config(inner: Any) -> None:
    """The part of `check` that a trainer may change between steps."""
    config = inner.config
    for field, refused, expected, why in _ALWAYS:
        value = getattr(config, field, None)
        if refused(value):
            raise Unsupported(f"config.{field}", f"{expected}: {why}", repr(value), f"Set {field} to {expected}")
    if inner.training:
        for field in ("hidden_dropout", "attention_dropout"):
            if getattr(config, field, 0):
                raise Unsupported(f"config.{field}", "0: dropout differs from rollout to rollout", repr(getattr(config, field)), f"Set {field} to 0")
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and not config.variable_seq_lengths:
        raise Unsupported("config.variable_seq_lengths", "True with pipeline parallelism: trunks and waves differ in rows", "False",
                          "Set variable_seq_lengths to True")
    if getattr(inner, "position_embedding_type", "") == "mrope" and parallel_state.get_context_parallel_world_size() > 1:
        raise Unsupported("position_embedding_type", "another one with context parallelism: Megatron shards its table itself", "mrope",
                          "Set context_parallel_size to 1")
    window = getattr(config, "window_size", None)
    if window is not None and window[1] != 0:
        raise Unsupported("config.window_size", "(n, 0): rows that see no later row", repr(window), "Set window_size to (n, 0)")
    if config.num_moe_experts:
        _check_experts(config)


def _check_experts(config):
    if parallel_state.get_expert_model_parallel_world_size() > 1 and config.moe_token_dispatcher_type == "allgather":
        raise Unsupported("config.moe_token_dispatcher_type", "alltoall or flex with expert parallelism: ranks differ in rows", "allgather",
                          "Set moe_token_dispatcher_type to alltoall")
    kinds, sizes = balancing_of(config)
    for kind, size in zip(kinds, sizes):
        if kind in _BALANCING and (size or kind in ("sinkhorn", "quantile_balancing")):
            raise Unsupported("config.moe_router_load_balancing_type", f"none or aux_loss: {_BALANCING[kind]}", kind,
                              "Set moe_router_load_balancing_type to aux_loss, or moe_aux_loss_coeff to 0")
    modules = getattr(config, "recompute_modules", None) or ()
    if has_router_losses(config) and (getattr(config, "moe_layer_recompute", False) or config.recompute_granularity == "selective" and "moe" in modules):
        raise Unsupported("config.recompute_modules", "no moe together with router losses: the layer does not know its rows when it runs again", "moe",
                          "Take moe out of recompute_modules, set recompute_granularity to full, or the losses' coefficients to 0")


def balancing_of(config):
    """(kinds, coefficients) of the router's balancing losses."""
    kinds, sizes = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
    return kinds, list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * len(kinds)


def has_router_losses(config):
    """True if a router of this model adds a loss of its own."""
    kinds, sizes = balancing_of(config)
    return bool(config.num_moe_experts) and (bool(config.moe_z_loss_coeff) or any(kind == "aux_loss" and size for kind, size in zip(kinds, sizes)))


def _inner(chunk):
    from espalier.megatron.schedule import inner_of
    try:
        return inner_of(chunk)
    except (RuntimeError, AttributeError):
        raise Unsupported("model", "a Megatron-Core model with a decoder, or its chunks", type(chunk).__name__) from None


def _check_wrapper(chunk):
    while chunk is not None:
        if type(chunk).__name__ in ("FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel"):
            raise Unsupported("model", "Megatron's DistributedDataParallel", type(chunk).__name__, "Switch Megatron's FSDP off")
        chunk = getattr(chunk, "module", None)


def _check_modules(inner):
    if getattr(inner, "encoder", None) is not None or getattr(inner, "vision_model", None) is not None:
        raise Unsupported(type(inner).__name__, "a decoder alone", "an encoder or a tower beside it",
                          "Train a model of text here; espalier.hf shares prompts with images")
    if getattr(inner, "mtp_process", False) or getattr(inner, "mtp", None) is not None:
        raise Unsupported(f"{type(inner).__name__}.mtp", "none: predictions of later tokens read across the end of a prompt", "one",
                          "Set mtp_num_layers to None, or leave the part behind / out of hybrid_layer_pattern")
    if getattr(inner, "position_embedding_type", "rope") == "relative":
        raise Unsupported("position_embedding_type", "rope, yarn, mrope, learned_absolute or none", "relative")
    found = 0
    for name, module in inner.named_modules():
        if isinstance(module, Attention):
            found += 1
            _check_attention(name, module)
        elif mixers.is_recurrent(module):
            found += 1
        elif name.rpartition(".")[2] in ("self_attention", "cross_attention", "mixer") and "Identity" not in type(module).__name__:
            raise Unsupported(name, "SelfAttention, MLASelfAttention, GatedDeltaNet or MambaMixer of Megatron-Core", type(module).__name__,
                              "Use a layer specification of Megatron-Core")
    if not found and len(list(inner.decoder.layers)):
        raise Unsupported(type(inner).__name__, "attention or recurrent layers of Megatron-Core", "none")


def _check_attention(name, module):
    core = getattr(module, "core_attention", None)
    if not isinstance(module, (SelfAttention, MLASelfAttention)):
        raise Unsupported(name, "SelfAttention or MLASelfAttention", type(module).__name__, "Use a layer specification of Megatron-Core")
    plain = type(core) is DotProductAttention or type(core).__name__ in _CORES or getattr(core, "espalier_plain_attention", False)
    if not plain:
        raise Unsupported(f"{name}.core_attention", "DotProductAttention or TEDotProductAttention", type(core).__name__,
                          "If its forward is causal softmax attention by scale, window and softmax_offset, set espalier_plain_attention = True on its class")
    if module.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise Unsupported(f"{name}.attn_mask_type", "causal", module.attn_mask_type.name)
