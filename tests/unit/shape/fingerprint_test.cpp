// Models that compute different functions have different fingerprints.
#include "espalier/shape/fingerprint.h"
#include "espalier/config/model_config.h"

#include <gtest/gtest.h>

#include <set>

#include "espalier/base/json.h"
#include "espalier/shape/model_shape.h"

namespace espalier {
namespace {

Json granite_hybrid() {
  return Json::parse(R"({"architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 32,
    "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_d_conv": 4, "time_step_limit": [0.0, 8.0]})");
}
Json qwen3_next() {
  return Json::parse(R"({"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"], "num_experts": 0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16})");
}

// Each change of a member gives another fingerprint than the config's own, and than the other changes.
void expect_apart(const Json& config, const Json& changes) {
  std::set<std::string> seen{fingerprint_of(model_shape_of(config, ""))};
  for (const auto& [member, value] : changes.items()) {
    Json changed = config;
    changed[member] = value;
    EXPECT_TRUE(seen.insert(fingerprint_of(model_shape_of(changed, ""))).second) << member << "\n" << *seen.begin();
  }
}

TEST(Fingerprint, TellsHybridsOfMambaApart) {
  expect_apart(granite_hybrid(), Json::parse(R"({"time_step_limit": [0.0, 4.0], "layer_types": ["attention", "mamba",
    "mamba"], "mamba_d_state": 32, "mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": false,
    "pad_token_id": 3})"));
  Json lower = granite_hybrid();
  lower["time_step_limit"] = {1e-3, 8.0};
  EXPECT_NE(fingerprint_of(model_shape_of(lower, "")), fingerprint_of(model_shape_of(granite_hybrid(), "")));
}

TEST(Fingerprint, TellsHybridsOfTheDeltaRuleApart) {
  expect_apart(qwen3_next(), Json::parse(R"({"layer_types": ["full_attention", "linear_attention", "linear_attention",
    "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3})"));
}

TEST(Fingerprint, TellsShortConvolutionsApart) {
  const Json config = Json::parse(R"({"architectures": ["Lfm2ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 32,
    "full_attn_idxs": [1]})");
  expect_apart(config, Json::parse(R"({"full_attn_idxs": [2], "conv_L_cache": 4, "conv_bias": true,
    "block_multiple_of": 80, "block_ffn_dim_multiplier": 8.0, "block_auto_adjust_ff_dim": false, "block_ff_dim": 1200,
    "norm_eps": 1e-6, "tie_embedding": false})"));
}

TEST(Fingerprint, TellsBothFactorsOfLongRopeApart) {
  const Json config = Json::parse(R"({"architectures": ["Phi3ForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 32, "pad_token_id": 0,
    "max_position_embeddings": 8192, "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope",
    "short_factor": [1.0, 1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}})");
  Json scaling = config.at("rope_scaling"), other = scaling;
  scaling["short_factor"][1] = 1.25, other["long_factor"][1] = 1.25;
  for (const Json& one : {scaling, other}) expect_apart(config, {{"rope_scaling", one}});
}

// Equal layers are named together.
TEST(Fingerprint, NamesEveryKindOfLayer) {
  const Json config = Json::parse(R"({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 48,
    "use_sliding_window": true, "sliding_window": 5, "max_window_layers": 0, "tie_word_embeddings": true, "layer_types":
    ["full_attention", "full_attention", "sliding_attention", "full_attention"]})");
  const std::string text = fingerprint_of(model_shape_of(config, ""));
  EXPECT_NE(text.find(" layers 0-1,3: attention heads=4 kv_heads=2 head_dim=8 qk_norm"), text.npos) << text;
  EXPECT_NE(text.find(" layers 2: attention heads=4 kv_heads=2 head_dim=8 window=5 qk_norm"), text.npos) << text;
}

}  // namespace
}  // namespace espalier
