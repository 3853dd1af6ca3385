#include "tests/equivalence/fixture.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>

#include "espalier/base/json.h"
#include "espalier/base/random.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/config/model_config.h"
#include "espalier/config/model_families.h"
#include "espalier/data/training_data.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/ops/cpu/attention/attention.h"
#include "espalier/shape/trained_parameters.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

constexpr int kThreads = 2;  // of the machine that cases are planned for

// Where a run has several threads, they share what these tiny models have to do.
const bool kThreadsShareAll = (attention::set_least_shared_work(0), true);

// "qwen3-moe": 8 experts, 2 a token, renormalised, in every layer. Others vary one thing.
void add_experts(ModelShape& shape, const std::string& family) {
  shape.experts = 8, shape.experts_per_token = 2, shape.expert_inner = 12;
  shape.norm_topk_prob = true;
  set_experts(shape, {1, 1, 1});
  if (family == "qwen3-moe-plain") shape.norm_topk_prob = false;
  if (family == "qwen3-moe-sparse") set_experts(shape, {0, 1, 0});  // decoder_sparse_step 2: a dense last layer
  if (family == "qwen3-moe-late") set_experts(shape, {0, 1, 1});
  if (family == "qwen3-moe-one") shape.experts = 2, shape.experts_per_token = 1, shape.norm_topk_prob = false;
  if (family == "qwen3-moe-all") shape.experts = shape.experts_per_token = 4;
  if (family == "qwen3-moe-128") shape.experts = 128, shape.experts_per_token = 8, shape.expert_inner = 4;
  if (family == "qwen3-moe-many") shape.experts = 16, shape.experts_per_token = 4;
}

// A member of a config as the rows of the table need it beside the common ones: what a family's own sizes would hide.
Json special_members(const std::string& model_type) {
  if (model_type == "phi3")
    return {{"original_max_position_embeddings", 200},
            {"partial_rotary_factor", 0.5},
            {"rope_scaling", {{"type", "longrope"}, {"short_factor", {1.0, 1.5}}, {"long_factor", {2.0, 3.0}}}}};
  if (model_type == "smollm3") return {{"no_rope_layers", {1, 0, 1}}};
  if (model_type == "granite")
    return {{"embedding_multiplier", 3.0}, {"residual_multiplier", 0.4},
            {"logits_scaling", 1.7},       {"attention_multiplier", 0.2},
            {"attention_bias", true},      {"rope_scaling", {{"rope_type", "linear"}, {"factor", 3.0}}}};
  if (model_type == "olmo3")
    return {{"layer_types", {"sliding_attention", "full_attention", "sliding_attention"}},
            {"rope_scaling",
             {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}, {"beta_fast", 4.0}}}};
  if (model_type == "gemma2")
    return {{"query_pre_attn_scalar", 5}, {"attn_logit_softcapping", 0.8}, {"final_logit_softcapping", 2.0}};
  if (model_type == "gemma3_text") return {{"query_pre_attn_scalar", 5}, {"sliding_window_pattern", 2}};
  if (model_type == "mixtral") return {{"num_local_experts", 8}, {"intermediate_size", 12}, {"num_experts", nullptr}};
  const Json shared_expert = {{"shared_expert_intermediate_size", 20}, {"mlp_only_layers", {1}}};
  if (model_type == "qwen2_moe") return shared_expert;
  if (model_type == "qwen3_next" || model_type.starts_with("qwen3_5")) {
    Json delta_rule = {{"layer_types", {"linear_attention", "full_attention", "linear_attention"}},
                       {"linear_num_key_heads", 2},
                       {"linear_num_value_heads", 4},
                       {"linear_key_head_dim", 7},
                       {"linear_value_head_dim", 5}};
    if (model_type != "qwen3_5_text") delta_rule.update(shared_expert);
    return delta_rule;
  }
  // A limit that gates and ups reach.
  if (model_type == "gpt_oss")
    return {{"num_local_experts", 8},
            {"num_experts", nullptr},
            {"intermediate_size", 12},
            {"swiglu_limit", 0.5},
            {"rope_scaling",
             {{"rope_type", "yarn"},
              {"factor", 4.0},
              {"original_max_position_embeddings", 16},
              {"beta_fast", 4.0},
              {"truncate", false}}}};
  // A layer of experts behind dense ones; 4 groups of 2 experts, of which the best 3 are left.
  if (model_type == "glm4_moe")
    return {{"n_routed_experts", 8}, {"num_experts", nullptr},     {"n_group", 4},
            {"topk_group", 3},       {"n_shared_experts", 2},      {"routed_scaling_factor", 1.7},
            {"use_qk_norm", true},   {"first_k_dense_replace", 1}, {"attention_bias", true}};
  if (model_type == "minimax_m2")
    return {{"num_local_experts", 8}, {"intermediate_size", 12}, {"num_experts", nullptr}, {"rotary_dim", 4}};
  // Heads of values smaller and larger than heads of keys; queries with and without a latent.
  if (model_type == "deepseek_v2")
    return {{"num_key_value_heads", 4},
            {"first_k_dense_replace", 1},
            {"n_routed_experts", 8},
            {"num_experts", nullptr},
            {"n_shared_experts", 1},
            {"topk_method", "group_limited_greedy"},
            {"n_group", 4},
            {"topk_group", 2},
            {"routed_scaling_factor", 1.3},
            {"q_lora_rank", nullptr},
            {"kv_lora_rank", 11},
            {"qk_nope_head_dim", 6},
            {"qk_rope_head_dim", 4},
            {"head_dim", 4},
            {"v_head_dim", 7},
            {"attention_bias", true},
            {"rope_scaling",
             {{"type", "yarn"},
              {"factor", 4.0},
              {"original_max_position_embeddings", 16},
              {"beta_fast", 4.0},
              {"mscale", 0.7},
              {"mscale_all_dim", 5.0}}}};
  if (model_type == "sarvam_mla")
    return {{"num_key_value_heads", 4}, {"first_k_dense_replace", 1},
            {"num_shared_experts", 1},  {"n_group", 4},
            {"topk_group", 3},          {"routed_scaling_factor", 1.7},
            {"kv_lora_rank", 11},       {"qk_nope_head_dim", 6},
            {"qk_rope_head_dim", 4},    {"v_head_dim", 7}};
  if (model_type == "deepseek_v3")
    return {
        {"n_routed_experts", 8}, {"num_experts", nullptr},   {"n_shared_experts", 2},    {"n_group", 4},
        {"topk_group", 3},       {"num_experts_per_tok", 3}, {"num_key_value_heads", 4}, {"first_k_dense_replace", 1},
        {"q_lora_rank", 10},     {"kv_lora_rank", 12},       {"qk_nope_head_dim", 5},    {"qk_rope_head_dim", 6},
        {"head_dim", 6},         {"v_head_dim", 13},         {"attention_bias", true}};
  // Steps that reach their limits; the state's columns are other than its rows.
  if (model_type == "bamba")
    return {{"attn_layer_indices", {1}}, {"mamba_n_groups", 2}, {"mamba_n_heads", 4},
            {"mamba_d_state", 7},        {"mamba_expand", 1},   {"time_step_limit", {0.4, 1.0}}};
  if (model_type == "granitemoehybrid")
    return {{"layer_types", {"mamba", "attention", "mamba"}},
            {"num_local_experts", 0},
            {"shared_intermediate_size", 36},
            {"mamba_n_groups", 2},
            {"mamba_n_heads", 4},
            {"mamba_d_state", 7},
            {"mamba_expand", 1},
            {"time_step_limit", {0.4, 1.0}},
            {"embedding_multiplier", 3.0},
            {"residual_multiplier", 0.4},
            {"logits_scaling", 1.7},
            {"attention_multiplier", 0.2}};
  // A block ends with its mixer; another one's is attention.
  if (model_type == "nemotron_h")
    return {{"hybrid_override_pattern", "M-M*-"},
            {"n_groups", 2},
            {"mamba_num_heads", 4},
            {"mamba_head_dim", 5},
            {"ssm_state_size", 7},
            {"time_step_min", 0.4}};
  if (model_type == "ministral") return {{"layer_types", {"full_attention", "sliding_attention", "sliding_attention"}}};
  const Json grouped = {{"num_experts", nullptr}, {"n_routed_experts", 8}, {"n_shared_experts", 2},
                        {"n_group", 4},           {"topk_group", 3},       {"routed_scaling_factor", 1.7}};
  const Json latents = {{"num_key_value_heads", 4}, {"q_lora_rank", 10}, {"kv_lora_rank", 12}, {"qk_nope_head_dim", 5},
                        {"qk_rope_head_dim", 6},    {"head_dim", 6},     {"v_head_dim", 13}};
  const Json around_full = {"sliding_attention", "full_attention", "sliding_attention"};
  const auto with = [](Json members, const Json& more) {
    members.update(more);
    return members;
  };
  if (model_type == "glm4_moe_lite")
    return with(with(grouped, latents), {{"mlp_layer_types", {"sparse", "dense", "sparse"}}});
  if (model_type == "youtu") return latents;
  // Decays of channels around latent attention; a dense layer first.
  if (model_type == "kimi_linear")
    return with(with(grouped, latents), {{"layer_types", {"linear_attention", "full_attention", "linear_attention"}},
                                         {"first_k_dense_replace", 1},
                                         {"q_lora_rank", nullptr},
                                         {"linear_num_heads", 4},
                                         {"linear_head_dim", 5},
                                         {"linear_conv_kernel_dim", 4}});
  // Convolutions with biases around attention, longer than some responses.
  if (model_type == "lfm2")
    return {{"layer_types", {"conv", "full_attention", "conv"}},
            {"conv_bias", true},
            {"conv_L_cache", 4},
            {"block_multiple_of", 8}};
  if (model_type == "seed_oss") return {{"attention_dropout", 0.0}, {"residual_dropout", 0.0}};
  if (model_type == "olmoe") return {{"intermediate_size", 12}};
  if (model_type == "ernie4_5") return {{"use_bias", true}};
  if (model_type == "exaone4") return {{"layer_types", around_full}};
  if (model_type == "exaone_moe")
    return with(grouped, {{"n_routed_experts", nullptr},
                          {"n_shared_experts", nullptr},
                          {"num_experts", 8},
                          {"num_shared_experts", 2},
                          {"mlp_layer_types", {"dense", "sparse", "sparse"}},
                          {"layer_types", around_full}});
  if (model_type == "dots1") return with(grouped, {{"first_k_dense_replace", 1}, {"max_window_layers", 1}});
  if (model_type == "solar_open") return with(grouped, {{"partial_rotary_factor", 0.5}});
  if (model_type == "ministral3")
    return {
        {"rope_parameters",
         {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 6}, {"llama_4_scaling_beta", 0.4}}}};
  if (model_type == "granitemoe" || model_type == "granitemoeshared")
    return {{"num_local_experts", 8},      {"num_experts", nullptr},
            {"intermediate_size", 12},     {"embedding_multiplier", 3.0},
            {"residual_multiplier", 0.4},  {"logits_scaling", 1.7},
            {"attention_multiplier", 0.2}, {"shared_intermediate_size", model_type == "granitemoe" ? 0 : 20}};
  if (model_type == "arcee") return {{"mlp_bias", true}};
  if (model_type == "sarvam_moe")
    return {{"first_k_dense_replace", 1},
            {"num_shared_experts", 2},
            {"n_group", 4},
            {"topk_group", 3},
            {"routed_scaling_factor", 1.7}};
  // Keys that are values, in heads of another size, around windows.
  if (model_type == "gemma4_text")
    return {{"layer_types", {"sliding_attention", "full_attention", "full_attention"}},
            {"global_head_dim", 12},
            {"num_global_key_value_heads", 1},
            {"attention_k_eq_v", true},
            {"final_logit_softcapping", 2.0},
            {"hidden_size_per_layer_input", 0}};
  if (model_type == "cwm")
    return {{"rope_scaling",
             {{"rope_type", "llama3"},
              {"factor", 8.0},
              {"low_freq_factor", 1.0},
              {"high_freq_factor", 4.0},
              {"original_max_position_embeddings", 16}}}};
  return Json::object();
}

}  // namespace

namespace {

// As files have them, in families whose files do.
ModelShape with_output_scales(ModelShape shape) {
  if (shape.names.output_scale[0] != '\0')
    for (std::size_t layer = 0; layer < shape.layer.size(); ++layer)
      shape.layer[layer].output_scale.value = 0.6 + 0.3 * static_cast<double>(layer);
  return shape;
}

ModelShape gemma4_with(const Json& members, std::int64_t vocabulary) {
  Json config = {{"architectures", {"Gemma4ForCausalLM"}},
                 {"hidden_size", 24},
                 {"intermediate_size", 20},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"head_dim", 8},
                 {"vocab_size", vocabulary},
                 {"sliding_window", 5},
                 {"pad_token_id", nullptr}};
  config.update(members);
  return with_output_scales(model_shape_of(config, "Gemma4"));
}

// Layers read the keys and values of earlier ones, of either type, and have inputs of their own.
ModelShape gemma4_that_reads(std::int64_t vocabulary) {
  const Json types = {"sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                      "full_attention"};
  return gemma4_with({{"num_hidden_layers", 5},
                      {"global_head_dim", 12},
                      {"vocab_size_per_layer_input", vocabulary},
                      {"layer_types", types},
                      {"num_kv_shared_layers", 3},
                      {"use_double_wide_mlp", true},
                      {"hidden_size_per_layer_input", 6}},
                     vocabulary);
}

// Experts beside the MLPs.
ModelShape gemma4_with_experts(std::int64_t vocabulary) {
  Json members = special_members("gemma4_text");
  members.update({{"num_hidden_layers", 3},
                  {"enable_moe_block", true},
                  {"num_experts", 8},
                  {"top_k_experts", 3},
                  {"moe_intermediate_size", 12}});
  return gemma4_with(members, vocabulary);
}

}  // namespace

ModelShape tiny_shape_of_row(const Family& row, std::int64_t vocabulary) {
  Json config = {{"architectures", {text_of(row.name, "ForCausalLM")}},
                 {"hidden_size", 24},
                 {"intermediate_size", 40},
                 {"num_hidden_layers", 3},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"head_dim", 8},
                 {"vocab_size", vocabulary},
                 {"max_position_embeddings", 256},
                 {"sliding_window", 5},
                 {"pad_token_id", nullptr}};
  if (row.experts.some)
    config.update(
        {{"num_experts", 8}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 12}, {"norm_topk_prob", true}});
  config.update(special_members(row.model_type));
  return with_output_scales(model_shape_of(config, row.name));
}

ModelShape tiny_shape(const std::string& family, std::int64_t vocabulary) {
  for (const Family& row : model_families())
    if (family == row.name) return tiny_shape_of_row(row, vocabulary);
  if (family == "gemma4-reads") return gemma4_that_reads(vocabulary);
  if (family == "gemma4-moe") return gemma4_with_experts(vocabulary);
  if (family.ends_with("-pad")) {
    ModelShape shape = tiny_shape(family.substr(0, family.size() - 4), vocabulary);
    shape.pad_token = kPadToken;
    return shape;
  }
  if (family.ends_with("-odd")) {
    ModelShape shape = tiny_shape(family.substr(0, family.size() - 4), vocabulary);
    set_inner(shape, 43);
    shape.expert_inner = shape.expert_inner > 0 ? 11 : 0;
    return shape;
  }
  // Behind "-window": rows of some layers see 5, the last layer's among them; behind "-windows": rows of all layers.
  for (const std::string words : {"-window", "-windows"}) {
    if (!family.ends_with(words)) continue;
    ModelShape shape = tiny_shape(family.substr(0, family.size() - words.size()), vocabulary);
    change_attention(shape, [&](AttentionShape& attention, std::size_t layer) {
      attention.window = layer != 1 || words == "-windows" ? 5 : 0;
    });
    return shape;
  }
  // Norms behind the halves of blocks.
  for (const auto& [words, place] :
       {std::pair<std::string, NormPlace>{"-after", NormPlace::after}, {"-both", NormPlace::both}}) {
    if (!family.ends_with(words)) continue;
    ModelShape shape = tiny_shape(family.substr(0, family.size() - words.size()), vocabulary);
    set_norm_place(shape, place);
    return shape;
  }
  // Each row's softmax is joined by a logit per head.
  if (family.ends_with("-sinks")) {
    ModelShape shape = tiny_shape(family.substr(0, family.size() - 6), vocabulary);
    change_attention(shape, [](AttentionShape& attention, std::size_t) { attention.sinks = true; });
    return shape;
  }
  ModelShape shape;
  shape.hidden = 24, shape.vocabulary = vocabulary, shape.max_positions = 256, shape.rms_norm_eps = 1e-6;
  AttentionShape attention;
  attention.heads = 4, attention.kv_heads = 2, attention.head_dim = 8;
  if (family == "llama") {
    shape.architecture = "LlamaForCausalLM";
    attention.rope.has_scaling = true;
    attention.rope.scaling = {8, 1, 4, 16, RopeType::llama3};
  } else if (family == "llama-bias") {
    shape.architecture = "LlamaForCausalLM";
    attention.qkv_bias = attention.output_bias = shape.mlp_bias = shape.tied_head = true;
    attention.kv_heads = 1;
  } else if (family == "qwen2") {
    shape.architecture = "Qwen2ForCausalLM";
    attention.qkv_bias = true;
    attention.kv_heads = 4;
  } else if (family.starts_with("qwen3-next")) {
    shape.architecture = "Qwen3NextForCausalLM";
    attention.qk_norm = attention.output_gate = true;
  } else if (family.starts_with("qwen3-moe")) {
    shape.architecture = "Qwen3MoeForCausalLM";
    attention.qk_norm = true;
  } else {
    shape.architecture = "Qwen3ForCausalLM";
    attention.qk_norm = shape.tied_head = true;
    attention.head_dim = 16;
  }
  shape.layer = attention_layers(3, attention, 40);
  if (family.starts_with("qwen3-next")) {
    RecurrenceShape states{2, 4, 6, 5, 4, true};
    states.by_key_head = family != "qwen3-next-plain";
    set_delta_rule(shape, states,
                   family == "qwen3-next-last"  ? std::vector<int>{1, 0, 1}
                   : family == "qwen3-next-all" ? std::vector<int>{1, 1, 1}
                                                : std::vector<int>{1, 1, 0});
    if (family == "qwen3-next-moe") add_experts(shape, "qwen3-moe");
  } else if (family.starts_with("qwen3-moe")) {
    add_experts(shape, family);
  }
  return shape;
}

namespace {

ModelShape with_head(ModelShape shape, bool critic) {
  if (!critic) return shape;
  shape.value_head = true, shape.tied_head = false;
  return train_only(std::move(shape), {});
}

}  // namespace

TrainedChoice choice_of(const Options& o) {
  return {o.train, AdditionChoice{.rank = o.lora_rank,
                                  .alpha = o.lora_alpha,
                                  .root_of_rank = o.use_rslora,
                                  .target = o.lora_target,
                                  .modules = {},
                                  .directory = {}}};
}

ModelShape shape_of(const Case& c) {
  return train_only(with_head(tiny_shape(c.family), c.critic), choice_of(c.options));
}

at::Tensor trained_part(const Case& c, const at::Tensor& of_all) {
  Case all = c;
  all.options.train = "all";
  const ParameterTable from(shape_of(all)), to(shape_of(c), Parameters::trained);
  const at::Tensor out = at::empty({to.size()}, of_all.options());
  for (const Parameter& p : to.parameters())
    out.narrow(0, p.offset, p.count).copy_(of_all.narrow(0, from.at(p.name).offset, p.count));
  return out;
}

at::Tensor parameter_in(const at::Tensor& flat, const Parameter& parameter) {
  return flat.narrow(0, parameter.offset, parameter.count).view(parameter.shape);
}

namespace {

// A shard's part of a whole parameter, as views. A rank has one share each of queries, keys and values.
std::vector<at::Tensor> places_of(const at::Tensor& whole, const Shard& shard) {
  if (shard.dim < 0) return {whole};
  const std::int64_t here = shard.end - shard.begin;
  if (shard.sections[0] == 0) return {whole.narrow(shard.dim, shard.begin, here)};
  const std::int64_t ranks = shard.whole / here, rank = shard.begin / here;
  std::vector<at::Tensor> out;
  std::int64_t first = 0;
  for (const std::int64_t size : shard.sections) {
    if (size > 0) out.push_back(whole.narrow(shard.dim, first + size / ranks * rank, size / ranks));
    first += size;
  }
  return out;
}

}  // namespace

at::Tensor part_of(const at::Tensor& whole, const Shard& shard) {
  const std::vector<at::Tensor> places = places_of(whole, shard);
  return places.size() == 1 ? places.front() : at::concat(places, shard.dim);
}

void put_part(const at::Tensor& whole, const Shard& shard, const at::Tensor& part) {
  std::int64_t first = 0;
  for (const at::Tensor& place : places_of(whole, shard)) {
    const std::int64_t here = shard.dim < 0 ? 0 : place.size(shard.dim);
    place.copy_(shard.dim < 0 ? part : part.narrow(shard.dim, first, here));
    first += here;
  }
}

at::Tensor without_padding(const at::Tensor& local, const Shard& shard) {
  return shard.dim < 0 ? local : local.narrow(shard.dim, 0, shard.end - shard.begin);
}

at::Tensor kept_of(const at::Tensor& flat, const ParameterTable& table) {
  const at::Tensor out = at::zeros({table.kept_size()}, flat.options());
  for (const Parameter& p : table.parameters()) {
    const Kept kept = table.kept(p);
    out.narrow(0, kept.place, kept.count).copy_(flat.narrow(0, p.offset + kept.first, kept.count));
  }
  return out;
}

namespace {

// Weights in float64 as every rank and every plan of a test asks for them again, with the table that names them.
struct ExactModel {
  ParameterTable table;
  at::Tensor weights;  // host
};

ModelShape drawn_shape(const std::string& family, bool critic) {
  ModelShape shape = with_head(tiny_shape(family), critic);
  shape.initializer_range = 0.2;  // large enough for attention and entropies that are not flat
  return shape;
}

ExactModel make_exact_model(const std::string& family, std::uint64_t seed, bool critic) {
  const ModelShape shape = drawn_shape(family, critic);
  const auto model = random_model(shape, DType::float64, seed);
  ExactModel exact{ParameterTable(shape), {}};
  exact.weights = at::empty({exact.table.size()}, at::kDouble);
  const auto copy = [&](const ParameterTable& part, const at::Tensor& values) {
    for (const Parameter& p : part.parameters())
      exact.weights.narrow(0, exact.table.at(p.name).offset, p.count).copy_(values.narrow(0, p.offset, p.count));
  };
  copy(model->table, on_host(model->weights));
  copy(model->held_table, on_host(model->held_weights));
  double* const values = host_values<double>(exact.weights).data();
  Random random(seed, 99);
  for (const Parameter& p : exact.table.parameters())
    if (p.shape.size() == 1)
      for (std::int64_t i = 0; i < p.count; ++i) values[p.offset + i] += 0.3 * random.normal();
  for (const Parameter& p : exact.table.parameters())
    if (p.name.ends_with("A_log")) exact.weights.narrow(0, p.offset, p.count).sub_(3);  // states that last
  for (const Parameter& p : exact.table.parameters())
    if (family == "qwen3-moe-ties" && p.name.ends_with("mlp.gate.weight"))
      exact.weights.narrow(0, p.offset, p.count).zero_();
    else if (family == "qwen3-moe-near-ties" && p.name.ends_with("mlp.gate.weight"))
      for (std::int64_t i = shape.hidden; i < p.count; ++i) {
        double* rows = values + p.offset;
        rows[i] = rows[i % shape.hidden] * (1 + 1e-6 * random.normal());
      }
  return exact;
}

std::shared_ptr<const ExactModel> exact_model(const std::string& family, std::uint64_t seed, bool critic) {
  using Key = std::tuple<std::string, std::uint64_t, bool>;
  constexpr std::size_t kMostHeld = 8;
  static std::mutex mutex;  // ranks are threads
  static std::map<Key, std::shared_ptr<const ExactModel>> held;
  const std::lock_guard lock(mutex);
  const Key key(family, seed, critic);
  if (const auto found = held.find(key); found != held.end()) return found->second;
  if (held.size() == kMostHeld) held.clear();
  return held[key] = std::make_shared<const ExactModel>(make_exact_model(family, seed, critic));
}

}  // namespace

namespace {

// Values of the whole tensor that the parameter is a part of.
at::Tensor adapter_values(const Parameter& p, std::uint64_t seed) {
  const at::Tensor out = at::empty(p.whole_shape(), at::kDouble);
  Random random = Random(seed, 98).fork(std::hash<std::string>()(p.name));
  for (double& value : host_values<double>(out)) value = 0.2 * random.normal();
  return out;
}

}  // namespace

std::unique_ptr<ModelState> tiny_model(const std::string& family, DType dtype, std::uint64_t seed, bool critic,
                                       const Mesh& mesh, const TrainedChoice& train) {
  const std::shared_ptr<const ExactModel> exact = exact_model(family, seed, critic);
  const LocalShape local(train_only(drawn_shape(family, critic), train), mesh.degrees, mesh.place());
  auto model = std::make_unique<ModelState>(local, dtype, bound_device(), mesh);
  const auto fill = [&](const ParameterTable& table, const at::Tensor& weights) {
    const at::Tensor own = at::zeros({table.size()}, scalar_type(dtype));
    for (const Parameter& p : table.parameters())
      without_padding(parameter_in(own, p), p.shard)
          .copy_(part_of(p.added ? adapter_values(p, seed) : parameter_in(exact->weights, exact->table.at(p.name)),
                         p.shard));
    bound_device().to_device(kept_of(own, table), weights);
  };
  fill(model->table, model->weights);
  fill(model->held_table, model->held_weights);
  if (model->corrections_LE.defined()) {
    std::vector<at::Tensor> corrections;
    for (std::int64_t layer = local.layers().begin; layer < local.layers().end; ++layer)
      if (local.whole().has_experts(layer))
        corrections.push_back(
            parameter_in(exact->weights, exact->table.at(layer_prefix(layer) + local.whole().names.correction_bias)));
    bound_device().to_device(at::stack(corrections).to(model->corrections_LE.scalar_type()), model->corrections_LE);
  }
  return model;
}

void write_tiny_model(const ModelState& model, const std::filesystem::path& directory) {
  const ModelShape& s = model.shape;
  const AttentionShape& attention = attention_of(s);
  Json config = {{"architectures", {s.architecture}},
                 {"model_type", s.experts > 0 ? "qwen3_moe" : "qwen3"},
                 {"hidden_size", s.hidden},
                 {"num_hidden_layers", s.layers()},
                 {"intermediate_size", s.layer.front().inner},
                 {"num_attention_heads", attention.heads},
                 {"num_key_value_heads", attention.kv_heads},
                 {"head_dim", attention.head_dim},
                 {"vocab_size", s.vocabulary},
                 {"max_position_embeddings", s.max_positions},
                 {"rms_norm_eps", s.rms_norm_eps},
                 {"rope_theta", attention.rope.theta},
                 {"tie_word_embeddings", s.tied_head},
                 {"hidden_act", "silu"},
                 {"torch_dtype", "float32"}};
  if (s.experts > 0)
    config.update({{"moe_intermediate_size", s.expert_inner},
                   {"num_experts", s.experts},
                   {"num_experts_per_tok", s.experts_per_token},
                   {"norm_topk_prob", s.norm_topk_prob}});
  std::filesystem::create_directories(directory);
  write_json_file(directory / "config.json", config);
  write_named_tensors(directory / "model.safetensors", model.table, DType::float32, host_bytes(on_host(model.weights)));
}

RolloutOptions ragged_rollouts() {
  RolloutOptions options;
  options.groups = 3;
  options.group_size = {1, 4};
  options.prompt_length = {1, 14};
  options.response_length = {1, 10};
  options.shared_start = 0.4, options.equal_response = 0.1, options.empty_response = 0.1;
  options.continues = 0.2, options.mask_gap = 0.3, options.fully_masked = 0.1;
  options.nested_prompt = 0.3, options.late_difference = 0.2;
  options.kept_sets = 0.5;
  options.policy = PolicyAge::far;
  return options;
}

std::vector<std::string> families_of_table() {
  std::vector<std::string> names;
  for (const Family& row : model_families()) names.push_back(row.name);
  return names;
}

Case ragged(const std::string& family) {
  Case c;
  c.family = family;
  c.rollouts = ragged_rollouts();
  return c;
}

std::string name_of_family(std::string family) {
  std::erase(family, '-');
  return family;
}

Options test_options() {
  Options options;
  options.memory_budget = "1GiB";
  return options;
}

namespace {

struct Prepared {
  std::unique_ptr<ModelState> model;
  TrainingData data;
};

Prepared prepare(const Case& c, DType dtype, const Mesh& mesh) {
  auto model = tiny_model(c.family, dtype, c.seed, c.critic, mesh, choice_of(c.options));
  std::vector<Rollout> rollouts = make_rollouts(c.rollouts, c.seed);
  if (c.edit) c.edit(rollouts, *model);
  TrainingData data(std::move(rollouts), c.options, c.critic);
  if (c.critic) data.prepare(0, {});
  model->decoder.reserve_positions(data.longest());
  return {std::move(model), std::move(data)};
}

}  // namespace

Outcome run_case(const Case& c, DType dtype, const Mesh& mesh) {
  Prepared prepared = prepare(c, dtype, mesh);
  Options options = c.options;
  options.dtype = name_of(dtype);
  Outcome run;
  if (c.critic) {
    Workspace workspace(std::int64_t{1} << 30);
    Critic critic(std::move(prepared.model), options, default_profile("cpu", dtype, kThreads), workspace);
    run.critic = critic.compute_gradient(prepared.data.mini_batch(0), true);
    static_cast<PassReport&>(run.report) = run.critic;
    run.gradient = on_host(critic.gradients().flat()).to(at::kDouble, false, true);
    run.loss = run.critic.loss.loss;
    return run;
  }
  Actor actor(*prepared.model, options, default_profile("cpu", dtype, kThreads));
  run.report = compute_gradient(actor, prepared.data.mini_batch(0), true);
  run.gradient = on_host(actor.gradients.flat()).to(at::kDouble, false, true);
  run.loss = run.report.loss.loss;
  return run;
}

Merged merged(const ModelState& model) {
  ModelShape base = model.shape;
  base.trained = {};
  Merged out{ParameterTable(base), {}};
  out.weights = at::zeros({out.table.size()}, model.weights.options());
  const auto copy = [&](const ParameterTable& table, const at::Tensor& flat) {
    for (const Parameter& p : table.parameters())
      if (!p.added) parameter_in(out.weights, out.table.at(p.name)).copy_(parameter_in(flat, p));
  };
  const at::Tensor trained = on_host(model.weights);
  copy(model.table, trained);
  copy(model.held_table, on_host(model.held_weights));
  for (const AddedPair& pair : added_pairs(model.shape))
    parameter_in(out.weights, out.table.at(pair.weight))
        .addmm_(parameter_in(trained, model.table.at(pair.b)), parameter_in(trained, model.table.at(pair.a)), 1,
                model.shape.trained.added.scale());
  return out;
}

namespace {

// The gradient of what trains from that of the merged weights.
at::Tensor of_what_trains(const ModelState& model, const Merged& whole, const at::Tensor& gradient) {
  const at::Tensor out = at::empty({model.table.size()}, gradient.options()),
                   weights = on_host(model.weights).to(gradient.scalar_type());
  const double scale = model.shape.trained.added.scale();
  for (const Parameter& p : model.table.parameters()) {
    const at::Tensor own = parameter_in(out, p);
    p.added ? own.zero_() : own.copy_(parameter_in(gradient, whole.table.at(p.name)));
  }
  const auto own = [&](const std::string& name) { return parameter_in(out, model.table.at(name)); };
  const auto value = [&](const std::string& name) { return parameter_in(weights, model.table.at(name)); };
  for (const AddedPair& pair : added_pairs(model.shape)) {  // several may have the same A
    const at::Tensor grad = parameter_in(gradient, whole.table.at(pair.weight));
    own(pair.a).addmm_(value(pair.b).t(), grad, 1, scale);
    own(pair.b).addmm_(grad, value(pair.a).t(), 1, scale);
  }
  return out;
}

}  // namespace

OracleResult run_oracle(const Case& c, DType dtype) {
  const Prepared prepared = prepare(c, dtype, mesh_of_one());
  const MiniBatch batch = prepared.data.mini_batch(0);
  const ModelState& model = *prepared.model;
  const Merged whole = merged(model);
  OracleResult result =
      c.critic ? value_oracle(model.shape, whole.table, whole.weights, batch.rollouts, batch.targets, c.options)
               : oracle(model.shape, whole.table, whole.weights, batch.rollouts, batch.advantages, c.options);
  result.gradient = of_what_trains(model, whole, result.gradient.to(at::kDouble));
  return result;
}

PhasePeaks predicted_arena_bytes(const Case& c, const StepPlan& plan, DType dtype) {
  const bool routers = c.options.router_aux_loss_coef != 0 || c.options.router_z_loss_coef != 0;
  StepKind kind = forward_kind_of(shape_of(c), make_rollouts(c.rollouts, c.seed));
  kind.gradients = true, kind.whole_rollout = c.options.policy_loss == "gspo", kind.all_rows_choose = routers;
  const ActivationBytes bytes(shape_of(c), dtype, kind, {{.optimizer = false}, {}});
  const std::int64_t beside = bytes.constant() + bytes.scratch(plan.max_rows, plan.max_path_rows, kThreads) +
                              bytes.in_flight(plan.chosen.stored_bytes) +
                              bytes.in_flight(plan.chosen.path_stored_bytes);
  PhasePeaks arena = plan.chosen.bytes;
  for (std::int64_t* phase : {&arena.a, &arena.b, &arena.c})
    if (*phase != 0) *phase -= beside;
  return arena;
}

void expect_same_bits(const Outcome& run, const Outcome& expected) {
  ASSERT_EQ(run.report.series.size(), expected.report.series.size());
  const auto differing = [](const std::vector<double>& a, const std::vector<double>& b) {
    std::int64_t found = a.size() == b.size() ? 0 : -1;
    for (std::size_t t = 0; found >= 0 && t < a.size(); ++t) found += std::memcmp(&a[t], &b[t], sizeof(double)) != 0;
    return found;
  };
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < run.report.series.size(); ++i) {
    const RolloutSeries &found = run.report.series[i], &other = expected.report.series[i];
    EXPECT_EQ(differing(found.logprob, other.logprob), 0) << "log-probs of rollout " << i;
    EXPECT_EQ(differing(found.entropy, other.entropy), 0) << "entropies of rollout " << i;
    tokens += other.logprob.size();
  }
  EXPECT_GT(tokens, 0u);
}

Worst worst_parameter(const Case& c, const at::Tensor& gradient, const at::Tensor& reference) {
  const ParameterTable table(shape_of(c), Parameters::trained);
  Worst worst;
  // If a parameter's true gradient vanishes (queries that see one key), rounding leaves 1e-16 of the whole gradient
  // for each of the dozens of terms that cancel: that must be within the 1e-10 that are required of all.
  const double smallest = 1e-4 * reference.norm().item<double>();
  for (const Parameter& p : table.parameters()) {
    const at::Tensor a = gradient.narrow(0, p.offset, p.count), b = reference.narrow(0, p.offset, p.count);
    const double norm = std::max(b.norm().item<double>(), smallest);
    const double difference = (a - b).norm().item<double>();
    const double error = difference == 0 ? 0 : difference / norm;
    if (!(error <= worst.error)) worst = {p.name, error};
  }
  return worst;
}

std::vector<Plan> all_plans(const std::vector<std::int64_t>& budgets) {
  std::vector<Plan> plans;
  for (const std::int64_t budget : budgets) {
    const std::string rows = ", budget " + std::to_string(budget);
    plans.push_back({"dense" + rows, "dense", budget, "auto"});
    plans.push_back({"packed" + rows, "packed", budget, "auto"});
    plans.push_back({"phased, keep" + rows, "phased", budget, "keep"});
    plans.push_back({"phased, recompute" + rows, "phased", budget, "recompute"});
    plans.push_back({"phased, offload" + rows, "phased", budget, "offload"});
    plans.push_back({"phased, waves recompute" + rows, "phased", budget, "keep", "recompute"});
    plans.push_back({"auto" + rows, "auto", budget, "auto"});
  }
  return plans;
}

Case with(Case c, const Plan& plan) {
  c.options.schedule = plan.schedule;
  c.options.token_budget = plan.budget;
  c.options.trunk_state = plan.trunk_state;
  c.options.wave_state = plan.wave_state;
  return c;
}

}  // namespace espalier::testing
