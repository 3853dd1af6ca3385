"""Tiny models of Megatron-Core, with its own local layers and its own attention."""

import re
import zlib

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.distributed.nn.functional import all_gather

from hybrids import hybrid, with_delta_nets

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks for the name where Transformer Engine is not installed, too
    moe_utils.te_general_gemm = None
if not isinstance(multi_latent_attention.TELinear, type):  # 0.16.1 asks whether a layer is one
    multi_latent_attention.TELinear = type("TELinear", (), {})

VOCABULARY = 96
YARN = dict(rotary_scaling_factor=4.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0,
            correction_range_round_to_int=True)


class Norm(torch.nn.Module):
    """RMSNorm. Megatron refuses torch's own under sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Causal(torch.nn.Module):
    """Causal attention, for models whose own core is Transformer Engine's alone: Megatron's local one takes no latent heads, no context parallelism and
    no packed rows."""
    espalier_plain_attention = True

    def __init__(self, config, softmax_scale=None, **_):
        super().__init__()
        self.scale = softmax_scale or config.kv_channels ** -.5

    def forward(self, q, k, v, attention_mask, packed_seq_params=None, **_):
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q_padded
            ends = packed_seq_params.cu_seqlens_q if ends is None else ends
            which = torch.bucketize(torch.arange(len(q)), ends[1:].long(), right=True)
            return self.attend(q[:, None], k[:, None], v[:, None], torch.arange(len(q))[:, None], which[:, None] != which)[:, 0]
        place, ranks = torch.arange(len(q)), parallel_state.get_context_parallel_world_size()
        if ranks > 1:  # rank r has pieces r and 2 cp - 1 - r of the rows
            k, v = (torch.cat(all_gather(x, group=parallel_state.get_context_parallel_group())) for x in (k, v))
            pieces = torch.arange(len(k)).chunk(2 * ranks)
            places = [torch.cat([pieces[r], pieces[-1 - r]]) for r in range(ranks)]
            place, k, v = places[parallel_state.get_context_parallel_rank()], *(x[torch.cat(places).argsort()] for x in (k, v))
        return self.attend(q, k, v, place[:, None])

    def attend(self, q, k, v, place, hidden=False):
        """`place` [rows, 1]: of each row among the keys. `hidden`: keys that a row does not see besides later ones."""
        if k.shape[2] != q.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = torch.einsum("sbhd,tbhd->bhst", q, k) * self.scale
        scores = scores.masked_fill((torch.arange(len(k)) > place) | hidden, float("-inf"))
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


DELTA_NET = dict(linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
                 linear_num_value_heads=4)
MAMBA = dict(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2, mamba_num_heads=8)


def configuration(tp=1, pp=1, cp=1, ep=1, vpp=None, sp=False, mla=False, gdn=False, pattern=None, dtype=torch.float64, **more):
    settings = dict(
        num_layers=4 if pp > 1 else 2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, expert_model_parallel_size=ep,
        virtual_pipeline_model_parallel_size=vpp, sequence_parallel=sp, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
        pipeline_dtype=dtype, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, variable_seq_lengths=pp > 1, deallocate_pipeline_outputs=pp > 1, init_method_std=.12,
        moe_token_dispatcher_type="alltoall")
    if vpp:  # both neighbours of a stage are one rank, whose messages would swap otherwise
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    if ep > 1:
        settings.update(expert_tensor_parallel_size=1)
    if mla:
        del settings["num_query_groups"]
        settings.update(q_lora_rank=16, kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="rope")
    if gdn:
        settings.update(DELTA_NET, num_layers=8 if vpp or pp > 2 else 4, experimental_attention_variant="gated_delta_net", linear_attention_freq=4)
    if pattern:
        settings.update(**DELTA_NET if "G" in pattern else {}, **MAMBA if "M" in pattern else {}, num_layers=len(pattern.replace("|", "")))
    settings.update(more)
    config = (MLATransformerConfig if mla else TransformerConfig)(**settings)
    config.pattern = pattern  # of a HybridModel (hybrids.py)
    for name, value in YARN.items():  # where GPTModel looks for them
        setattr(config, f"yarn_{name}", value)
    return config


def _layer(config, packed):
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm,
                                    multi_latent_attention=config.multi_latent_attention)
    parts = spec.submodules
    core = Causal if packed or config.multi_latent_attention or config.context_parallel_size > 1 else None
    if config.sequence_parallel:
        for owner, names in ((parts, ("input_layernorm", "pre_mlp_layernorm")),
                             (parts.self_attention.submodules, ("q_layernorm", "k_layernorm", "kv_layernorm"))):
            for name in names:
                if "Identity" not in str(getattr(owner, name, None) or "Identity"):
                    setattr(owner, name, Norm)
    if core is not None:
        parts.self_attention.submodules.core_attention = core
    return spec


def chunks_of(config, tied=False, position="rope", packed=False, **more):
    """The chunks of this rank. `packed`: for calls with packed rows, too."""
    model_parallel_cuda_manual_seed(3)
    if config.pattern:
        core = Causal if packed or config.context_parallel_size > 1 else DotProductAttention
        out = [hybrid(config, config.pattern, VOCABULARY, Norm, core, tied, position).to(config.params_dtype)]
        draw(out)
        return out
    vpp = config.virtual_pipeline_model_parallel_size
    out = []
    for stage in range(vpp) if vpp else [None]:
        layer = _layer(config, packed)
        delta_nets = getattr(config, "experimental_attention_variant", None) == "gated_delta_net"
        if config.sequence_parallel or delta_nets:
            layers = [layer] * get_num_layers_to_build(config, vp_stage=stage)
            layers = with_delta_nets(layer, len(layers), get_transformer_layer_offset(config, vp_stage=stage), Norm) if delta_nets else layers
            layer = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
        model = GPTModel(config=config, transformer_layer_spec=layer, vocab_size=VOCABULARY, max_sequence_length=64,
                         pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                         post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage), position_embedding_type=position,
                         parallel_output=True, share_embeddings_and_output_weights=tied, vp_stage=stage, **more)
        out.append(model.to(config.params_dtype))
    draw(out)
    return out


def logged_router_losses():
    """{name: sum over layers and micro-batches} of the router losses that Megatron has logged since the last call."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        from megatron.core.transformer.moe import moe_logging
        found = {name: float(entry.values.sum()) for name, entry in moe_utils.get_moe_metrics_tracker().metrics.items()}
        moe_logging.destroy_moe_metrics_tracker()
    else:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: float(entry["values"].sum()) for name, entry in tracker.items()}
        tracker.clear()
    return found


def draw(chunks):
    """Weights by name, the same in every layout: drawn whole, cut at this rank's place."""
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            shape, cut = list(p.shape), getattr(p, "partition_dim", -1) if getattr(p, "tensor_model_parallel", False) and ranks > 1 else -1
            if cut >= 0:
                shape[cut] *= ranks
            generator = torch.Generator().manual_seed(zlib.crc32(global_name(chunk, name).encode()))
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) * .12 + ("norm" in name and p.dim() == 1)
            p.data.copy_(whole.chunk(ranks, cut)[rank] if cut >= 0 else whole)


def global_name(chunk, name):
    """A parameter's name with the number of its layer and of its expert in the whole model."""
    name = re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{chunk.decoder.layers[int(found[1])].layer_number}.", name)
    ranks, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    local = (chunk.config.num_moe_experts or 0) // ranks
    return re.sub(r"local_experts\.(\d+)\.", lambda found: f"local_experts.{int(found[1]) + local * rank}.", name)
