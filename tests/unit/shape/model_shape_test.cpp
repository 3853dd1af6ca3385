// config.json as real models have it, and as nobody should.
#include "espalier/shape/model_shape.h"
#include "espalier/config/model_config.h"
#include "espalier/mixers/latent_attention/shape.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "tests/support/layers.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

AttentionShape attention_of(const Json& config) { return testing::attention_of(model_shape_of(config, "config.json")); }
const LatentShape& latent_of(const ModelShape& shape) {
  return static_cast<const LatentAttention&>(shape.mixer(0)).shape;
}

Json llama_config() {
  return Json::parse(R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256})");
}

Json qwen3_config() {
  return Json::parse(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "sliding_window": null,
    "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936})");
}

Json qwen2_config() {
  return Json::parse(R"({"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "use_sliding_window": false, "vocab_size": 151936})");
}

Json qwen3_moe_config() {
  return Json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 1000000.0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "vocab_size": 151936})");
}

template <class Problem>
std::string message(const Json& config) {
  try {
    model_shape_of(config, "config.json");
  } catch (const Problem& problem) {
    return problem.what();
  }
  return "nothing thrown";
}

TEST(ModelShape, ReadsLlama31WithItsRopeScaling) {
  const ModelShape shape = model_shape_of(llama_config(), "config.json");
  const AttentionShape& attention = testing::attention_of(shape);
  EXPECT_EQ(attention.head_dim, 128);
  EXPECT_TRUE(attention.rope.has_scaling);
  EXPECT_EQ(attention.rope.scaling.factor, 8);
  EXPECT_EQ(attention.rope.scaling.original_max_position_embeddings, 8192);
  EXPECT_EQ(attention.rope.theta, 500000);
  EXPECT_EQ(shape.rms_norm_eps, 1e-5);
  EXPECT_EQ(shape.stored_dtype, DType::bfloat16);
  EXPECT_EQ(shape.parameters(), 8030261248);  // as published for Llama-3.1-8B
}

TEST(ModelShape, CountsPublishedParameters) {
  EXPECT_EQ(model_shape_of(qwen3_config(), "").parameters(), 596049920);        // Qwen3-0.6B
  EXPECT_EQ(model_shape_of(qwen2_config(), "").parameters(), 494032768);        // Qwen2.5-0.5B
  EXPECT_EQ(model_shape_of(qwen3_moe_config(), "").parameters(), 30532122624);  // Qwen3-30B-A3B
}

TEST(ModelShape, KnowsWhatAFamilyAdds) {
  EXPECT_TRUE(attention_of(qwen2_config()).qkv_bias);
  EXPECT_FALSE(attention_of(qwen2_config()).output_bias);
  EXPECT_TRUE(attention_of(qwen3_config()).qk_norm);
  EXPECT_FALSE(attention_of(qwen3_config()).qkv_bias);
  EXPECT_FALSE(attention_of(llama_config()).qk_norm);
  Json biased = llama_config();
  biased["attention_bias"] = true, biased["mlp_bias"] = true;
  const ModelShape shape = model_shape_of(biased, "");
  const AttentionShape& attention = testing::attention_of(shape);
  EXPECT_TRUE(attention.qkv_bias && attention.output_bias && shape.mlp_bias);
}

TEST(ModelShape, ReadsRopeParametersOfEitherForm) {
  EXPECT_EQ(attention_of(qwen3_config()).rope.theta, 1e6);
  Json nested = llama_config();
  Json rope = nested["rope_scaling"];
  rope["rope_theta"] = 250000.0;
  nested.erase("rope_scaling");
  nested.erase("rope_theta");
  nested["rope_parameters"] = rope;
  EXPECT_EQ(attention_of(nested).rope.theta, 250000);
  EXPECT_TRUE(attention_of(nested).rope.has_scaling);
  nested["rope_parameters"] = {{"full_attention", rope}};
  EXPECT_EQ(attention_of(nested).rope.theta, 250000);
  EXPECT_EQ(attention_of(nested).rope.scaling.factor, 8);
}

TEST(ModelShape, ReadsTheNumberOfExpertsUnderEitherName) {
  Json config = qwen3_moe_config();
  config.erase("num_experts");
  config["num_local_experts"] = 64;
  EXPECT_EQ(model_shape_of(config, "").experts, 64);
}

TEST(ModelShape, CountsAPadTokenFromEitherEnd) {
  Json config = qwen2_config();
  EXPECT_EQ(model_shape_of(config, "config.json").pad_token, -1);
  config["pad_token_id"] = nullptr;
  EXPECT_EQ(model_shape_of(config, "config.json").pad_token, -1);
  config["pad_token_id"] = 151643;
  EXPECT_EQ(model_shape_of(config, "config.json").pad_token, 151643);
  config["pad_token_id"] = -1;
  EXPECT_EQ(model_shape_of(config, "config.json").pad_token, 151935);
  for (const int absurd : {151936, -151937}) {
    config["pad_token_id"] = absurd;
    EXPECT_NE(message<InputError>(config).find("pad_token_id"), std::string::npos) << absurd;
  }
}

// As published, with every layer dense.
Json deepseek_v3_config() {
  return Json::parse(R"({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "hidden_size": 7168,
    "first_k_dense_replace": 61, "head_dim": 64, "intermediate_size": 18432, "kv_lora_rank": 512, "num_hidden_layers": 61,
    "max_position_embeddings": 163840, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "v_head_dim": 128,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096, "type": "yarn"}, "torch_dtype": "bfloat16", "vocab_size": 129280})");
}

TEST(ModelShape, ReadsLatentAttention) {
  const ModelShape v3 = model_shape_of(deepseek_v3_config(), "config.json");
  const LatentShape& latent = latent_of(v3);
  EXPECT_EQ(latent.query, 1536);
  EXPECT_EQ(latent.key_value, 512);
  EXPECT_EQ(latent.head_dim(), 192);
  EXPECT_EQ(latent.value, 128);
  EXPECT_EQ(latent.rotary, 64);
  EXPECT_EQ(latent.heads, 128);
  EXPECT_TRUE(latent.interleaved);
  Json other = deepseek_v3_config();
  other["q_lora_rank"] = nullptr, other["rope_interleave"] = false;
  EXPECT_EQ(latent_of(model_shape_of(other, "config.json")).query, 0);
  EXPECT_FALSE(latent_of(model_shape_of(other, "config.json")).interleaved);
  EXPECT_EQ(v3.experts, 0);
  for (const auto& [member, value] :
       {std::pair("num_key_value_heads", 64), {"qk_rope_head_dim", 7}, {"v_head_dim", 0}}) {
    other = deepseek_v3_config();
    other[member] = value;
    EXPECT_NE(message<InputError>(other).find(member), std::string::npos) << message<InputError>(other);
  }
}

// The published counts: 15.7 and 671 thousand millions, without the module that predicts further tokens.
TEST(ModelShape, ReadsTheExpertsOfLatentAttentionsFamilies) {
  Json config = deepseek_v3_config();
  config.update({{"first_k_dense_replace", 3},
                 {"moe_intermediate_size", 2048},
                 {"n_group", 8},
                 {"topk_group", 4},
                 {"n_routed_experts", 256},
                 {"n_shared_experts", 1},
                 {"norm_topk_prob", true},
                 {"num_experts_per_tok", 8},
                 {"routed_scaling_factor", 2.5},
                 {"scoring_func", "sigmoid"},
                 {"topk_method", "noaux_tc"}});
  const ModelShape v3 = model_shape_of(config, "config.json");
  EXPECT_EQ(v3.parameters(), 671026419200);
  EXPECT_EQ(v3.router.groups, 8);
  EXPECT_EQ(v3.expert_layers(), 58);
  config.update({{"architectures", {"DeepseekV2ForCausalLM"}},
                 {"hidden_size", 2048},
                 {"intermediate_size", 10944},
                 {"moe_intermediate_size", 1408},
                 {"num_hidden_layers", 27},
                 {"num_attention_heads", 16},
                 {"num_key_value_heads", 16},
                 {"q_lora_rank", nullptr},
                 {"n_routed_experts", 64},
                 {"n_shared_experts", 2},
                 {"num_experts_per_tok", 6},
                 {"first_k_dense_replace", 1},
                 {"n_group", 1},
                 {"topk_group", 1},
                 {"topk_method", "greedy"},
                 {"scoring_func", "softmax"},
                 {"vocab_size", 102400}});
  const ModelShape lite = model_shape_of(config, "config.json");
  EXPECT_EQ(lite.parameters(), 15706484224);
  EXPECT_FALSE(lite.norm_topk_prob);  // transformers' router ignores the member
  config["topk_method"] = "noaux_tc";
  EXPECT_NE(message<UnsupportedError>(config).find("topk_method"), std::string::npos);
  config.update({{"topk_method", "greedy"}, {"mlp_bias", true}});
  EXPECT_NE(message<UnsupportedError>(config).find("mlp_bias"), std::string::npos);
}

// Scores are scaled by the square of 0.1 m log(factor) + 1 with m = mscale_all_dim, where the rope is rescaled.
TEST(ModelShape, ScalesScoresOfLatentAttentionByYarnsFactor) {
  Json config = deepseek_v3_config();
  const auto scale = [&] { return latent_of(model_shape_of(config, "config.json")).scale; };
  const double m = 0.1 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(scale(), m * m / std::sqrt(192.0));
  config["rope_scaling"]["mscale_all_dim"] = 0.707;
  const double less = 0.0707 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(scale(), less * less / std::sqrt(192.0));
  config["rope_scaling"].erase("mscale_all_dim");
  EXPECT_EQ(scale(), 0);  // 1/sqrt(head_dim)
  config["rope_scaling"] = nullptr;
  EXPECT_EQ(scale(), 0);
}

TEST(ModelShape, PlacesExpertLayers) {
  Json config = qwen3_moe_config();
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3};
  const ModelShape shape = model_shape_of(config, "");
  EXPECT_TRUE(shape.has_experts(1) && shape.has_experts(5));
  EXPECT_FALSE(shape.has_experts(0) || shape.has_experts(3));
}

TEST(ModelShape, RefusesWhatIsKnownByName) {
  const auto refused = [](Json config, const char* member, const Json& value, const char* word) {
    config[member] = value;
    const std::string text = message<UnsupportedError>(config);
    EXPECT_NE(text.find(word), std::string::npos) << member << ": " << text;
  };
  refused(llama_config(), "attention_dropout", 0.1, "attention_dropout");
  refused(llama_config(), "hidden_act", "relu2", "relu2");
  refused(llama_config(), "rope_scaling", {{"rope_type", "spiral"}, {"factor", 4.0}}, "spiral");
  refused(llama_config(), "rope_scaling", {{"type", "dynamic"}, {"factor", 4.0}}, "dynamic");
  refused(llama_config(), "architectures", {"DbrxForCausalLM"}, "Qwen3MoeForCausalLM");
  refused(llama_config(), "architectures", {"DbrxForCausalLM"}, "DbrxForCausalLM");
  refused(llama_config(), "quantization_config", Json::object(), "quantization_config");
  refused(llama_config(), "torch_dtype", "float8_e4m3fn", "float8_e4m3fn");
  refused(qwen3_config(), "partial_rotary_factor", 0.5, "partial_rotary_factor");
  for (const char* member :
       {"router_jitter_noise", "input_jitter_noise", "expert_capacity", "capacity_factor", "moe_capacity_factor",
        "expert_choice", "shared_expert_intermediate_size", "routed_scaling_factor", "n_group"})
    refused(qwen3_moe_config(), member, 2, member);
  refused(qwen3_moe_config(), "scoring_func", "sigmoid", "scoring_func");
  refused(qwen3_moe_config(), "moe_router_load_balancing_type", "sinkhorn", "moe_router_load_balancing_type");
  refused(llama_config(), "use_sliding_window", true, "sliding window");
  Json chunked = qwen2_config();
  chunked["layer_types"] = std::vector<std::string>(24, "chunked_attention");
  EXPECT_NE(message<UnsupportedError>(chunked).find("chunked_attention"), std::string::npos);
}

Json glm4_moe_config() {
  Json config = qwen3_moe_config();
  config["architectures"] = {"Glm4MoeForCausalLM"};
  config.erase("num_experts");
  config.update({{"n_routed_experts", 16}, {"num_experts_per_tok", 4}, {"n_group", 4}, {"topk_group", 2}});
  return config;
}

TEST(ModelShape, ReadsSharedExpertsAndGroups) {
  Json config = glm4_moe_config();
  config.update({{"n_shared_experts", 2}, {"routed_scaling_factor", 2.5}, {"first_k_dense_replace", 3}});
  const ModelShape shape = model_shape_of(config, "");
  EXPECT_EQ(shape.shared_expert.inner, 2 * shape.expert_inner);
  EXPECT_FALSE(shape.shared_expert.gate);
  EXPECT_TRUE(shape.router.sigmoid && shape.router.correction_bias && shape.norm_topk_prob);
  EXPECT_EQ(std::pair(shape.router.groups, shape.router.top_groups), std::pair(std::int64_t{4}, std::int64_t{2}));
  EXPECT_EQ(shape.router.scaling, 2.5);
  EXPECT_EQ(shape.expert_layers(), shape.layers() - 3);
  EXPECT_FALSE(shape.trained.all());  // correction biases are held
  const auto fails = [](const char* member, int value) {
    Json damaged = glm4_moe_config();
    damaged[member] = value;
    EXPECT_NE(message<InputError>(damaged).find(member), std::string::npos) << member;
  };
  fails("n_group", 3), fails("n_group", 16), fails("topk_group", 5);
  Json few = glm4_moe_config();
  few["topk_group"] = 1, few["num_experts_per_tok"] = 5;
  EXPECT_NE(message<InputError>(few).find("topk_group"), std::string::npos);
}

TEST(ModelShape, ReadsGptOss) {
  Json config = qwen3_moe_config();
  config["architectures"] = {"GptOssForCausalLM"};
  EXPECT_NE(message<InputError>(config).find("rope_scaling"), std::string::npos);  // absent it means yarn
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 32.0}, {"truncate", false}};
  config["quantization_config"] = {{"quant_method", "mxfp4"}};
  const ModelShape shape = model_shape_of(config, "");
  EXPECT_TRUE(testing::attention_of(shape).sinks && shape.expert_bias && shape.router.bias);
  EXPECT_EQ(shape.activation.limit, 7);
  EXPECT_EQ(shape.mixer(0).window(), 128);
  EXPECT_EQ(shape.mixer(1).window(), 0);
  config["swiglu_alpha"] = 1.5;
  EXPECT_NE(message<UnsupportedError>(config).find("swiglu_alpha"), std::string::npos);
}

// As the configuration classes of transformers read them.
TEST(ModelShape, PlacesWindows) {
  const auto windows = [](const Json& config) {
    const ModelShape shape = model_shape_of(config, "");
    std::string layers;
    for (const LayerShape& layer : shape.layer) layers += layer.mixer->window() > 0 ? 'w' : '-';
    return std::pair(shape.window(), layers);
  };
  const std::pair<std::int64_t, std::string> none(0, std::string(24, '-'));
  const std::string every(24, 'w');
  Json qwen = qwen2_config();
  EXPECT_EQ(windows(qwen), none);  // use_sliding_window is false
  qwen["use_sliding_window"] = true, qwen["sliding_window"] = 4096, qwen["max_window_layers"] = 21;
  EXPECT_EQ(windows(qwen), std::pair(std::int64_t{4096}, std::string(21, '-') + "www"));
  qwen["max_window_layers"] = 24;
  EXPECT_EQ(windows(qwen), none);
  qwen["max_window_layers"] = 0, qwen["sliding_window"] = nullptr;
  EXPECT_EQ(windows(qwen), none);
  qwen.erase("sliding_window");
  EXPECT_EQ(windows(qwen), std::pair(std::int64_t{4096}, every));
  qwen["sliding_window"] = std::int64_t{1} << 31;  // longer than any rollout
  EXPECT_EQ(windows(qwen), none);
  Json typed = qwen2_config();
  std::vector<std::string> types(24, "full_attention");
  types[2] = "sliding_attention";
  typed["layer_types"] = types, typed["max_window_layers"] = 0;
  EXPECT_NE(message<InputError>(typed).find("use_sliding_window"), std::string::npos);
  typed["use_sliding_window"] = true, typed["sliding_window"] = 9;
  EXPECT_EQ(windows(typed), std::pair(std::int64_t{9}, "--w" + std::string(21, '-')));
  typed["sliding_window"] = nullptr;
  EXPECT_NE(message<InputError>(typed).find("sliding_window"), std::string::npos);
  typed["layer_types"] = {"full_attention"};
  EXPECT_NE(message<InputError>(typed).find("layer_types"), std::string::npos);

  Json mistral = llama_config();
  mistral["architectures"] = {"MistralForCausalLM"}, mistral["num_hidden_layers"] = 24;
  mistral.erase("rope_scaling");
  EXPECT_EQ(windows(mistral), std::pair(std::int64_t{4096}, every));  // the class's own
  mistral["sliding_window"] = nullptr;
  EXPECT_EQ(windows(mistral), none);
  mistral["sliding_window"] = 128;
  EXPECT_EQ(windows(mistral), std::pair(std::int64_t{128}, every));
  mistral["sliding_window"] = 0;
  EXPECT_NE(message<InputError>(mistral).find("sliding_window"), std::string::npos);
  mistral["sliding_window"] = 128;
  mistral.erase("num_key_value_heads");
  EXPECT_EQ(attention_of(mistral).kv_heads, 8);
  mistral["num_key_value_heads"] = nullptr;
  EXPECT_EQ(attention_of(mistral).kv_heads, 32);

  Json moe = qwen3_moe_config();
  EXPECT_EQ(windows(moe).first, 0);
  moe["use_sliding_window"] = true, moe["sliding_window"] = 64;
  EXPECT_EQ(windows(moe), std::pair(std::int64_t{64}, std::string(48, 'w')));
}

TEST(ModelShape, NamesTheMemberThatIsAbsurd) {
  const auto bad = [](const char* member, const Json& value) {
    Json config = llama_config();
    config[member] = value;
    const std::string text = message<InputError>(config);
    EXPECT_NE(text.find(std::string("'") + member + "'"), std::string::npos) << member << ": " << text;
  };
  for (const char* member : {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                             "intermediate_size", "vocab_size", "max_position_embeddings"}) {
    bad(member, 0);
    bad(member, -4);
    bad(member, 1e18);
    bad(member, 1000000000000000000);
    bad(member, 2.5);
    bad(member, "64");
    bad(member, Json::array());
  }
  bad("num_key_value_heads", 5);
  bad("head_dim", 63);
  bad("rms_norm_eps", 0);
  bad("rope_theta", -1.0);
  bad("architectures", Json::array());
  bad("tie_word_embeddings", 1);
  for (const char* member : {"hidden_size", "vocab_size", "num_hidden_layers"}) {
    Json config = llama_config();
    config.erase(member);
    EXPECT_NE(message<InputError>(config).find(member), std::string::npos);
  }
  Json rope = llama_config();
  rope["rope_scaling"].erase("factor");
  EXPECT_NE(message<InputError>(rope).find("rope_scaling.factor"), std::string::npos);
}

TEST(ModelShape, ReadsADirectoryOrAFileAndSaysWhichIsMissing) {
  const auto folder = std::filesystem::temp_directory_path() / "espalier_model_shape_test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json") << qwen3_config().dump();
  EXPECT_EQ(read_model_shape(folder).layers(), 28);
  EXPECT_EQ(read_model_shape(folder / "config.json").layers(), 28);
  EXPECT_THROW(read_model_shape(folder / "absent"), InputError);
  std::ofstream(folder / "config.json") << "{\"architectures\": [";
  EXPECT_THROW(read_model_shape(folder), InputError);
  std::ofstream(folder / "config.json") << "[1]";
  EXPECT_THROW(read_model_shape(folder), InputError);
  std::filesystem::remove_all(folder);
}

TEST(ModelShape, AgreesWithTheShapesOfTheOtherTests) {
  EXPECT_EQ(model_shape_of(llama_config(), "").parameters(), testing::llama_3_8b().parameters());
  EXPECT_EQ(model_shape_of(qwen3_moe_config(), "").parameters(), testing::qwen3_30b_a3b().parameters());
}

Json classifier(Json config) {
  std::string name = config["architectures"][0].get<std::string>();
  name.replace(name.find("ForCausalLM"), std::string::npos, "ForTokenClassification");
  config["architectures"] = Json::array({name});
  config["id2label"] = {{"0", "LABEL_0"}};
  return config;
}

TEST(CriticShape, IsATokenClassifierWithOneLabelOrTheBlocksOfALanguageModel) {
  for (const Json& config : {llama_config(), qwen2_config(), qwen3_config(), qwen3_moe_config()}) {
    const CriticShape stored = critic_shape_of(classifier(config), ""), fresh = critic_shape_of(config, "");
    EXPECT_TRUE(stored.head_is_stored);
    EXPECT_FALSE(fresh.head_is_stored);
    const ModelShape policy = model_shape_of(config, "");
    for (const ModelShape& shape : {stored.shape, fresh.shape}) {
      EXPECT_TRUE(shape.value_head);
      EXPECT_FALSE(shape.tied_head) << "there is nothing to tie";
      EXPECT_TRUE(shape.architecture.ends_with("ForTokenClassification")) << shape.architecture;
      EXPECT_EQ(shape.head_width(), 1);
      const std::int64_t matrix = policy.vocabulary * policy.hidden;
      EXPECT_EQ(shape.parameters(), policy.parameters() - (policy.tied_head ? 0 : matrix) + policy.hidden + 1);
    }
  }
}

TEST(CriticShape, RefusesMoreLabelsThanOne) {
  const auto message = [](const Json& config) -> std::string {
    try {
      critic_shape_of(config, "config.json");
    } catch (const InputError& error) {
      return error.what();
    }
    return "nothing thrown";
  };
  Json two = classifier(qwen3_config()), unsaid = two, said = two;
  two["id2label"] = {{"0", "a"}, {"1", "b"}};
  unsaid.erase("id2label");  // two by default
  EXPECT_NE(message(two).find("id2label"), std::string::npos);
  EXPECT_NE(message(unsaid).find("num_labels"), std::string::npos);
  said.erase("id2label"), said["num_labels"] = 1;
  EXPECT_EQ(message(said), "nothing thrown");
}

TEST(CriticShape, ATokenClassifierIsNoPolicy) {
  EXPECT_NE(message<UnsupportedError>(classifier(qwen2_config())).find("Qwen2ForTokenClassification"),
            std::string::npos);
}

}  // namespace
}  // namespace espalier
