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

Json usual_members_of_sarvam_mla(const Members& config) {
  Json out = config.all();
  copy(config.all(), {"num_shared_experts", "n_shared_experts"}, out);
  for (const char* const name : {"num_shared_experts", "head_dim", "q_head_dim"}) out.erase(name);  // derived
  if (!out.contains("q_lora_rank")) out["q_lora_rank"] = nullptr;
  for (const char* const holder : {"rope_scaling", "rope_parameters"}) {
    const auto rope = out.find(holder);
    if (rope == out.end() || !rope->is_object()) continue;
    for (const char* const member : {"type", "rope_type"})
      if (const auto type = rope->find(member); type != rope->end() && *type == "deepseek_yarn") *type = "yarn";
  }
  if (const std::string name = config.text("score_function", "sigmoid"); name != "sigmoid")
    config.refuse("score_function '" + name + "'", "scores by sigmoid");
  return out;
}

}  // namespace espalier
