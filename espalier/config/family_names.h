// Names of parameters in families whose files have other names than Llama's.
#pragma once

#include "espalier/shape/model_shape.h"

namespace espalier {

inline constexpr ParameterNames kGemmaNames{.attention_post_norm = "post_attention_layernorm",
                                            .mlp_norm = "pre_feedforward_layernorm",
                                            .mlp_post_norm = "post_feedforward_layernorm"};
inline constexpr ParameterNames kGemma4Names{.attention_post_norm = "post_attention_layernorm",
                                             .mlp_norm = "pre_feedforward_layernorm",
                                             .mlp_post_norm = "post_feedforward_layernorm",
                                             .router = "router.proj",
                                             .experts = "experts",
                                             .shared_gate = "mlp.gate_proj",
                                             .shared_up = "mlp.up_proj",
                                             .shared_down = "mlp.down_proj",
                                             .router_scale = "router.scale",
                                             .expert_scale = "router.per_expert_scale",
                                             .expert_norm = "pre_feedforward_layernorm_2.weight",
                                             .shared_post_norm = "post_feedforward_layernorm_1.weight",
                                             .expert_post_norm = "post_feedforward_layernorm_2.weight",
                                             .linear_router = true,
                                             .expert_files = ExpertFiles::stacked,
                                             .output_scale = "layer_scalar"};
inline constexpr ParameterNames kOlmoNames{.attention_norm = "",
                                           .attention_post_norm = "post_attention_layernorm",
                                           .mlp_norm = "",
                                           .mlp_post_norm = "post_feedforward_layernorm"};

inline constexpr ParameterNames kMixtralNames{.router = "block_sparse_moe.gate",
                                              .correction_bias = "block_sparse_moe.e_score_correction_bias",
                                              .experts = "block_sparse_moe.experts",
                                              .expert_gate = "w1",
                                              .expert_up = "w3",
                                              .expert_down = "w2"};

inline constexpr ParameterNames kBambaNames{.mlp_norm = "pre_ff_layernorm",
                                            .final_norm = "model.final_layernorm",
                                            .gate = "feed_forward.gate_proj",
                                            .up = "feed_forward.up_proj",
                                            .down = "feed_forward.down_proj"};

// Files have input_linear: gate_proj, then up_proj.
inline constexpr ParameterNames kGraniteHybridNames{.gate = "shared_mlp.gate_proj",
                                                    .up = "shared_mlp.up_proj",
                                                    .down = "shared_mlp.output_linear",
                                                    .router = "block_sparse_moe.router.layer",
                                                    .experts = "block_sparse_moe.experts",
                                                    .shared_gate = "shared_mlp.gate_proj",
                                                    .shared_up = "shared_mlp.up_proj",
                                                    .shared_down = "shared_mlp.output_linear",
                                                    .fused_gate_up = "shared_mlp.input_linear",
                                                    .fused_shared = "shared_mlp.input_linear",
                                                    .stacked_gate_up = "block_sparse_moe.input_linear",
                                                    .stacked_down = "block_sparse_moe.output_linear",
                                                    .expert_files = ExpertFiles::stacked};

inline constexpr ParameterNames kSharedExpertsNames{.shared_gate = "mlp.shared_experts.gate_proj",
                                                    .shared_up = "mlp.shared_experts.up_proj",
                                                    .shared_down = "mlp.shared_experts.down_proj"};

// transformers has the modules of GLM-4.5.
inline constexpr ParameterNames kSarvamNames{.correction_bias = "mlp.gate.expert_bias",
                                             .shared_gate = "mlp.shared_experts.gate_proj",
                                             .shared_up = "mlp.shared_experts.up_proj",
                                             .shared_down = "mlp.shared_experts.down_proj",
                                             .fused_qkv = "attention.query_key_value",
                                             .file_embedding = "word_embeddings",
                                             .fused_in_files_alone = true};

inline constexpr ParameterNames kNemotronNames{.shared_gate = "mlp.shared_experts.gate_proj",
                                               .shared_up = "mlp.shared_experts.up_proj",
                                               .shared_down = "mlp.shared_experts.down_proj",
                                               .half_blocks = true,
                                               .file_root = "backbone."};

// As published; transformers has the bias below mlp.gate.
inline constexpr ParameterNames kExaoneMoeNames{.correction_bias = "mlp.e_score_correction_bias",
                                                .shared_gate = "mlp.shared_experts.gate_proj",
                                                .shared_up = "mlp.shared_experts.up_proj",
                                                .shared_down = "mlp.shared_experts.down_proj"};

inline constexpr ParameterNames kKimiNames{.router = "block_sparse_moe.gate",
                                           .correction_bias = "block_sparse_moe.gate.e_score_correction_bias",
                                           .experts = "block_sparse_moe.experts",
                                           .expert_gate = "w1",
                                           .expert_up = "w3",
                                           .expert_down = "w2",
                                           .shared_gate = "block_sparse_moe.shared_experts.gate_proj",
                                           .shared_up = "block_sparse_moe.shared_experts.up_proj",
                                           .shared_down = "block_sparse_moe.shared_experts.down_proj"};

inline constexpr ParameterNames kLfm2Names{.attention_norm = "operator_norm",
                                           .mlp_norm = "ffn_norm",
                                           .final_norm = "model.embedding_norm",
                                           .gate = "feed_forward.w1",
                                           .up = "feed_forward.w3",
                                           .down = "feed_forward.w2"};

}  // namespace espalier
