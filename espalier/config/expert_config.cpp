#include "espalier/config/expert_config.h"

#include <algorithm>
#include <string_view>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Routing that looks at more than one token, or that is random, cannot be shared; other routers are not the family's.
void refuse_routing(const Members& config, const Family& family) {
  const auto refuse = [&](const char* name, const char* supported) {
    config.refuse(text_of(name, " = ", shown(config.at(name))), supported);
  };
  const auto set = [&](const char* name) {
    return config.has(name) && config.at(name) != Json(false) && config.at(name) != Json(0) &&
           config.at(name) != Json(0.0);
  };
  for (const char* name : {"router_jitter_noise", "input_jitter_noise", "jitter_noise", "router_noise",
                           "router_noise_std", "moe_input_jitter_eps"})
    if (set(name)) refuse(name, "a router without noise (a shared row must be routed the same in every rollout)");
  for (const char* name : {"expert_capacity", "capacity_factor", "moe_capacity_factor", "expert_capacity_factor",
                           "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"})
    if (set(name)) refuse(name, "experts without a capacity, so that no token is dropped");
  for (const char* name : {"expert_choice", "use_expert_choice", "balanced_routing"})
    if (set(name)) refuse(name, "tokens that choose experts independently of each other");
  if (config.has("moe_router_load_balancing_type") && config.at("moe_router_load_balancing_type") == Json("sinkhorn"))
    refuse("moe_router_load_balancing_type", "tokens that choose experts independently of each other");
  const Experts& experts = family.experts;
  for (const char* name :
       {"shared_expert_intermediate_size", "shared_intermediate_size", "n_shared_experts", "num_shared_experts"})
    if (set(name) && !(experts.shared_member[0] != '\0' && config.at(name) == Json(1)) &&
        experts.shared_member != std::string_view(name) && experts.shared_count_member != std::string_view(name))
      refuse(name, "layers without shared experts");
  if (config.has("moe_layer_freq") && config.at("moe_layer_freq") != Json(1))
    refuse("moe_layer_freq", "experts in every layer behind the dense ones");
  if (set("moe_latent_size")) refuse("moe_latent_size", "experts that read whole rows");
  const char* const scores = experts.sigmoid ? "sigmoid" : "softmax";
  for (const char* name : {"scoring_func", "moe_router_score_function"})
    if (config.has(name) && config.at(name) != Json(scores) &&
        !(experts.correction_bias && config.at(name) == Json("noaux_tc")))  // as dots.llm1 calls it
      refuse(name, text_of("scores by ", scores).c_str());
  for (const char* name : {"n_group", "topk_group", "routed_scaling_factor"})
    if (!experts.groups && config.has(name) && config.at(name) != Json(1) && config.at(name) != Json(1.0))
      refuse(name, "the top-k over all experts, without groups or scaling");
}

void read_groups(const Members& config, const Experts& experts, ModelShape& shape) {
  RouterKind& router = shape.router;
  router.scaling = config.positive("routed_scaling_factor", experts.scaling);
  const std::string method = config.text("topk_method", "greedy");
  if (experts.group_method && method != "greedy" && method != "group_limited_greedy")
    config.refuse("topk_method '" + method + "'", "topk_method greedy or group_limited_greedy");
  if (experts.group_method && method == "greedy") return;
  router.groups = config.integer("n_group", 1, shape.experts, experts.group_count);
  router.top_groups = config.integer("topk_group", 1, router.groups, std::min(router.groups, experts.top_groups));
  const std::int64_t of_group = shape.experts / router.groups;
  if (shape.experts % router.groups != 0) config.fail("n_group", text_of("a divisor of ", shape.experts, " experts"));
  if (router.sigmoid && of_group < 2) config.fail("n_group", "few enough groups that each has two experts");
  if (shape.experts_per_token > router.top_groups * of_group)
    config.fail("topk_group", text_of("enough groups for the ", shape.experts_per_token, " experts of a row"));
}

// The number of dense layers before the layers with experts.
std::int64_t dense_layers_of(const Members& config, const Experts& experts) {
  return experts.dense_first ? config.integer("first_k_dense_replace", 0, 1 << 20, experts.dense_layers) : 0;
}

// mlp_layer_types says which layers have experts.
bool has_type_list(const Members& config, const Experts& experts) {
  return experts.type_list && config.has("mlp_layer_types");
}

void set_experts(LayerShape& layer, bool experts) { layer.mlp = experts ? MlpKind::experts : MlpKind::dense; }

void read_type_list(const Members& config, std::vector<LayerShape>& layers) {
  const Json& types = config.at("mlp_layer_types");
  const std::string expected = text_of("a list of ", layers.size(), " words, dense or sparse");
  if (!types.is_array() || types.size() != layers.size()) config.fail("mlp_layer_types", expected);
  for (std::size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] != "dense" && types[layer] != "sparse") config.fail("mlp_layer_types", expected);
    set_experts(layers[layer], types[layer] == "sparse");
  }
}

// Reads which layers have experts.
void read_expert_layers(const Members& config, const Experts& experts, std::vector<LayerShape>& layers) {
  if (has_type_list(config, experts)) return;
  const auto count = static_cast<std::int64_t>(layers.size());
  const std::int64_t dense = dense_layers_of(config, experts);
  const bool by_step = !experts.everywhere && !experts.dense_first;
  const std::int64_t step = by_step ? config.integer("decoder_sparse_step", 1, 1 << 20, 1) : 1;
  for (std::int64_t layer = dense; layer < count; ++layer)
    set_experts(layers[static_cast<std::size_t>(layer)], (layer + 1) % step == 0);
  if (!by_step || !config.has("mlp_only_layers")) return;
  if (!config.at("mlp_only_layers").is_array()) config.fail("mlp_only_layers", "a list of layer numbers");
  for (const Json& layer : config.at("mlp_only_layers")) {
    if (!layer.is_number_integer() || layer.get<std::int64_t>() < 0 || layer.get<std::int64_t>() >= count)
      config.fail("mlp_only_layers", text_of("a list of numbers in [0, ", count, ")"));
    set_experts(layers[layer.get<std::size_t>()], false);
  }
}

}  // namespace

void read_experts(const Members& config, const Family& family, Reading& reading) {
  refuse_routing(config, family);
  ModelShape& shape = reading.shape;
  const Experts& experts = family.experts;
  if (has_type_list(config, experts))
    read_type_list(config, shape.layer);
  else if (dense_layers_of(config, experts) >= shape.layers())
    return;
  if (has_type_list(config, experts) && shape.expert_layers() == 0) return;
  const char* count = "num_experts";
  for (const char* name : {"num_local_experts", "n_routed_experts"})  // as other families, and recent files, have it
    if (!config.has(count)) count = name;
  shape.experts = config.integer(config.has(count) ? count : "num_experts", 1, 65536);
  shape.experts_per_token = config.integer("num_experts_per_tok", 1, shape.experts);
  shape.expert_inner = config.integer(experts.inner_member, 1, 1 << 24);
  shape.norm_topk_prob = experts.renormalises == Renormalises::always ||
                         (experts.renormalises != Renormalises::never &&
                          config.flag("norm_topk_prob", experts.renormalises == Renormalises::member_on));
  shape.router.sigmoid = experts.sigmoid;
  shape.router.wide = experts.wide;
  shape.router.correction_bias = experts.correction_bias;
  shape.router.bias = shape.expert_bias = experts.biases;
  if (experts.groups) read_groups(config, experts, shape);
  if (experts.shared_member[0] != '\0')
    shape.shared_expert.inner =
        config.integer(experts.shared_member, experts.may_share_none ? 0 : 1, 1 << 24, experts.shared);
  if (experts.shared_count_member[0] != '\0')
    shape.shared_expert.inner =
        shape.expert_inner * config.integer(experts.shared_count_member, 1, 1 << 10, experts.shared);
  if (shape.shared_expert.inner > 0 && shape.mlp_bias)
    config.refuse("mlp_bias = true", "shared experts without biases");
  shape.shared_expert.gate = experts.shared_gate;
  shape.shared_expert.apart = shape.router.expert_scale = experts.apart;
  if (!family.names.half_blocks) read_expert_layers(config, experts, shape.layer);
}

}  // namespace espalier
