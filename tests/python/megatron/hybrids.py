"""Tiny models with recurrent layers, of Megatron's own modules in local layers (its own specifications name Transformer Engine's).

`gdn`: a GPTModel whose layers are gated delta nets but for every fourth, as Qwen3-Next has them. `pattern`: a HybridModel, one letter a layer:
`G` gated delta net, `M` Mamba-2, `*` attention, `-` MLP, `E` experts, `|` between pipeline stages.
"""

import copy
import functools

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def delta_net(norm):
    return ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear))


def with_delta_nets(layer, count, first, norm):
    """The specifications of `count` layers like `layer`, of which every fourth of the model keeps its attention."""
    out = []
    for number in range(first, first + count):
        own = layer
        if number % 4 != 3:
            own = copy.deepcopy(layer)
            own.submodules.self_attention = delta_net(norm)
        out.append(own)
    return out


def stack_of(norm, core, experts):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.transformer_layer import MoETransformerLayer
    hybrid_block.TENorm = norm  # the final norm, which no specification names
    layer = lambda **parts: ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=norm, self_attn_bda=get_bias_dropout_add, **parts))
    attention = ModuleSpec(module=SelfAttention, params=dict(attn_mask_type=AttnMaskType.causal), submodules=SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=core, linear_proj=RowParallelLinear))
    mlp = functools.partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    mamba = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear))
    with_mlp = lambda module, mlp: ModuleSpec(module=module, submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add))
    moe = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False) if experts else mlp
    return ModuleSpec(module=hybrid_block.HybridStack, submodules=hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mamba, mamba_bda=get_bias_dropout_add)),
        gdn_layer=layer(self_attention=delta_net(norm)), attention_layer=layer(self_attention=attention),
        mlp_layer=with_mlp(MLPLayer, mlp), moe_layer=with_mlp(MoETransformerLayer, moe)))


def hybrid(config, pattern, vocabulary, norm, core, tied, position):
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    return HybridModel(config=config, hybrid_stack_spec=stack_of(norm, core, config.num_moe_experts), vocab_size=vocabulary, max_sequence_length=64, hybrid_layer_pattern=pattern,
                       pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
                       parallel_output=True, share_embeddings_and_output_weights=tied, position_embedding_type=position)
