#include "espalier/tasks/fresh_model.h"

#include <bit>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/tasks/vocabulary.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// Two blocks: one can look at the token before, the next can look for what was found.
constexpr std::int64_t kLayers = 2, kHidden = 64, kHeads = 4, kInner = 128;
constexpr std::int64_t kExperts = 8, kExpertsPerToken = 2, kExpertInner = 64;
// About 1 / sqrt(hidden): with the usual 0.02 attention of so narrow a model starts nearly uniform and long stays so.
constexpr double kInitializerRange = 0.1;

// A word is a token: Hugging Face's WordLevel model between white space.
Json tokenizer_json() {
  const Vocabulary& words = Vocabulary::built_in();
  Json vocabulary = Json::object();
  for (std::int64_t id = 0; id < words.size(); ++id) vocabulary[words.words()[static_cast<std::size_t>(id)]] = id;
  Json out{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", Json::array()}};
  out["normalizer"] = nullptr;
  out["pre_tokenizer"] = {{"type", "WhitespaceSplit"}};
  out["post_processor"] = nullptr;
  out["decoder"] = nullptr;
  out["model"] = {{"type", "WordLevel"}, {"vocab", vocabulary}, {"unk_token", "<end>"}};
  return out;
}

}  // namespace

Json fresh_config(FreshModel kind, std::int64_t positions) {
  const bool moe = kind == FreshModel::moe;
  Json config;
  config["architectures"] = {moe ? "Qwen3MoeForCausalLM" : "Qwen3ForCausalLM"};
  config["model_type"] = moe ? "qwen3_moe" : "qwen3";
  config["vocab_size"] = Vocabulary::built_in().size();
  config["hidden_size"] = kHidden;
  config["num_hidden_layers"] = kLayers;
  config["num_attention_heads"] = kHeads;
  config["num_key_value_heads"] = kHeads;
  config["head_dim"] = kHidden / kHeads;
  config["intermediate_size"] = kInner;
  if (moe) {
    config["num_experts"] = kExperts;
    config["num_experts_per_tok"] = kExpertsPerToken;
    config["moe_intermediate_size"] = kExpertInner;
    config["norm_topk_prob"] = true;
    config["decoder_sparse_step"] = 1;
    config["mlp_only_layers"] = Json::array();
  }
  config["max_position_embeddings"] = std::bit_ceil(static_cast<std::uint64_t>(positions));
  config["initializer_range"] = kInitializerRange;
  config["rms_norm_eps"] = 1e-6;
  config["rope_theta"] = 10000.0;
  config["tie_word_embeddings"] = true;
  config["attention_bias"] = false;
  config["attention_dropout"] = 0.0;
  config["hidden_act"] = "silu";
  config["eos_token_id"] = Vocabulary::built_in().end();
  config["dtype"] = "float32";
  return config;
}

void write_fresh_model(const fs::path& directory, const Json& config) {
  std::error_code failure;
  fs::create_directories(directory, failure);
  if (failure) throw_output_error(directory, "create this directory", failure.value());
  write_json_file(directory / "config.json", config);
  write_json_file(directory / "tokenizer.json", tokenizer_json());
  write_json_file(directory / "tokenizer_config.json",
                  {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"eos_token", "<end>"}, {"unk_token", "<end>"}});
}

}  // namespace espalier
