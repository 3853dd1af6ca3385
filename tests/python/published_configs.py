"""config.json as model publishers write it, family by family: every field that their files carry, with tiny sizes and token ids.

Fields that say nothing about the function (auto_map, transformers_version, use_cache ...) stand here too: a reader must pass over them.
"""

BOTH = dict(torch_dtype="float32", transformers_version="4.57.0", use_cache=True)
SIZES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, vocab_size=97, max_position_embeddings=512,
             initializer_range=0.02, bos_token_id=1, eos_token_id=2)
YARN = dict(factor=4.0, original_max_position_embeddings=64)


def config(architecture, model_type, **fields):
    out = {"architectures": [architecture], "model_type": model_type, **SIZES, **BOTH, **fields}
    return {name: value for name, value in out.items() if value is not ...}


def auto_map(module, name):
    return {"AutoConfig": f"configuration_{module}.{name}Config", "AutoModel": f"modeling_{module}.{name}Model",
            "AutoModelForCausalLM": f"modeling_{module}.{name}ForCausalLM"}


LATENT = dict(kv_lora_rank=20, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
DELTA = dict(linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=6, linear_num_key_heads=2, linear_num_value_heads=4)
LONG_FACTORS = dict(short_factor=[1.0, 1.3, 2.0], long_factor=[2.0, 3.0, 4.0])

DEEPSEEK = dict(
    attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=1, hidden_act="silu",
    moe_intermediate_size=16, moe_layer_freq=1, num_experts_per_tok=3, num_key_value_heads=4, pretraining_tp=1, rms_norm_eps=1e-06,
    rope_theta=10000, seq_aux=True, tie_word_embeddings=False, **LATENT)

GEMMA_4 = dict(
    attention_bias=False, attention_dropout=0.0, enable_moe_block=False, expert_intermediate_size=None, final_logit_softcapping=30.0,
    global_head_dim=16, head_dim=8, hidden_activation="gelu_pytorch_tanh", num_experts=None, num_key_value_heads=2, pad_token_id=0,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"], moe_intermediate_size=None, rms_norm_eps=1e-06,
    rope_parameters=dict(full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
                         sliding_attention=dict(rope_theta=10000.0, rope_type="default")),
    sliding_window=7, tie_word_embeddings=True, top_k_experts=None, vocab_size_per_layer_input=97)

PUBLISHED = {
    "llama_3_1": config(
        "LlamaForCausalLM", "llama", attention_bias=False, attention_dropout=0.0, eos_token_id=[2, 3, 4], hidden_act="silu", mlp_bias=False,
        num_key_value_heads=2, pretraining_tp=1, rms_norm_eps=1e-05, rope_theta=500000.0, tie_word_embeddings=False,
        rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64, rope_type="llama3")),
    "llama_2": config(
        "LlamaForCausalLM", "llama", _name_or_path="meta-llama/Llama-2-7b-hf", hidden_act="silu", num_key_value_heads=4, pretraining_tp=1,
        rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=False),
    "mistral_7b_v0_1": config(
        "MistralForCausalLM", "mistral", hidden_act="silu", num_key_value_heads=2, rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=7,
        tie_word_embeddings=False),
    "mistral_nemo": config(
        "MistralForCausalLM", "mistral", attention_dropout=0.0, head_dim=16, hidden_act="silu", num_key_value_heads=2, rms_norm_eps=1e-05,
        rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False),
    "mixtral": config(
        "MixtralForCausalLM", "mixtral", attention_dropout=0.0, hidden_act="silu", num_experts_per_tok=2, num_key_value_heads=2,
        num_local_experts=6, output_router_logits=False, rms_norm_eps=1e-05, rope_theta=1000000.0, router_aux_loss_coef=0.02,
        sliding_window=None, tie_word_embeddings=False),
    "qwen2_5": config(
        "Qwen2ForCausalLM", "qwen2", attention_dropout=0.0, hidden_act="silu", max_window_layers=2, num_key_value_heads=2, rms_norm_eps=1e-06,
        rope_theta=1000000.0, sliding_window=64, tie_word_embeddings=True, use_mrope=False, use_sliding_window=False),
    "qwen1_5_moe": config(
        "Qwen2MoeForCausalLM", "qwen2_moe", attention_dropout=0.0, decoder_sparse_step=1, hidden_act="silu", max_window_layers=2,
        moe_intermediate_size=16, norm_topk_prob=False, num_experts=6, num_experts_per_tok=2, num_key_value_heads=4,
        output_router_logits=False, rms_norm_eps=1e-06, rope_theta=1000000.0, router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=28, sliding_window=64, tie_word_embeddings=False, use_sliding_window=False),
    "qwen3": config(
        "Qwen3ForCausalLM", "qwen3", attention_bias=False, attention_dropout=0.0, head_dim=16, hidden_act="silu", max_window_layers=3,
        num_key_value_heads=2, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True,
        use_sliding_window=False),
    "qwen3_with_yarn": config(  # as its model card has it for long contexts
        "Qwen3ForCausalLM", "qwen3", attention_bias=False, attention_dropout=0.0, head_dim=16, hidden_act="silu", max_window_layers=3,
        num_key_value_heads=2, rms_norm_eps=1e-06, rope_scaling=dict(rope_type="yarn", **YARN), rope_theta=1000000, sliding_window=None,
        tie_word_embeddings=False, use_sliding_window=False),
    "qwen3_moe": config(
        "Qwen3MoeForCausalLM", "qwen3_moe", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1, head_dim=16,
        hidden_act="silu", max_window_layers=3, mlp_only_layers=[], moe_intermediate_size=24, norm_topk_prob=True, num_experts=8,
        num_experts_per_tok=2, num_key_value_heads=2, output_router_logits=False, rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False),
    "qwen3_next": config(
        "Qwen3NextForCausalLM", "qwen3_next", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1, full_attention_interval=3,
        head_dim=16, hidden_act="silu", **DELTA, mlp_only_layers=[], moe_intermediate_size=16, norm_topk_prob=True, num_experts=6,
        num_experts_per_tok=2, num_key_value_heads=2, output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-06,
        rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=28, tie_word_embeddings=False,
        use_sliding_window=False),
    "qwen3_5_text": config(
        "Qwen3_5ForCausalLM", "qwen3_5_text", attention_bias=False, attention_dropout=0.0, attn_output_gate=True, full_attention_interval=3,
        head_dim=16, hidden_act="silu", layer_types=["linear_attention", "linear_attention", "full_attention"], **DELTA,
        mamba_ssm_dtype="float32", mlp_only_layers=[], mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, num_key_value_heads=2,
        partial_rotary_factor=0.25, rms_norm_eps=1e-06, tie_word_embeddings=False, rope_parameters=dict(
            mrope_interleaved=True, mrope_section=[1, 1, 0], partial_rotary_factor=0.25, rope_theta=10000000, rope_type="default")),
    "gemma_2": config(
        "Gemma2ForCausalLM", "gemma2", attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=50.0, cache_implementation="hybrid",
        final_logit_softcapping=30.0, head_dim=16, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
        num_key_value_heads=2, pad_token_id=0, query_pre_attn_scalar=20, rms_norm_eps=1e-06, rope_theta=10000.0, sliding_window=7),
    "gemma_3_1b": config(
        "Gemma3ForCausalLM", "gemma3_text", attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=None,
        cache_implementation="hybrid", eos_token_id=[1, 2], final_logit_softcapping=None, head_dim=16,
        hidden_activation="gelu_pytorch_tanh", num_key_value_heads=2, pad_token_id=0, query_pre_attn_scalar=20, rms_norm_eps=1e-06,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=7, sliding_window_pattern=3),
    "gemma_4_31b": config(
        "Gemma4ForCausalLM", "gemma4_text", **GEMMA_4, attention_k_eq_v=True, hidden_size_per_layer_input=0, num_global_key_value_heads=1,
        num_kv_shared_layers=0, use_bidirectional_attention="vision", use_double_wide_mlp=False),
    "gemma_4_26b_a4b": config(
        "Gemma4ForCausalLM", "gemma4_text", **{**GEMMA_4, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 12},
        attention_k_eq_v=True, hidden_size_per_layer_input=0, num_global_key_value_heads=1, num_kv_shared_layers=0,
        use_bidirectional_attention="vision", use_double_wide_mlp=False),
    "gemma_4_e2b": config(
        "Gemma4ForCausalLM", "gemma4_text", **{**GEMMA_4, "layer_types": ["sliding_attention", "full_attention"] * 2}, attention_k_eq_v=False,
        hidden_size_per_layer_input=8, num_global_key_value_heads=None, num_kv_shared_layers=2, use_bidirectional_attention=None,
        use_double_wide_mlp=True, num_hidden_layers=4),
    "gemma_4_e4b": config(
        "Gemma4ForCausalLM", "gemma4_text", **{**GEMMA_4, "layer_types": ["sliding_attention", "full_attention"] * 2}, attention_k_eq_v=False,
        hidden_size_per_layer_input=8, num_global_key_value_heads=None, num_kv_shared_layers=1, use_bidirectional_attention=None,
        use_double_wide_mlp=False, num_hidden_layers=4),
    "olmo_2": config(
        "Olmo2ForCausalLM", "olmo2", attention_bias=False, attention_dropout=0.0, hidden_act="silu", num_key_value_heads=4, pad_token_id=3,
        rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False),
    "olmo_3": config(
        "Olmo3ForCausalLM", "olmo3", attention_bias=False, attention_dropout=0.0, hidden_act="silu",
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], num_key_value_heads=4, pad_token_id=3, rms_norm_eps=1e-06,
        rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
                          original_max_position_embeddings=64, rope_type="yarn"),
        rope_theta=500000, sliding_window=7, tie_word_embeddings=False),
    "phi_3_mini_4k": config(
        "Phi3ForCausalLM", "phi3", attention_bias=False, attention_dropout=0.0, auto_map=auto_map("phi3", "Phi3"), embd_pdrop=0.0,
        hidden_act="silu", num_key_value_heads=4, original_max_position_embeddings=512, pad_token_id=3, resid_pdrop=0.0, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=10000.0, sliding_window=7, tie_word_embeddings=False),
    "phi_3_mini_128k": config(
        "Phi3ForCausalLM", "phi3", attention_bias=False, attention_dropout=0.0, auto_map=auto_map("phi3", "Phi3"), embd_pdrop=0.0,
        hidden_act="silu", num_key_value_heads=4, original_max_position_embeddings=256, pad_token_id=3, resid_pdrop=0.0, rms_norm_eps=1e-05,
        rope_scaling=dict(short_factor=[1.0, 1.3, 2.0, 2.1, 2.2, 2.4], long_factor=[2.0, 3.0, 4.0, 5.0, 6.0, 7.0], type="longrope"),
        rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=False),
    "phi_4": config(
        "Phi3ForCausalLM", "phi3", attention_bias=False, attention_dropout=0.0, embd_pdrop=0.0, hidden_act="silu", num_key_value_heads=2,
        original_max_position_embeddings=512, pad_token_id=3, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=250000,
        sliding_window=None, tie_word_embeddings=False),
    "phi_4_mini": config(
        "Phi3ForCausalLM", "phi3", attention_bias=False, attention_dropout=0.0, auto_map=auto_map("phi3", "Phi3"), embd_pdrop=0.0,
        full_attn_mod=1, hidden_act="silu", interpolate_factor=1, lm_head_bias=False, mlp_bias=False, num_key_value_heads=2,
        original_max_position_embeddings=256, pad_token_id=3, partial_rotary_factor=0.5, resid_pdrop=0.0, rms_norm_eps=1e-05,
        rope_scaling=dict(type="longrope", **LONG_FACTORS), rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True),
    "smollm3": config(
        "SmolLM3ForCausalLM", "smollm3", attention_bias=False, attention_dropout=0.0, hidden_act="silu",
        layer_types=["full_attention", "full_attention", "full_attention"], max_window_layers=28, mlp_bias=False, no_rope_layer_interval=3,
        no_rope_layers=[1, 1, 0], num_key_value_heads=2, pad_token_id=4, pretraining_tp=2, rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=5000000.0, sliding_window=None, tie_word_embeddings=True, use_sliding_window=False),
    "granite_3_3": config(
        "GraniteForCausalLM", "granite", attention_bias=False, attention_dropout=0.0, attention_multiplier=0.2, embedding_multiplier=12.0,
        hidden_act="silu", logits_scaling=8.0, mlp_bias=False, num_key_value_heads=2, pad_token_id=0, residual_multiplier=0.22,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000000.0, tie_word_embeddings=True),
    "starcoder2_15b": config(
        "Starcoder2ForCausalLM", "starcoder2", activation_function="gelu_pytorch_tanh", attention_dropout=0.0, attention_softmax_in_fp32=True,
        embedding_dropout=0.0, hidden_act="gelu_pytorch_tanh", layer_norm_epsilon=1e-05, mlp_type="default", norm_epsilon=1e-05,
        norm_type="layer_norm", num_key_value_heads=2, residual_dropout=0.0, rope_theta=100000, scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True, sliding_window=7, tie_word_embeddings=False, use_bias=True),
    "glm_4": config(
        "Glm4ForCausalLM", "glm4", attention_bias=False, attention_dropout=0.0, eos_token_id=[2, 3, 4], head_dim=16, hidden_act="silu",
        num_key_value_heads=2, pad_token_id=5, partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=False),
    "glm_4_5": config(
        "Glm4MoeForCausalLM", "glm4_moe", attention_bias=True, attention_dropout=0.0, pad_token_id=5, eos_token_id=[2, 3, 4], head_dim=16,
        hidden_act="silu", partial_rotary_factor=0.5, moe_intermediate_size=16, norm_topk_prob=True, num_key_value_heads=2, n_group=1,
        topk_group=1, n_routed_experts=8, n_shared_experts=1, routed_scaling_factor=2.5, num_experts_per_tok=3, first_k_dense_replace=1,
        num_nextn_predict_layers=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, tie_word_embeddings=False, use_qk_norm=True),
    "glm_4_5_air": config(
        "Glm4MoeForCausalLM", "glm4_moe", attention_bias=True, attention_dropout=0.0, pad_token_id=5, eos_token_id=[2, 3, 4], head_dim=16,
        hidden_act="silu", partial_rotary_factor=0.5, moe_intermediate_size=16, norm_topk_prob=True, num_key_value_heads=2, n_group=1,
        topk_group=1, n_routed_experts=8, n_shared_experts=1, routed_scaling_factor=1.0, num_experts_per_tok=3, first_k_dense_replace=1,
        num_nextn_predict_layers=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, tie_word_embeddings=False, use_qk_norm=False),
    "deepseek_v2_lite": config(
        "DeepseekV2ForCausalLM", "deepseek_v2", **DEEPSEEK, auto_map=auto_map("deepseek", "DeepseekV2"), n_group=1, n_routed_experts=8,
        n_shared_experts=2, norm_topk_prob=False, q_lora_rank=None, routed_scaling_factor=1.0, scoring_func="softmax", topk_group=1,
        topk_method="greedy", rope_scaling=dict(beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707, type="yarn", **YARN)),
    "deepseek_v2": config(
        "DeepseekV2ForCausalLM", "deepseek_v2", **DEEPSEEK, auto_map=auto_map("deepseek", "DeepseekV2"), n_group=4, n_routed_experts=8,
        n_shared_experts=2, norm_topk_prob=False, q_lora_rank=24, routed_scaling_factor=16.0, scoring_func="softmax", topk_group=2,
        topk_method="group_limited_greedy", rope_scaling=dict(beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707, type="yarn", **YARN)),
    "deepseek_v3_in_bfloat16": config(  # the published files are in fp8
        "DeepseekV3ForCausalLM", "deepseek_v3", **DEEPSEEK, auto_map=auto_map("deepseek", "DeepseekV3"), n_group=4, n_routed_experts=8,
        n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=1, q_lora_rank=24, routed_scaling_factor=2.5,
        scoring_func="sigmoid", topk_group=2, topk_method="noaux_tc",
        rope_scaling=dict(beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0, type="yarn", **YARN)),
    "moonlight": config(  # Kimi K2 without its quantisation has these fields too, with a latent of the queries
        "DeepseekV3ForCausalLM", "deepseek_v3", **DEEPSEEK, auto_map=auto_map("deepseek", "DeepseekV3"), n_group=1, n_routed_experts=8,
        n_shared_experts=2, norm_topk_prob=True, num_nextn_predict_layers=0, q_lora_rank=None, rope_scaling=None,
        routed_scaling_factor=2.446, scoring_func="sigmoid", topk_group=1, topk_method="noaux_tc"),
    "kimi_k2_in_bfloat16": config(
        "DeepseekV3ForCausalLM", "kimi_k2", **DEEPSEEK, auto_map=auto_map("deepseek", "DeepseekV3"), n_group=1, n_routed_experts=8,
        n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=0, q_lora_rank=24, routed_scaling_factor=2.827,
        scoring_func="sigmoid", topk_group=1, topk_method="noaux_tc",
        rope_scaling=dict(beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, type="yarn", **YARN)),
    "minimax_m2_in_bfloat16": config(
        "MiniMaxM2ForCausalLM", "minimax_m2", attention_dropout=0.0, attn_type_list=[1, 1, 1], auto_map=auto_map("minimax_m2", "MiniMaxM2"),
        head_dim=12, hidden_act="silu", intermediate_size=24, layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0,
        layernorm_mlp_beta=1.0, mlp_intermediate_size=80, mtp_transformer_layers=1, num_experts_per_tok=2, num_key_value_heads=2,
        num_local_experts=6, num_mtp_modules=3, output_router_logits=False, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5000000,
        rotary_dim=6, router_aux_loss_coef=0.001, router_jitter_noise=0.0, scoring_func="sigmoid", shared_intermediate_size=0,
        shared_moe_mode="sigmoid", sliding_window=None, tie_word_embeddings=False, use_mtp=True, use_qk_norm=True, use_routing_bias=True),
    "gpt_oss": config(
        "GptOssForCausalLM", "gpt_oss", attention_bias=True, attention_dropout=0.0, experts_per_token=2, head_dim=16, hidden_act="silu",
        initial_context_length=64, intermediate_size=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_experts_per_tok=2, num_key_value_heads=2, num_local_experts=6, output_router_logits=False, pad_token_id=3, rms_norm_eps=1e-05,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, rope_type="yarn", truncate=False, **YARN), rope_theta=150000,
        router_aux_loss_coef=0.9, sliding_window=7, swiglu_limit=7.0, tie_word_embeddings=False),
    "glm_4_7_flash": config(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", attention_bias=False, attention_dropout=0.0, pad_token_id=5, eos_token_id=[2, 3, 4],
        hidden_act="silu", first_k_dense_replace=1, moe_intermediate_size=16, n_group=1, topk_group=1, n_routed_experts=8, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=3, num_key_value_heads=4, num_nextn_predict_layers=1, partial_rotary_factor=1.0, q_lora_rank=24,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8, tie_word_embeddings=False, topk_method="noaux_tc",
        **LATENT),
    "seed_oss_without_dropout": config(
        "SeedOssForCausalLM", "seed_oss", attention_bias=True, attention_dropout=0.0, attention_out_bias=False, head_dim=16,
        hidden_act="silu", mlp_bias=False, num_key_value_heads=2, pad_token_id=1, residual_dropout=0.0, rms_norm_eps=1e-06,
        rope_scaling=dict(rope_type="default"), rope_theta=10000000.0, tie_word_embeddings=False),
    "olmoe": config(
        "OlmoeForCausalLM", "olmoe", attention_bias=False, attention_dropout=0.0, clip_qkv=None, hidden_act="silu", intermediate_size=24,
        norm_topk_prob=False, num_experts=8, num_experts_per_tok=3, num_key_value_heads=4, output_router_logits=False, pad_token_id=1,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False),
    "ernie_4_5": config(
        "Ernie4_5ForCausalLM", "ernie4_5", head_dim=16, hidden_act="silu", num_key_value_heads=2, pad_token_id=0, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=True, use_bias=False),
    "glm_4_9b": config(
        "GlmForCausalLM", "glm", attention_bias=True, attention_dropout=0.0, eos_token_id=[2, 3, 4], head_dim=16, hidden_act="silu",
        num_key_value_heads=2, pad_token_id=5, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-07, rope_theta=10000.0,
        tie_word_embeddings=False),
    "gemma_2b": config(
        "GemmaForCausalLM", "gemma", attention_bias=False, attention_dropout=0.0, head_dim=16, hidden_act="gelu", hidden_activation=None,
        num_key_value_heads=1, pad_token_id=0, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000.0),
    "exaone_4_32b": config(
        "Exaone4ForCausalLM", "exaone4", attention_dropout=0.0, hidden_act="silu", head_dim=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], num_key_value_heads=2, pad_token_id=0, rms_norm_eps=1e-05,
        rope_scaling=dict(factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64, rope_type="llama3"),
        rope_theta=1000000, sliding_window=7, sliding_window_pattern="LLG", tie_word_embeddings=False),
    "exaone_4_1b": config(
        "Exaone4ForCausalLM", "exaone4", attention_dropout=0.0, hidden_act="silu", head_dim=16, layer_types=["full_attention"] * 3,
        num_key_value_heads=2, pad_token_id=0, rms_norm_eps=1e-05, rope_scaling=dict(
            factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64, rope_type="llama3"),
        rope_theta=1000000, sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True),
    "k_exaone": config(
        "ExaoneMoeForCausalLM", "exaone_moe", attention_dropout=0.0, first_k_dense_replace=1, head_dim=16, hidden_act="silu",
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse", "sparse"],
        moe_intermediate_size=16, n_group=1, norm_topk_prob=True, num_experts=8, num_experts_per_tok=3, num_key_value_heads=2,
        num_nextn_predict_layers=1, num_shared_experts=1, pad_token_id=0, rms_norm_eps=1e-05,
        rope_parameters=dict(rope_theta=1000000, rope_type="default"), routed_scaling_factor=2.5, scoring_func="sigmoid", sliding_window=7,
        sliding_window_pattern="LLG", tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc"),
    "dots1": config(
        "Dots1ForCausalLM", "dots1", attention_bias=False, attention_dropout=0.0, first_k_dense_replace=1, hidden_act="silu",
        max_window_layers=62, moe_intermediate_size=16, moe_layer_freq=1, n_group=1, n_routed_experts=8, n_shared_experts=2, norm_topk_prob=True,
        num_experts_per_tok=3, num_key_value_heads=4, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000000,
        routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
        use_sliding_window=False),
    "solar_open": config(
        "SolarOpenForCausalLM", "solar_open", attention_bias=False, attention_dropout=0.0, first_k_dense_replace=0, head_dim=16,
        hidden_act="silu", moe_intermediate_size=16, n_group=1, n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True,
        num_experts_per_tok=3, num_key_value_heads=2, pad_token_id=2, partial_rotary_factor=1.0, rms_norm_eps=1e-05,
        rope_scaling=dict(type="yarn", **YARN), rope_theta=1000000, routed_scaling_factor=1.0, tie_word_embeddings=False, topk_group=1,
        use_qk_norm=False),
    "afm_4_5b": config(
        "ArceeForCausalLM", "arcee", attention_bias=False, attention_dropout=0.0, head_dim=16, hidden_act="relu2", mlp_bias=False,
        num_key_value_heads=2, rms_norm_eps=1e-05, rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, rope_type="yarn", **YARN),
        rope_theta=10000.0, tie_word_embeddings=False),
    "cwm": config(
        "CwmForCausalLM", "cwm", attention_dropout=0.0, head_dim=16, hidden_act="silu",
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], mlp_bias=False, num_key_value_heads=2, rms_norm_eps=1e-05,
        rope_scaling=dict(factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64, rope_type="llama3"),
        rope_theta=1000000.0, sliding_window=7, tie_word_embeddings=False),
    "youtu_2b": config(
        "YoutuForCausalLM", "youtu", attention_bias=False, attention_dropout=0.0, hidden_act="silu", num_key_value_heads=4, q_lora_rank=24,
        rms_norm_eps=1e-06, rope_interleave=True, rope_scaling=None, rope_theta=1600000.0, tie_word_embeddings=True, **LATENT),
    "kimi_linear": config(
        "KimiLinearForCausalLM", "kimi_linear", auto_map=auto_map("kimi", "KimiLinear"), dtype="bfloat16", first_k_dense_replace=1,
        head_dim=12, hidden_act="silu", **LATENT, max_position_embeddings=..., model_max_length=512, linear_attn_config=dict(
            full_attn_layers=[2], head_dim=10, kda_layers=[1, 3], num_heads=4, short_conv_kernel_size=4), mla_use_nope=True,
        moe_intermediate_size=16, moe_layer_freq=1, moe_renormalize=True, moe_router_activation_func="sigmoid", num_expert_group=1,
        num_experts=6, num_experts_per_token=3, num_key_value_heads=4, num_nextn_predict_layers=0, num_shared_experts=1,
        pad_token_id=96, q_lora_rank=None, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0, routed_scaling_factor=2.446,
        tie_word_embeddings=False, topk_group=1, use_grouped_topk=True),
    "bamba": config(
        "BambaForCausalLM", "bamba", attention_bias=False, attention_dropout=0.0, attn_layer_indices=[1], attn_rotary_emb=6, hidden_act="silu",
        mamba_chunk_size=16, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=12, mamba_d_state=10, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=8, mamba_proj_bias=False, mlp_bias=False, num_key_value_heads=2, num_logits_to_keep=1, pad_token_id=0,
        rms_norm_eps=1e-05, tie_word_embeddings=False),
    "granite_4_h_micro": config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", attention_bias=False, attention_dropout=0.0, attention_multiplier=0.2,
        embedding_multiplier=12.0, hidden_act="silu", init_method="mup", layer_types=["mamba", "mamba", "attention"], logits_scaling=8.0,
        mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=12, mamba_d_state=10, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=8, mamba_proj_bias=False, normalization_function="rmsnorm", num_experts_per_tok=0, num_key_value_heads=2,
        num_local_experts=0, output_router_logits=False, pad_token_id=5, position_embedding_type="nope", residual_multiplier=0.22,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000, router_aux_loss_coef=0.01, shared_intermediate_size=40,
        tie_word_embeddings=True),
    "lfm2_1_2b": config(
        "Lfm2ForCausalLM", "lfm2", block_auto_adjust_ff_dim=True, block_dim=48, block_ff_dim=80, block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0, block_multiple_of=16, block_norm_eps=1e-05, block_out_init_scale=1.0, block_use_swiglu=True,
        block_use_xavier_init=True, conv_L_cache=3, conv_bias=False, conv_dim=48, conv_dim_out=48, conv_use_xavier_init=True,
        full_attn_idxs=[2], intermediate_size=..., norm_eps=1e-05, num_heads=4, num_key_value_heads=2, pad_token_id=0,
        rope_theta=1000000.0, theta=1000000.0, tie_embedding=True, use_pos_enc=True),
    "nemotron_h_8b": config(
        "NemotronHForCausalLM", "nemotron_h", attention_bias=False, attention_dropout=0.0, attention_head_dim=12,
        auto_map=auto_map("nemotron_h", "NemotronH"), chunk_size=128, conv_kernel=4, expand=2, head_dim=12, hidden_dropout=0.0,
        hybrid_override_pattern="M-M*-MM", layer_norm_epsilon=1e-05, mamba_head_dim=6, mamba_hidden_act="silu", mamba_num_heads=8,
        mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2", n_groups=2, num_hidden_layers=7, num_key_value_heads=2,
        num_logits_to_keep=1, pad_token_id=0, rescale_prenorm_residual=True, residual_in_fp32=False, rms_norm_eps=1e-05,
        sliding_window=None, ssm_state_size=10, tie_word_embeddings=False, time_step_floor=0.0001,
        time_step_limit=[0.0, {"__float__": "Infinity"}], time_step_max=0.1, time_step_min=0.001, time_step_rank=256, use_bias=False,
        use_conv_bias=True, use_mamba_kernels=True),
}
PUBLISHED["granite_4_h_tiny"] = {**PUBLISHED["granite_4_h_micro"], "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16}
GRANITE = dict(
    attention_bias=False, attention_dropout=0.0, attention_multiplier=0.2, embedding_multiplier=12.0, hidden_act="silu", intermediate_size=16,
    logits_scaling=6.0, num_experts_per_tok=2, num_key_value_heads=2, num_local_experts=6, output_router_logits=False, pad_token_id=0,
    residual_multiplier=0.22, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1500000.0, router_aux_loss_coef=0.0, tie_word_embeddings=True)
PUBLISHED["granite_3_1_1b_a400m"] = config("GraniteMoeForCausalLM", "granitemoe", **GRANITE)
PUBLISHED["power_moe_shared"] = config("GraniteMoeSharedForCausalLM", "granitemoeshared", **GRANITE, shared_intermediate_size=28)
PUBLISHED["ministral_3_text"] = config(
    "Ministral3ForCausalLM", "ministral3", attention_dropout=0.0, head_dim=16, hidden_act="silu", num_key_value_heads=2, rms_norm_eps=1e-05,
    rope_parameters=dict(beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
                         original_max_position_embeddings=16, rope_theta=1000000.0, rope_type="yarn", type="yarn"),
    sliding_window=None, tie_word_embeddings=False)
PUBLISHED["nemotron_3_nano"] = {
    **PUBLISHED["nemotron_h_8b"], "hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 28, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_eps": 1e-05,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "topk_group": 1, "partial_rotary_factor": 1.0}

FP8 = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
# Published in FP8 (test_fp8.py has the weights).
IN_FP8 = {
    "deepseek_v3": {**PUBLISHED["deepseek_v3_in_bfloat16"], "quantization_config": FP8},
    "deepseek_v3_1": {**PUBLISHED["deepseek_v3_in_bfloat16"], "quantization_config": {**FP8, "scale_fmt": "ue8m0"}},
    "kimi_k2": {**PUBLISHED["kimi_k2_in_bfloat16"], "quantization_config": FP8},
    "minimax_m2": {**PUBLISHED["minimax_m2_in_bfloat16"], "quantization_config": {**FP8, "modules_to_not_convert": ["gate", "lm_head"]}},
    "qwen3": {**PUBLISHED["qwen3"], "quantization_config": {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}},
    "glm_4_5": {**PUBLISHED["glm_4_5"], "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "model.layers.1.mlp.gate"], "kv_cache_scheme": None,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "output_activations": None, "input_activations": dict(num_bits=8, type="float", strategy="token", dynamic=True),
            "weights": dict(num_bits=8, type="float", strategy="channel", dynamic=False, symmetric=True, block_structure=None)}}}},
}
# As published, and what a message must name: the field, and what to do.
REFUSED = {
    "deepseek_v4_experts_in_fp4": ({**PUBLISHED["deepseek_v3_in_bfloat16"], "quantization_config": {**FP8, "expert_dtype": "fp4"}},
                                   ["quantization_config.expert_dtype", "dequantize"]),
    "qwen3_awq": ({**PUBLISHED["qwen3"], "quantization_config": dict(bits=4, group_size=128, quant_method="awq", zero_point=True)},
                  ["quantization_config", "awq"]),
    "starcoder2_3b": ({**PUBLISHED["starcoder2_15b"], "attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1},
                      ["attention_dropout", "set attention_dropout to 0"]),
    "seed_oss": ({**PUBLISHED["seed_oss_without_dropout"], "attention_dropout": 0.1, "residual_dropout": 0.1},
                 ["attention_dropout", "set attention_dropout to 0"]),
    "seed_oss_silent": ({name: value for name, value in PUBLISHED["seed_oss_without_dropout"].items() if name != "residual_dropout"},
                        ["no residual_dropout, which means 0.1", "set residual_dropout to 0"]),
    "olmoe_clipped": ({**PUBLISHED["olmoe"], "clip_qkv": 8.0}, ["clip_qkv", "espalier.hf"]),
    "granite_3_0": ({**PUBLISHED["granite_3_3"], "attention_dropout": 0.1}, ["attention_dropout", "set attention_dropout to 0"]),
    "deepseek_experts_in_some_layers": ({**PUBLISHED["deepseek_v2_lite"], "moe_layer_freq": 2}, ["moe_layer_freq"]),
    "nemotron_3_with_latents": ({**PUBLISHED["nemotron_3_nano"], "moe_latent_size": 20}, ["moe_latent_size", "espalier.hf"]),
    "nemotron_without_a_mixer": ({**PUBLISHED["nemotron_h_8b"], "hybrid_override_pattern": "M--"}, ["hybrid_override_pattern", "espalier.hf"]),
    "minimax_m2_shared_expert": ({**PUBLISHED["minimax_m2_in_bfloat16"], "shared_intermediate_size": 16}, ["shared_intermediate_size"]),
}
