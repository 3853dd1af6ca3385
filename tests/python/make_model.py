"""Small random Hugging Face model directories and rollout files for the Python tests.

    python tests/python/make_model.py FAMILY DIRECTORY      (families: the keys of FAMILIES)
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers

VOCABULARY = 97
# Mamba-2's code in transformers pads rows to whole chunks, by default of 128 or 256; the engine has none.
CHUNK = 16

# For families whose layers are all dense: with the default sizes (256 experts of 2048) a changed configuration that does have experts is large.
UNUSED_EXPERTS = dict(n_routed_experts=16, moe_intermediate_size=16)

# Every family once with each head form, single and sharded files, biases, QK-norm, rope scaling.
DELTA_RULE = dict(
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25))
_GEMMA4_ROPE = dict(sliding_attention=dict(rope_type="default", rope_theta=10000.0),
                    full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25))
FAMILIES = {
    # Llama 3.1's scaling, with an original context so short that all three of its frequency bands occur.
    "llama3_tied": dict(
        kind="Llama", tied=True, sharded=False,
        config=dict(num_key_value_heads=2, head_dim=16, rope_parameters=dict(
            rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64))),
    "llama_untied": dict(kind="Llama", tied=False, sharded=False, config=dict(num_key_value_heads=4, head_dim=8)),
    "qwen2_untied": dict(kind="Qwen2", tied=False, sharded=False, config=dict(num_key_value_heads=1)),
    "qwen3_sharded": dict(kind="Qwen3", tied=False, sharded=True, config=dict(num_key_value_heads=2, head_dim=24)),
    "qwen3_moe": dict(kind="Qwen3Moe", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)),
    # Experts in every second layer, weights not renormalised, several files.
    "qwen3_moe_sparse": dict(kind="Qwen3Moe", tied=True, sharded=True, config=dict(
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=False,
        decoder_sparse_step=2)),
    # Rows of a layer with a window see 7 rows: fewer than most prompts have.
    "mistral": dict(kind="Mistral", tied=False, sharded=False, config=dict(num_key_value_heads=2, head_dim=16, sliding_window=7)),
    "qwen2_window": dict(kind="Qwen2", tied=True, sharded=False, config=dict(
        num_key_value_heads=1, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3_window": dict(kind="Qwen3", tied=True, sharded=True, config=dict(
        num_key_value_heads=2, head_dim=16, use_sliding_window=True, sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "qwen3_moe_window": dict(kind="Qwen3Moe", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
        use_sliding_window=True, sliding_window=7)),
    "qwen3_tied": dict(kind="Qwen3", tied=True, sharded=False, config=dict(num_key_value_heads=2, head_dim=16)),
    # Fused matrices, a rotation of half of each head, longrope in its short regime.
    "phi3": dict(kind="Phi3", tied=False, sharded=True, config=dict(
        num_key_value_heads=2, original_max_position_embeddings=256, rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, short_factor=[1.0, 1.3, 2.0], long_factor=[2.0, 3.0, 4.0]))),
    # Every rollout is longer than the original context: long_factor in all of them.
    "phi3_long": dict(kind="Phi3", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, original_max_position_embeddings=1, rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5, attention_factor=1.2, short_factor=[1.0, 1.3, 2.0],
            long_factor=[2.0, 3.0, 4.0]))),
    "smollm3": dict(kind="SmolLM3", tied=True, sharded=False, config=dict(num_key_value_heads=2, no_rope_layers=[1, 0, 1])),
    "granite": dict(kind="Granite", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=1.7, attention_multiplier=0.2,
        attention_bias=True, mlp_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0))),
    "olmo2": dict(kind="Olmo2", tied=False, sharded=False, config=dict(num_key_value_heads=2)),
    "olmo3": dict(kind="Olmo3", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
    "ministral": dict(kind="Ministral", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, sliding_window=7, layer_types=["full_attention", "sliding_attention", "sliding_attention"])),
    # Caps so low that scores and logits of a fresh model reach them.
    "gemma2": dict(kind="Gemma2", tied=True, sharded=False, config=dict(
        hidden_size=64, num_key_value_heads=2, head_dim=16, sliding_window=7, query_pre_attn_scalar=20, attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0)),
    "gemma3": dict(kind="Gemma3", config_kind="Gemma3Text", tied=True, sharded=False, config=dict(
        hidden_size=64, num_key_value_heads=2, head_dim=16, sliding_window=7, query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=50000.0, factor=2.0),
            sliding_attention=dict(rope_type="default", rope_theta=500.0)))),
    "glm4": dict(kind="Glm4", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "mixtral_moe": dict(kind="Mixtral", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2)),
    # Two layers whose rows carry a state, one of attention with an output gate.
    "qwen3_5": dict(kind="Qwen3_5", config_kind="Qwen3_5Text", tied=False, sharded=False, config=dict(DELTA_RULE)),
    "qwen3_next": dict(kind="Qwen3Next", tied=False, sharded=False, config=dict(DELTA_RULE, num_experts=0)),
    # Mamba-2 before and behind a layer of attention; steps that reach their limits.
    "bamba": dict(kind="Bamba", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, attn_layer_indices=[1], mamba_chunk_size=CHUNK, mamba_n_groups=2, mamba_n_heads=8, mamba_d_state=10, mamba_expand=1,
        time_step_limit=(0.4, 1.5), pad_token_id=0)),
    # The same with Granite's factors and a fused MLP, without rotation.
    "granite_hybrid": dict(kind="GraniteMoeHybrid", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_chunk_size=CHUNK, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=40, mamba_n_groups=2, mamba_n_heads=8, mamba_d_state=10, mamba_expand=1,
        embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=1.7, attention_multiplier=0.2, position_embedding_type="nope",
        time_step_limit=(0.4, 1.5))),
    # Halves of blocks: mixers with an MLP behind them and without, the square of relu.
    "nemotron_h": dict(kind="NemotronH", tied=False, sharded=True, config=dict(
        num_key_value_heads=2, head_dim=12, chunk_size=CHUNK, layers_block_type=[
            "linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention", "full_attention"],
        n_groups=2, mamba_num_heads=6, mamba_head_dim=5, ssm_state_size=10, time_step_min=0.5, layer_norm_epsilon=1e-6)),
    # Experts without a gate beside a shared one.
    "nemotron_h_moe": dict(kind="NemotronH", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=12, chunk_size=CHUNK, layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        n_groups=2, mamba_num_heads=6, mamba_head_dim=5, ssm_state_size=10, n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=28, n_group=4, topk_group=3, routed_scaling_factor=1.7)),
    # Experts beside a shared one: with a gate; behind layers that carry a state; and without one, behind a dense layer, where routers
    # choose from the best 3 of 4 groups.
    "qwen2_moe": dict(kind="Qwen2Moe", tied=True, sharded=True, config=dict(
        num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=28,
        mlp_only_layers=[1])),
    "qwen3_next_moe": dict(kind="Qwen3Next", tied=False, sharded=False, config=dict(
        DELTA_RULE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=28)),
    "qwen3_5_moe": dict(kind="Qwen3_5Moe", config_kind="Qwen3_5MoeText", tied=False, sharded=False, config=dict(
        DELTA_RULE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=28)),
    "glm4_moe": dict(kind="Glm4Moe", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=2,
        n_group=4, topk_group=3, routed_scaling_factor=1.7, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    # Sinks, biases everywhere, a limit that gates and ups reach, experts of a layer in one tensor.
    "gpt_oss_moe": dict(kind="GptOss", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, sliding_window=7,
        swiglu_limit=0.6, rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
                                               truncate=False, original_max_position_embeddings=64))),
    # Sigmoid scores, a correction bias that decides some choices.
    "minimax_m2_moe": dict(kind="MiniMaxM2", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=12, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    # Latent attention with dense layers: a model whose queries have no latent, with yarn's two factors; and one with heads of
    # values that are larger than those of keys.
    "deepseek_v2": dict(kind="DeepseekV2", tied=False, sharded=False, config=dict(
        first_k_dense_replace=3, q_lora_rank=None, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        **UNUSED_EXPERTS, rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=8.0,
                             mscale=0.7, mscale_all_dim=3.0))),
    "deepseek_v3": dict(kind="DeepseekV3", tied=False, sharded=True, config=dict(
        num_key_value_heads=4, first_k_dense_replace=3, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8,
        v_head_dim=22, attention_bias=True, rope_interleave=False, **UNUSED_EXPERTS)),
    "deepseek_v3_yarn": dict(kind="DeepseekV3", tied=True, sharded=False, config=dict(
        num_key_value_heads=4, first_k_dense_replace=3, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=10, rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
            mscale=1.0, mscale_all_dim=1.0))),
    # Behind a dense layer experts of the best groups: by a softmax without renormalised weights, and by sigmoids with a correction.
    "deepseek_v2_moe": dict(kind="DeepseekV2", tied=False, sharded=False, config=dict(
        first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1, topk_method="group_limited_greedy",
        n_group=4, topk_group=2, routed_scaling_factor=1.3, norm_topk_prob=True)),
    "deepseek_v3_moe": dict(kind="DeepseekV3", tied=False, sharded=True, config=dict(
        num_key_value_heads=4, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=10, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=2, n_group=4,
        topk_group=3, routed_scaling_factor=1.7)),
    "starcoder2": dict(kind="Starcoder2", tied=True, sharded=False, config=dict(num_key_value_heads=2, sliding_window=7)),
    # Latent attention and DeepSeek's router; a list says which layers are dense.
    "glm4_moe_lite": dict(kind="Glm4MoeLite", tied=False, sharded=False, config=dict(
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=14, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1, mlp_layer_types=["sparse", "dense", "sparse"])),
    # Queries grow every 8 positions.
    "ministral3": dict(kind="Ministral3", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8, beta_fast=8.0, beta_slow=1.0, mscale=1.0,
            mscale_all_dim=1.0, llama_4_scaling_beta=0.4))),
    "granite_moe": dict(kind="GraniteMoe", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=3.0,
        residual_multiplier=0.4, logits_scaling=1.7, attention_multiplier=0.2)),
    "granite_moe_shared": dict(kind="GraniteMoeShared", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2, embedding_multiplier=3.0,
        residual_multiplier=0.4, logits_scaling=1.7, attention_multiplier=0.2, shared_intermediate_size=28)),
    "granite_hybrid_moe": dict(kind="GraniteMoeHybrid", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_chunk_size=CHUNK, num_local_experts=6,
        num_experts_per_tok=2, intermediate_size=16, shared_intermediate_size=40, mamba_n_groups=2, mamba_n_heads=8, mamba_d_state=10,
        mamba_expand=1, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=1.7, attention_multiplier=0.2)),
    "seed_oss": dict(kind="SeedOss", tied=False, sharded=True, config=dict(
        num_key_value_heads=2, head_dim=16, attention_dropout=0.0, residual_dropout=0.0)),
    "olmoe": dict(kind="Olmoe", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, intermediate_size=24, num_experts=8, num_experts_per_tok=3)),
    "ernie4_5": dict(kind="Ernie4_5", tied=True, sharded=False, config=dict(num_key_value_heads=2, head_dim=16, use_bias=True)),
    "glm": dict(kind="Glm", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "gemma": dict(kind="Gemma", tied=True, sharded=False, config=dict(hidden_size=64, num_key_value_heads=1, head_dim=16)),
    # Layers without a window do not rotate; with no window all rotate.
    "exaone4": dict(kind="Exaone4", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "exaone4_full": dict(kind="Exaone4", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, sliding_window=None, layer_types=["full_attention"] * 3)),
    "exaone_moe": dict(kind="ExaoneMoe", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"], num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, num_shared_experts=2,
        n_group=4, topk_group=3, routed_scaling_factor=1.7)),
    "dots1_moe": dict(kind="Dots1", tied=False, sharded=True, config=dict(
        num_key_value_heads=2, sliding_window=7, max_window_layers=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
        n_shared_experts=2, n_group=4, topk_group=3, routed_scaling_factor=1.7, first_k_dense_replace=1, norm_topk_prob=True)),
    "solar_open_moe": dict(kind="SolarOpen", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=1)),
    "arcee": dict(kind="Arcee", tied=False, sharded=False, config=dict(num_key_value_heads=2, mlp_bias=True)),
    "cwm": dict(kind="Cwm", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=16, sliding_window=7, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=64))),
    "youtu": dict(kind="Youtu", tied=True, sharded=False, config=dict(
        num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=14)),
    # Decays of channels, before and behind latent attention without rotation; a dense layer first.
    "kimi_linear_moe": dict(kind="KimiLinear", tied=False, sharded=False, config=dict(
        num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=14, linear_num_heads=4,
        linear_head_dim=10, layer_types=["linear_attention", "full_attention", "linear_attention"], num_experts=8,
        num_experts_per_token=3, moe_intermediate_size=16, num_shared_experts=2, num_expert_group=4, topk_group=3,
        routed_scaling_factor=1.7)),
    # Short convolutions with biases around attention; MLPs that are wider than the config says.
    "lfm2": dict(kind="Lfm2", tied=False, sharded=False, config=dict(
        num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], conv_bias=True, conv_L_cache=4, norm_eps=1e-6,
        block_multiple_of=16, block_ffn_dim_multiplier=1.3)),
    # As Gemma 4 31B: heads of two sizes, and keys that are values in layers without a window.
    "gemma4": dict(kind="Gemma4", config_kind="Gemma4Text", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=12, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_size_per_layer_input=0, final_logit_softcapping=3.0,
        rope_parameters=_GEMMA4_ROPE)),
    # As Gemma 4 26B-A4B: experts beside the MLP of every layer, with norms of their own.
    "gemma4_moe": dict(kind="Gemma4", config_kind="Gemma4Text", tied=True, sharded=False, config=dict(
        num_key_value_heads=2, head_dim=12, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "full_attention"], hidden_size_per_layer_input=0, final_logit_softcapping=3.0,
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=16, rope_parameters=_GEMMA4_ROPE)),
    # As Gemma 4 E2B: the last layers read the keys and values of earlier ones, and every layer has an input of its own.
    "gemma4_reads": dict(kind="Gemma4", config_kind="Gemma4Text", tied=True, sharded=False, config=dict(
        num_hidden_layers=5, num_key_value_heads=2, head_dim=12, global_head_dim=16, sliding_window=7, num_kv_shared_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        use_double_wide_mlp=True, hidden_size_per_layer_input=10, vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=3.0,
        rope_parameters=_GEMMA4_ROPE)),
}
# transformers has a token classifier of these that takes the configuration of the text model.
CRITICS = [family for family, row in FAMILIES.items()
           if hasattr(transformers, row["kind"] + "ForTokenClassification") and "config_kind" not in row]


def make_model(family, directory, seed=1, head="ForCausalLM", **more):
    """Writes a random model of the family, or with head="ForTokenClassification" a critic, with
    head="ForSequenceClassification" a reward model, whose head is random too.
    Weights are larger than a fresh initialisation's, so that attention is not uniform and every gradient is far from zero; norm
    weights and biases are random too."""
    row = FAMILIES[family]
    settings = dict(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=row["tied"], bos_token_id=1, eos_token_id=2,
        pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    if head != "ForCausalLM":
        settings.update(num_labels=1, **({"classifier_dropout": 0.0} if head == "ForTokenClassification" else {}))
    config = getattr(transformers, row.get("config_kind", row["kind"]) + "Config")(**{**settings, **row["config"], **more})
    model = randomised(getattr(transformers, row["kind"] + head)(config).float(), seed)
    shards = dict(max_shard_size="40KB") if row["sharded"] else {}
    model.save_pretrained(directory, safe_serialization=True, **shards)
    if row["sharded"] and not (Path(directory) / "model.safetensors.index.json").exists():
        raise RuntimeError("the model was meant to be saved in several files")
    return Path(directory)


def randomised(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "norm_f.weight", "layernorm_1.weight", "layernorm_2.weight", "scale")):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(".D"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(0.5 * noise - 2.0)  # states that last
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def make_rollouts(seed, groups=4, vocabulary=VOCABULARY, longest_prompt=40, longest_response=14):
    """Records without log-probs: ragged groups in mixed order, a group of one, mask gaps, an empty response, a one-token
    prompt, two equal responses, prompts that share a start, a fully masked response, two temperatures."""
    random_source = random.Random(seed)
    tokens = lambda count: [random_source.randrange(vocabulary) for _ in range(count)]
    start = tokens(longest_prompt // 2)
    records = []
    for group in range(groups):
        prompt = tokens(1) if group == 0 else (start if group % 2 else []) + tokens(random_source.randint(3, longest_prompt // 2))
        count = 1 if group == 1 else random_source.randint(3, 5)
        for sample in range(count):
            response = tokens(random_source.randint(1, longest_response))
            if group == 2 and sample == 1:
                response = list(records[-1]["response_ids"])
            mask = [1] * len(response)
            if group == 3 and sample == 0:
                response, mask = [], []
            elif group == 3 and sample == 1:
                mask = [0] * len(response)
            elif len(response) > 4 and sample % 2:
                mask[1:3] = [0, 0]
            if mask and any(mask):
                mask[-1] = 1
            records.append({
                "group": f"g{group}", "prompt_ids": prompt, "response_ids": response, "loss_mask": mask,
                "reward": round(random_source.uniform(-1, 2), 3), "temperature": 1.0 if group % 2 else 0.7})
    random_source.shuffle(records)
    return records


def add_kept_sets(records, seed, vocabulary=VOCABULARY):
    """Adds sets of most tokens to most records. At a position half of the sets are alike in all records, but for the token itself."""
    draw, common = random.Random(seed), {}
    for record in records:
        if draw.random() < 0.3:
            continue
        sets = []
        for position, token in enumerate(record["response_ids"]):
            own = draw.sample(range(vocabulary), draw.randint(0, vocabulary))
            base = common.setdefault(position, own) if draw.random() < 0.5 else own
            sets.append(None if draw.random() < 0.2 else base if token in base else [token, *base])
        record["kept_ids"] = sets
    return records


def groups_of_four(groups):
    """Small groups whose rewards differ: a step a pair of them with --mini-batch-size 8."""
    return [{"prompt_ids": [3, 4 + group, 9], "response_ids": [6, 7 + i, 11 + group], "reward": float(i % 3)}
            for group in range(groups) for i in range(4)]


def add_series(records, logprobs, seed, spread=0.5):
    """Adds old, reference and rollout log-probs: the model's own plus noise wide enough that the ratio clip, the dual
    clip and the importance truncation are all active."""
    random_source = random.Random(seed)
    for record, own in zip(records, logprobs, strict=True):
        for name, width in (("old_logprobs", spread), ("ref_logprobs", spread), ("rollout_logprobs", 2 * spread)):
            record[name] = [min(0.0, value + random_source.gauss(0, width)) for value in own]
    return records


def write_records(records, path):
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return Path(path)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in FAMILIES:
        sys.exit(__doc__)
    make_model(sys.argv[1], sys.argv[2])
