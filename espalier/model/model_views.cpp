#include "espalier/model/model_views.h"

#include <initializer_list>

#include "espalier/base/error.h"

namespace espalier {
namespace {

// Finds parameters by name in one flat buffer and joins neighbours to one view. What another stage of pp has is
// undefined.
class Viewer {
 public:
  Viewer(const at::Tensor& flat, const at::Tensor& rooms, const ParameterTable& table)
      : flat_(flat), rooms_(rooms), table_(table) {}

  at::Tensor one(const std::string& name) const {
    if (table_.elsewhere(name)) return {};
    const Parameter& parameter = table_.at(name);
    return elements(parameter, parameter.count).view(parameter.shape);
  }
  at::Tensor norm(const std::string& prefix, const NormShape& norm) const {
    return norm.width > 0 ? one(prefix + norm.name + ".weight") : at::Tensor();
  }

  // The projections as one, their outputs end to end.
  Projection projection(const std::string& prefix, std::initializer_list<ProjectionShape> joined) const {
    const bool bias = joined.begin()->bias;
    return {ends(prefix, joined, ".weight"), bias ? ends(prefix, joined, ".bias") : at::Tensor()};
  }

  // Gapless parameters from the first to the last named, seen as one tensor.
  at::Tensor range(const std::string& first, const std::string& last, at::IntArrayRef shape) const {
    const Parameter &a = table_.at(first), &b = table_.at(last);
    const at::Tensor values = elements(a, b.offset + b.count - a.offset);
    ESPALIER_INTERNAL_EQ(values.numel(), c10::multiply_integers(shape), first, " to ", last);
    return values.view(shape);
  }

  // Of a matrix whose rows are divided, those that are not padding.
  at::Tensor rows(const std::string& name) const {
    if (table_.elsewhere(name)) return {};
    const Shard& shard = table_.at(name).shard;
    return one(name).narrow(0, 0, shard.end - shard.begin);
  }

 private:
  // So many from the parameter's first one on, where they are when they are computed with.
  at::Tensor elements(const Parameter& first, std::int64_t count) const {
    const Unit* const unit = table_.unit_of(first);
    if (unit == nullptr) return flat_.narrow(0, first.offset, count);
    const at::Tensor& room = unit->divided() ? rooms_ : flat_;
    return room.narrow(0, (unit->divided() ? unit->room : unit->place) + first.offset - unit->begin, count);
  }

  at::Tensor ends(const std::string& prefix, std::initializer_list<ProjectionShape> joined, const char* kind) const {
    const std::string first = prefix + joined.begin()->name + kind;
    std::vector<std::int64_t> shape = table_.at(first).shape;
    shape[0] = 0;
    for (const ProjectionShape& p : joined) shape[0] += table_.at(prefix + p.name + kind).shape[0];
    return range(first, prefix + (joined.end() - 1)->name + kind, shape);
  }

  const at::Tensor &flat_, &rooms_;
  const ParameterTable& table_;
};

void view_experts(const Viewer& viewer, const LocalShape& shape, const LayerParameters& p, std::int64_t layer,
                  LayerViews& views) {
  const std::string first = expert_prefix(layer, shape.experts().begin),
                    last = expert_prefix(layer, shape.experts().end - 1);
  const std::int64_t E = shape.experts().size(), M = shape.own().hidden, F = shape.own().expert_inner;
  const auto weight = [](const std::string& prefix, const ProjectionShape& one) {
    return prefix + one.name + ".weight";
  };
  views.router = viewer.projection(layer_prefix(layer), {p.router});
  views.expert_gate_up_EWM = viewer.range(weight(first, p.gate), weight(last, p.up), {E, 2 * F, M});
  views.expert_down_EMF = viewer.range(weight(first, p.down), weight(last, p.down), {E, M, F});
}

LayerViews view_layer(const Viewer& viewer, const LocalShape& shape, std::int64_t layer) {
  const LayerParameters p = layer_parameters(shape.whole(), shape.whole().has_experts(layer));
  const std::string prefix = layer_prefix(layer);
  LayerViews views;
  views.attention_norm_M = viewer.norm(prefix, p.attention_norm);
  views.query = viewer.projection(prefix, {p.query});
  views.key_value = viewer.projection(prefix, {p.key, p.value});
  views.q_norm_D = viewer.norm(prefix, p.query_norm);
  views.k_norm_D = viewer.norm(prefix, p.key_norm);
  views.output = viewer.projection(prefix, {p.output});
  views.mlp_norm_M = viewer.norm(prefix, p.mlp_norm);
  if (p.experts > 0) {
    view_experts(viewer, shape, p, layer, views);
  } else {
    views.gate_up = viewer.projection(prefix, {p.gate, p.up});
    views.down = viewer.projection(prefix, {p.down});
  }
  return views;
}

}  // namespace

ModelViews view_model(const at::Tensor& flat, const at::Tensor& rooms, const ParameterTable& table,
                      const LocalShape& shape) {
  ESPALIER_INTERNAL_EQ(flat.numel(), table.kept_size());
  const Viewer viewer(flat, rooms, table);
  const OuterParameters outer = outer_parameters(shape.whole());
  const std::string embedding = std::string(outer.embedding.name) + ".weight";
  ModelViews views;
  views.embedding_VM = viewer.rows(embedding);
  for (std::int64_t layer = shape.layers().begin; layer < shape.layers().end; ++layer)
    views.layers.push_back(view_layer(viewer, shape, layer));
  views.final_norm_M = viewer.norm("", outer.final_norm);
  if (shape.whole().value_head) {
    views.value_M = viewer.one(kValueWeight), views.value_bias_1 = viewer.one(kValueBias);
    if (views.value_M.defined()) views.value_M = views.value_M.view({shape.own().hidden});
  } else {
    views.head_VM =
        shape.whole().tied_head ? views.embedding_VM : viewer.rows(std::string(outer.head.name) + ".weight");
  }
  return views;
}

}  // namespace espalier
