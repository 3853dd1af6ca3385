#include "espalier/model/model_views.h"

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Finds parameters by name in one flat buffer and joins neighbours to one view.
class Viewer {
 public:
  Viewer(const at::Tensor& flat, const ParameterTable& table) : flat_(flat), table_(table) {}

  at::Tensor one(const std::string& name) const {
    const Parameter& parameter = table_.at(name);
    return flat_.narrow(0, parameter.offset, parameter.count).view(parameter.shape);
  }
  at::Tensor if_present(const std::string& name) const { return table_.contains(name) ? one(name) : at::Tensor(); }

  // Both, end to end along the first dimension.
  at::Tensor pair(const std::string& first, const std::string& second) const {
    if (!table_.contains(first)) return {};
    const Parameter& a = table_.at(first);
    const Parameter& b = table_.at(second);
    ESPALIER_INTERNAL_EQ(a.offset + a.count, b.offset, first, " and ", second, " are read as one matrix");
    std::vector<std::int64_t> shape = a.shape;
    shape[0] += b.shape[0];
    return flat_.narrow(0, a.offset, a.count + b.count).view(shape);
  }

  // Gapless parameters from the first to the last named, seen as one tensor.
  at::Tensor range(const std::string& first, const std::string& last, at::IntArrayRef shape) const {
    const Parameter &a = table_.at(first), &b = table_.at(last);
    const at::Tensor values = flat_.narrow(0, a.offset, b.offset + b.count - a.offset);
    ESPALIER_INTERNAL_EQ(values.numel(), c10::multiply_integers(shape), first, " to ", last);
    return values.view(shape);
  }

 private:
  const at::Tensor& flat_;
  const ParameterTable& table_;
};

void view_dense_mlp(const Viewer& viewer, const std::string& mlp, LayerViews& views) {
  views.gate_up_weight = viewer.pair(mlp + "gate_proj.weight", mlp + "up_proj.weight");
  views.gate_up_bias = viewer.pair(mlp + "gate_proj.bias", mlp + "up_proj.bias");
  views.down_weight = viewer.one(mlp + "down_proj.weight");
  views.down_bias = viewer.if_present(mlp + "down_proj.bias");
}

void view_experts(const Viewer& viewer, const ModelShape& shape, const std::string& mlp, LayerViews& views) {
  const std::int64_t E = shape.experts, M = shape.hidden, F = shape.expert_inner;
  const std::string first = mlp + "experts.0.", last = mlp + "experts." + std::to_string(E - 1) + ".";
  views.router_weight = viewer.one(mlp + "gate.weight");
  views.expert_gate_up_EWM = viewer.range(first + "gate_proj.weight", last + "up_proj.weight", {E, 2 * F, M});
  views.expert_down_EMF = viewer.range(first + "down_proj.weight", last + "down_proj.weight", {E, M, F});
}

LayerViews view_layer(const Viewer& viewer, const ModelShape& shape, std::int64_t index) {
  const std::string layer = "model.layers." + std::to_string(index) + ".";
  const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
  LayerViews views;
  views.attention_norm_M = viewer.one(layer + "input_layernorm.weight");
  views.q_weight = viewer.one(attention + "q_proj.weight");
  views.q_bias = viewer.if_present(attention + "q_proj.bias");
  views.kv_weight = viewer.pair(attention + "k_proj.weight", attention + "v_proj.weight");
  views.kv_bias = viewer.pair(attention + "k_proj.bias", attention + "v_proj.bias");
  views.q_norm_D = viewer.if_present(attention + "q_norm.weight");
  views.k_norm_D = viewer.if_present(attention + "k_norm.weight");
  views.output_weight = viewer.one(attention + "o_proj.weight");
  views.output_bias = viewer.if_present(attention + "o_proj.bias");
  views.mlp_norm_M = viewer.one(layer + "post_attention_layernorm.weight");
  shape.has_experts(index) ? view_experts(viewer, shape, mlp, views) : view_dense_mlp(viewer, mlp, views);
  return views;
}

}  // namespace

ModelViews view_model(const at::Tensor& flat, const ParameterTable& table, const ModelShape& shape) {
  ESPALIER_INTERNAL_EQ(flat.numel(), table.size());
  const Viewer viewer(flat, table);
  ModelViews views;
  views.embedding_VM = viewer.one("model.embed_tokens.weight");
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) views.layers.push_back(view_layer(viewer, shape, layer));
  views.final_norm_M = viewer.one("model.norm.weight");
  if (shape.value_head)
    views.value_M = viewer.one(kValueWeight).view({shape.hidden}), views.value_bias_1 = viewer.one(kValueBias);
  else
    views.head_VM = shape.tied_head ? views.embedding_VM : viewer.one("lm_head.weight");
  return views;
}

}  // namespace espalier
