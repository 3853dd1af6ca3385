#include "espalier/config/usual_members.h"

#include <cstdint>
#include <utility>

namespace espalier {
namespace {

constexpr std::pair<const char*, const char*> kMembers[] = {{"model_max_length", "max_position_embeddings"},
                                                            {"moe_renormalize", "norm_topk_prob"},
                                                            {"num_expert_group", "n_group"},
                                                            {"num_experts_per_token", "num_experts_per_tok"},
                                                            {"num_shared_experts", "n_shared_experts"}};
constexpr std::pair<const char*, const char*> kLinearMembers[] = {{"head_dim", "linear_head_dim"},
                                                                  {"num_heads", "linear_num_heads"},
                                                                  {"short_conv_kernel_size", "linear_conv_kernel_dim"}};

void copy(const Json& from, const std::pair<const char*, const char*>& names, Json& to) {
  if (from.contains(names.first)) to[names.second] = from.at(names.first);
}

// layer_types from the numbers of layers, which begin at 1.
Json types_of(const Members& linear, std::int64_t layers) {
  Json types(static_cast<std::size_t>(layers), nullptr);
  for (const auto& [name, type] :
       {std::pair{"full_attn_layers", "full_attention"}, {"kda_layers", "linear_attention"}}) {
    const std::string expected = text_of("a list of numbers of layers in [1, ", layers, "]");
    if (!linear.at(name).is_array()) linear.fail(name, expected);
    for (const Json& number : linear.at(name)) {
      if (!number.is_number_integer() || number.get<std::int64_t>() < 1 || number.get<std::int64_t>() > layers)
        linear.fail(name, expected);
      types[number.get<std::size_t>() - 1] = type;
    }
  }
  for (std::size_t layer = 0; layer < types.size(); ++layer)
    if (types[layer].is_null())
      linear.fail("kda_layers", text_of("a list with layer ", layer + 1, ", which full_attn_layers is without"));
  return types;
}

}  // namespace

Json usual_members_of_kimi(const Members& config) {
  Json out = config.all();
  for (const auto& names : kMembers) {
    copy(config.all(), names, out);
    out.erase(names.first);
  }
  for (const char* const name : {"rope_theta", "rope_scaling", "rope_parameters"}) out.erase(name);  // nothing rotates
  if (!out.contains("q_lora_rank")) out["q_lora_rank"] = nullptr;
  if (!config.flag("mla_use_nope", true))
    config.refuse("mla_use_nope = false", "layers of full attention without rotation");
  if (const std::string name = config.text("moe_router_activation_func", "sigmoid"); name != "sigmoid")
    config.refuse("moe_router_activation_func '" + name + "'", "scores by sigmoid");
  if (!config.has("linear_attn_config")) return out;
  const Json& stated = config.at("linear_attn_config");
  if (!stated.is_object()) config.fail("linear_attn_config", "an object");
  for (const auto& names : kLinearMembers) copy(stated, names, out);
  const Members linear(stated, config.where(), "linear_attn_config.");
  if (!config.has("layer_types") && linear.has("full_attn_layers") && linear.has("kda_layers"))
    out["layer_types"] = types_of(linear, config.integer("num_hidden_layers", 1, 10000));
  return out;
}

namespace {

// The members of both models of Sarvam.
Json with_shared_experts(const Members& config) {
  Json out = config.all();
  copy(config.all(), {"num_shared_experts", "n_shared_experts"}, out);
  out.erase("num_shared_experts");
  if (const std::string name = config.text("score_function", "sigmoid"); name != "sigmoid")
    config.refuse("score_function '" + name + "'", "scores by sigmoid");
  return out;
}

}  // namespace

Json usual_members_of_sarvam_mla(const Members& config) {
  Json out = with_shared_experts(config);
  for (const char* const name : {"head_dim", "q_head_dim"}) out.erase(name);  // derived
  if (!out.contains("q_lora_rank")) out["q_lora_rank"] = nullptr;
  for (const char* const holder : {"rope_scaling", "rope_parameters"}) {
    const auto rope = out.find(holder);
    if (rope == out.end() || !rope->is_object()) continue;
    for (const char* const member : {"type", "rope_type"})
      if (const auto type = rope->find(member); type != rope->end() && *type == "deepseek_yarn") *type = "yarn";
  }
  return out;
}

Json usual_members_of_sarvam_moe(const Members& config) {
  Json out = with_shared_experts(config);
  for (const char* const name : {"use_qkv_bias", "attention_bias", "use_bias"})
    if (config.flag(name, false)) config.refuse(text_of(name, " = true"), "projections without biases");
  if (!out.contains("use_qk_norm")) out["use_qk_norm"] = true;
  if (!config.flag("moe_router_enable_expert_bias", true))
    config.refuse("moe_router_enable_expert_bias = false", "routers with a correction bias");
  return out;
}

namespace {

constexpr const char *kSliding = "sliding_attention", *kFull = "full_attention";

// transformers gives the last layer no window.
Json types_of_gemma4(const Members& config, std::int64_t layers) {
  constexpr std::int64_t kPeriod = 6;
  Json types = Json::array();
  if (config.has("layer_types") && config.at("layer_types").is_array())
    types = config.at("layer_types");
  else
    for (std::int64_t layer = 1; layer <= layers; ++layer) types.push_back(layer % kPeriod != 0 ? kSliding : kFull);
  if (!types.empty()) types.back() = kFull;
  return types;
}

// per_layer_config, as transformers writes it: {"5": {"head_dim": 512, "num_key_value_heads": 4}, ...} for all layers
// without a window.
void read_per_layer(const Members& config, Json& out) {
  const char* const name = "per_layer_config";
  if (!config.has(name)) return;
  const Json &stated = config.at(name), &types = out.at("layer_types");
  if (!stated.is_object()) config.fail(name, "an object");
  Json of_full;
  for (std::size_t layer = 0; layer < types.size(); ++layer) {
    const auto found = stated.find(std::to_string(layer));
    const Json own = found == stated.end() || !found->is_object() ? Json::object() : *found;
    if (types[layer] == kFull && of_full.is_null()) of_full = own;
    if (own != (types[layer] == kFull ? of_full : Json::object()))
      config.refuse(text_of(name, " with ", shown(own), " for layer ", layer),
                    "the same heads in all layers of full_attention, and num_key_value_heads and head_dim in others");
  }
  for (const auto& [member, value] : of_full.items())
    if (member != "head_dim" && member != "num_key_value_heads")
      config.refuse(text_of(name, " with ", member), "head_dim and num_key_value_heads in per_layer_config");
  copy(of_full, {"head_dim", "global_head_dim"}, out);
  copy(of_full, {"num_key_value_heads", "num_global_key_value_heads"}, out);
  if (!of_full.contains("head_dim")) out["global_head_dim"] = out.value("head_dim", Json());
}

// Experts stand beside the MLP of every layer, or there are none.
void read_experts_of_gemma4(const Members& config, Json& out) {
  if (!config.flag("enable_moe_block", false)) {
    out["num_experts"] = 0;
    return;
  }
  config.integer("num_experts", 1, 65536);
  copy(config.all(), {"top_k_experts", "num_experts_per_tok"}, out);
}

}  // namespace

Json usual_members_of_gemma4(const Members& config) {
  Json out = config.all();
  out["layer_types"] = types_of_gemma4(config, config.integer("num_hidden_layers", 1, 10000));
  if (!config.has("rope_parameters"))
    out["rope_parameters"] = {
        {kSliding, {{"rope_type", "default"}, {"rope_theta", 1e4}}},
        {kFull, {{"rope_type", "proportional"}, {"partial_rotary_factor", 0.25}, {"rope_theta", 1e6}}}};
  if (!config.flag("attention_k_eq_v", false)) out.erase("num_global_key_value_heads");
  read_per_layer(config, out);
  // Tokens of images see each other; rollouts have none.
  if (config.has("use_bidirectional_attention") && config.at("use_bidirectional_attention") == "vision")
    out.erase("use_bidirectional_attention");
  else if (config.has("use_bidirectional_attention") && config.at("use_bidirectional_attention") != false)
    config.refuse("use_bidirectional_attention = " + shown(config.at("use_bidirectional_attention")),
                  "rows that do not attend to later rows");
  read_experts_of_gemma4(config, out);
  return out;
}

}  // namespace espalier
