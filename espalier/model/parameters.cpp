// The order of parameters in the flat buffer. A family is a set of flags of ModelShape: Llama 3 (no flag, or biases),
// Qwen2 (qkv_bias), Qwen3 (qk_norm), Qwen3-MoE (qk_norm, experts).
// M hidden, F inner, H query heads, J key/value heads, D head size, V vocabulary; matrices are [out, in].
#include "espalier/model/parameters.h"

#include <utility>

#include "espalier/base/error.h"

namespace espalier {
namespace {

using Entry = std::pair<std::string, std::vector<std::int64_t>>;
using Entries = std::vector<Entry>;

void append_attention(const ModelShape& shape, const std::string& prefix, Entries& out) {
  const std::int64_t M = shape.hidden, D = shape.head_dim, H = shape.heads, J = shape.kv_heads;
  out.push_back({prefix + "q_proj.weight", {H * D, M}});
  out.push_back({prefix + "k_proj.weight", {J * D, M}});
  out.push_back({prefix + "v_proj.weight", {J * D, M}});
  if (shape.qkv_bias) {
    out.push_back({prefix + "q_proj.bias", {H * D}});
    out.push_back({prefix + "k_proj.bias", {J * D}});
    out.push_back({prefix + "v_proj.bias", {J * D}});
  }
  out.push_back({prefix + "o_proj.weight", {M, H * D}});
  if (shape.output_bias) out.push_back({prefix + "o_proj.bias", {M}});
  if (shape.qk_norm) {
    out.push_back({prefix + "q_norm.weight", {D}});
    out.push_back({prefix + "k_norm.weight", {D}});
  }
}

void append_dense_mlp(const ModelShape& shape, const std::string& prefix, Entries& out) {
  const std::int64_t M = shape.hidden, F = shape.inner;
  out.push_back({prefix + "gate_proj.weight", {F, M}});
  out.push_back({prefix + "up_proj.weight", {F, M}});
  if (shape.mlp_bias) {
    out.push_back({prefix + "gate_proj.bias", {F}});
    out.push_back({prefix + "up_proj.bias", {F}});
  }
  out.push_back({prefix + "down_proj.weight", {M, F}});
  if (shape.mlp_bias) out.push_back({prefix + "down_proj.bias", {M}});
}

// E experts with inner width F of their own: the router, gate and up of every expert, down of every expert.
void append_experts(const ModelShape& shape, const std::string& prefix, Entries& out) {
  const std::int64_t M = shape.hidden, E = shape.experts, F = shape.expert_inner;
  const auto expert = [&](std::int64_t e) { return prefix + "experts." + std::to_string(e) + "."; };
  out.push_back({prefix + "gate.weight", {E, M}});
  for (std::int64_t e = 0; e < E; ++e) {
    out.push_back({expert(e) + "gate_proj.weight", {F, M}});
    out.push_back({expert(e) + "up_proj.weight", {F, M}});
  }
  for (std::int64_t e = 0; e < E; ++e) out.push_back({expert(e) + "down_proj.weight", {M, F}});
}

Entries layer_entries(const ModelShape& shape, std::int64_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  Entries out;
  out.push_back({prefix + "input_layernorm.weight", {shape.hidden}});
  append_attention(shape, prefix + "self_attn.", out);
  out.push_back({prefix + "post_attention_layernorm.weight", {shape.hidden}});
  shape.has_experts(layer) ? append_experts(shape, prefix + "mlp.", out)
                           : append_dense_mlp(shape, prefix + "mlp.", out);
  return out;
}

}  // namespace

ParameterTable::ParameterTable(const ModelShape& shape) {
  add("model.embed_tokens.weight", {shape.vocabulary, shape.hidden});
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    for (auto& [name, dims] : layer_entries(shape, layer)) add(std::move(name), std::move(dims));
  add("model.norm.weight", {shape.hidden});
  if (shape.value_head) {
    add(kValueWeight, {1, shape.hidden});
    add(kValueBias, {1});
  } else if (!shape.tied_head) {
    add("lm_head.weight", {shape.vocabulary, shape.hidden});
  }
}

const Parameter& ParameterTable::at(const std::string& name) const {
  const auto found = index_.find(name);
  ESPALIER_INTERNAL(found != index_.end(), "no parameter '", name, "'");
  return parameters_[found->second];
}

void ParameterTable::add(std::string name, std::vector<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) {
    ESPALIER_INTERNAL(size > 0, "parameter '", name, "' has a dimension of ", size);
    ESPALIER_INTERNAL(!__builtin_mul_overflow(count, size, &count), "parameter '", name, "' is too large");
  }
  index_.emplace(name, parameters_.size());
  parameters_.push_back({std::move(name), std::move(shape), size_, count});
  size_ += count;
}

}  // namespace espalier
