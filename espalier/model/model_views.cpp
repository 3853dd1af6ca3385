#include "espalier/model/model_views.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/shape/additions.h"

namespace espalier {
namespace {

// Finds parameters by name in flat buffers and joins neighbours to one view. Parameters of another stage of pp are
// undefined, and so are parameters that no buffer has.
class Viewer {
 public:
  Viewer(std::span<const FlatParameters> buffers, double scale_of_pairs) : buffers_(buffers), scale_(scale_of_pairs) {}

  at::Tensor one(const std::string& name) const {
    const FlatParameters* const buffer = holder_of(name);
    if (buffer == nullptr) return {};
    const Parameter& parameter = buffer->table.at(name);
    return elements(*buffer, parameter, parameter.count).view(parameter.buffer_shape());
  }
  // Parts end to end; a single one in the shape that files have.
  at::Tensor tensors(const std::string& prefix, const TensorRow& row) const {
    if (!row.exists()) return {};
    if (row.parts.size() == 1) return one(prefix + row.parts.front().name);
    const std::string first = prefix + row.parts.front().name;
    const FlatParameters* const buffer = holder_of(first);
    if (buffer == nullptr) return {};
    std::int64_t count = 0;
    for (const TensorShape& part : row.parts) count += buffer->table.at(prefix + part.name).count;
    return range(first, prefix + row.parts.back().name, {count});
  }
  at::Tensor norm(const std::string& prefix, const NormShape& norm) const {
    return norm.width > 0 ? one(prefix + norm.name + ".weight") : at::Tensor();
  }
  at::Tensor norm_bias(const std::string& prefix, const NormShape& norm) const {
    return norm.width > 0 && norm.bias ? one(prefix + norm.name + ".bias") : at::Tensor();
  }

  // The projections as one, their outputs end to end.
  Projection projection(const std::string& prefix, const std::vector<ProjectionShape>& joined) const {
    const bool bias = joined.front().bias;
    Projection out{ends(prefix, joined, ".weight"), bias ? ends(prefix, joined, ".bias") : at::Tensor(), {}};
    out.low_rank = low_rank(prefix, joined);
    return out;
  }
  // The pairs of projections whose outputs stand end to end; those with one A are one.
  std::vector<LowRank> low_rank(const std::string& prefix, const std::vector<ProjectionShape>& joined) const {
    std::vector<LowRank> out;
    std::int64_t first = 0;
    for (const ProjectionShape& p : joined) {
      const bool joins = !out.empty() && p.shares_a;
      const LowRank pair = p.rank > 0 ? pair_of(prefix, p) : LowRank();
      if (pair.defined() && joins) {
        out.back().b_Nr = range(pair_names(prefix, joined.front()).b, pair_names(prefix, p).b,
                                {out.back().b_Nr.size(0) + pair.b_Nr.size(0), p.rank});
      } else if (pair.defined()) {
        out.push_back({pair.a_rK, pair.b_Nr, first, scale_});
      }
      first += outputs_of(prefix, p);
    }
    return out;
  }
  // The pair of the head, whose rows are sharded over tp; undefined where it has none.
  LowRank low_rank_of_head(const ProjectionShape& head) const {
    const PairNames names = pair_names("", head);
    if (head.rank == 0 || holder_of(names.b) == nullptr) return {};
    return {one(names.a), rows(names.b), 0, scale_};
  }
  // The same for all experts of a layer, from the first to the last one's.
  std::vector<LowRank> low_rank(const std::string& first, const std::string& last,
                                const std::vector<ProjectionShape>& joined, std::int64_t experts) const {
    std::vector<LowRank> out = low_rank(first, joined);
    const ProjectionShape &begin = joined.front(), &end = joined.back();
    for (LowRank& pair : out) {
      const std::int64_t r = pair.a_rK.size(0), K = pair.a_rK.size(1), N = pair.b_Nr.size(0);
      pair.a_rK = range(pair_names(first, begin).a, pair_names(last, begin).a, {experts, r, K});
      pair.b_Nr = range(pair_names(first, begin).b, pair_names(last, end).b, {experts, N, r});
    }
    return out;
  }

  // Gapless parameters from the first to the last named, seen as one tensor; of quantised matrices the last dimension
  // is that of their bytes.
  at::Tensor range(const std::string& first, const std::string& last, at::IntArrayRef shape) const {
    const FlatParameters* const buffer = holder_of(first);
    if (buffer == nullptr) return {};
    const Parameter &a = buffer->table.at(first), &b = buffer->table.at(last);
    const at::Tensor values = elements(*buffer, a, b.offset + b.count - a.offset);
    std::vector<std::int64_t> stored = shape.vec();
    if (a.quantised_row > 0) stored.back() = a.quantised_row;
    ESPALIER_INTERNAL_EQ(values.numel(), c10::multiply_integers(stored), first, " to ", last);
    return values.view(stored);
  }

  // The rows of a matrix sharded by rows, without padding.
  at::Tensor rows(const std::string& name) const {
    const FlatParameters* const buffer = holder_of(name);
    if (buffer == nullptr) return {};
    const Shard& shard = buffer->table.at(name).shard;
    return one(name).narrow(0, 0, shard.end - shard.begin);
  }

 private:
  LowRank pair_of(const std::string& prefix, const ProjectionShape& p) const {
    const PairNames names = pair_names(prefix, p);
    return {one(names.a), one(names.b)};
  }
  // This rank's outputs of a projection, whichever buffer holds it; 0 where another stage has it.
  std::int64_t outputs_of(const std::string& prefix, const ProjectionShape& p) const {
    for (const std::string& name : {prefix + p.name + ".weight", pair_names(prefix, p).b})
      for (const FlatParameters& buffer : buffers_)
        if (const Parameter* const found = buffer.table.find(name)) return found->shape[0];
    return 0;
  }

  const FlatParameters* holder_of(const std::string& name) const {
    bool known = false;
    for (const FlatParameters& buffer : buffers_) {
      if (buffer.table.contains(name)) return &buffer;
      known = known || buffer.table.elsewhere(name);
    }
    ESPALIER_INTERNAL(known, "no parameter '", name, "'");
    return nullptr;
  }

  // So many from the parameter's first one on, where they are when they are computed with.
  static at::Tensor elements(const FlatParameters& buffer, const Parameter& first, std::int64_t count) {
    if (buffer.values) {
      const std::byte* const values = buffer.values(first.name);
      return at::from_blob(const_cast<std::byte*>(values), {count}, at::kBFloat16);  // which nothing writes
    }
    const Unit* const unit = buffer.table.unit_of(first);
    if (unit == nullptr) return buffer.flat.narrow(0, first.offset, count);
    const at::Tensor& room = unit->sharded() ? buffer.rooms : buffer.flat;
    return room.narrow(0, (unit->sharded() ? unit->room : unit->place) + first.offset - unit->begin, count);
  }

  at::Tensor ends(const std::string& prefix, const std::vector<ProjectionShape>& joined, const char* kind) const {
    const std::string first = prefix + joined.front().name + kind;
    const FlatParameters* const buffer = holder_of(first);
    if (buffer == nullptr) return {};
    std::vector<std::int64_t> shape = buffer->table.at(first).buffer_shape();
    shape[0] = 0;
    for (const ProjectionShape& p : joined) shape[0] += buffer->table.at(prefix + p.name + kind).shape[0];
    return range(first, prefix + joined.back().name + kind, shape);
  }

  std::span<const FlatParameters> buffers_;
  double scale_;
};

void view_experts(const Viewer& viewer, const LocalShape& shape, const LayerParameters& p, std::int64_t layer,
                  LayerViews& views) {
  using Numbers = ExpertProductNumbers;
  const std::string prefix = layer_prefix(layer), first = expert_prefix(shape.whole(), layer, shape.experts().begin),
                    last = expert_prefix(shape.whole(), layer, shape.experts().end - 1);
  const std::int64_t E = shape.experts().size(), M = shape.own().hidden, F = shape.own().expert_inner;
  const auto product = [&](std::size_t number) -> const std::vector<ProjectionShape>& {
    return p.mlp.products()[number].parts;
  };
  const auto name_of = [](const std::string& of_expert, const ProjectionShape& one, const char* kind) {
    return of_expert + one.name + kind;
  };
  const std::vector<ProjectionShape>& gate_up = product(Numbers::gate_up);
  const ProjectionShape& down = product(Numbers::down).front();
  views.router = viewer.projection(prefix, product(Numbers::router));
  const auto tensor = [&](std::size_t number) { return viewer.tensors(prefix, p.mlp.tensors()[number]); };
  using Tensors = ExpertTensorNumbers;
  views.correction_bias_E = tensor(Tensors::correction);
  views.expert_scale_E = tensor(Tensors::expert_scale);
  views.apart = {tensor(Tensors::router_scale), tensor(Tensors::expert_norm), tensor(Tensors::shared_post_norm),
                 tensor(Tensors::expert_post_norm)};
  const std::int64_t W = shape.own().gate_up_width(F);
  views.expert_gate_up_EWM =
      viewer.range(name_of(first, gate_up.front(), ".weight"), name_of(last, gate_up.back(), ".weight"), {E, W, M});
  views.expert_down_EMF = viewer.range(name_of(first, down, ".weight"), name_of(last, down, ".weight"), {E, M, F});
  if (down.bias) {
    views.expert_gate_up_bias_EW =
        viewer.range(name_of(first, gate_up.front(), ".bias"), name_of(last, gate_up.back(), ".bias"), {E, W});
    views.expert_down_bias_EM = viewer.range(name_of(first, down, ".bias"), name_of(last, down, ".bias"), {E, M});
  }
  views.expert_gate_up_low_rank = viewer.low_rank(first, last, gate_up, E);
  views.expert_down_low_rank = viewer.low_rank(first, last, product(Numbers::down), E);
  if (product(Numbers::shared_down).empty()) return;
  views.shared_gate_up = viewer.projection(prefix, product(Numbers::shared_gate_up));
  views.shared_down = viewer.projection(prefix, product(Numbers::shared_down));
  if (!product(Numbers::shared_gate).empty())
    views.shared_expert_gate = viewer.projection(prefix, product(Numbers::shared_gate));
}

// Rows [first, first + count) of the outputs.
Projection part_of(const Projection& whole, std::int64_t first, std::int64_t count) {
  const auto rows = [&](const at::Tensor& x) { return x.defined() ? x.narrow(0, first, count) : x; };
  Projection out{rows(whole.weight), rows(whole.bias), {}};
  for (const LowRank& pair : whole.low_rank) {
    const std::int64_t begin = std::max(first, pair.first),
                       end = std::min(first + count, pair.first + pair.b_Nr.size(0));
    if (begin < end)
      out.low_rank.push_back(
          {pair.a_rK, pair.b_Nr.narrow(0, begin - pair.first, end - begin), begin - first, pair.scale});
  }
  return out;
}

PartViews view_part(const Viewer& viewer, const PartParameters& p, const std::string& prefix) {
  PartViews views;
  for (const ProductShape& product : p.products()) {
    Projection whole = product.exists() ? viewer.projection(prefix, product.parts) : Projection();
    const std::int64_t first = product.split_at, outputs = product.outputs();
    views.behind.push_back(first > 0 ? part_of(whole, first, outputs - first) : Projection());
    views.products.push_back(first > 0 ? part_of(whole, 0, first) : std::move(whole));
  }
  for (const TensorRow& row : p.tensors()) views.tensors.push_back(viewer.tensors(prefix, row));
  return views;
}

LayerViews view_layer(const Viewer& viewer, const LocalShape& shape, std::int64_t layer) {
  const ModelShape& whole = shape.whole();
  const LayerParameters p = layer_parameters(whole, whole.at(layer));
  const std::string prefix = layer_prefix(layer);
  LayerViews views;
  views.mixer_norm_M = viewer.norm(prefix, p.mixer_norm);
  views.mixer_norm_bias_M = viewer.norm_bias(prefix, p.mixer_norm);
  views.mlp_norm_M = viewer.norm(prefix, p.mlp_norm);
  views.mlp_norm_bias_M = viewer.norm_bias(prefix, p.mlp_norm);
  views.mixer_post_norm_M = viewer.norm(prefix, p.mixer_post_norm);
  views.mlp_post_norm_M = viewer.norm(prefix, p.mlp_post_norm);
  views.mixer = view_part(viewer, p.mixer, prefix);
  if (p.experts > 0) {
    view_experts(viewer, shape, p, layer, views);
  } else if (!p.mlp.products().empty()) {
    views.gate_up = viewer.projection(prefix, p.mlp.products()[DenseProductNumbers::gate_up].parts);
    views.down = viewer.projection(prefix, p.mlp.products()[DenseProductNumbers::down].parts);
    if (const auto& gate = p.mlp.products()[DenseProductNumbers::input_gate].parts; !gate.empty()) {
      views.input_gate = viewer.projection(prefix, gate);
      views.input_projection = viewer.projection(prefix, p.mlp.products()[DenseProductNumbers::input_projection].parts);
      views.input_norm_M = viewer.tensors(prefix, p.mlp.tensors().front());
    }
  }
  return views;
}

}  // namespace

ModelViews without_additions(ModelViews views) {
  for (LayerViews& layer : views.layers) {
    for_each_projection(layer, [](Projection& projection) { projection.low_rank.clear(); });
    layer.expert_gate_up_low_rank.clear(), layer.expert_down_low_rank.clear();
  }
  views.head_low_rank = {};
  return views;
}

ModelViews view_model(std::span<const FlatParameters> buffers, const LocalShape& shape) {
  for (const FlatParameters& buffer : buffers)
    if (!buffer.values) ESPALIER_INTERNAL_EQ(buffer.flat.numel(), buffer.table.kept_size());
  const Viewer viewer(buffers, shape.whole().trained.added.scale());
  const OuterParameters outer = outer_parameters(shape.whole());
  const std::string embedding = std::string(outer.embedding.name) + ".weight";
  ModelViews views;
  views.embedding_VM = viewer.rows(embedding);
  if (outer.layer_projection_norm.width > 0) {
    views.layer_embedding_VW = viewer.rows(std::string(outer.layer_embedding.name) + ".weight");
    views.layer_projection = viewer.projection("", {outer.layer_projection});
    views.layer_projection_norm_P = viewer.norm("", outer.layer_projection_norm);
  }
  for (std::int64_t layer = shape.layers().begin; layer < shape.layers().end; ++layer)
    views.layers.push_back(view_layer(viewer, shape, layer));
  for (LayerViews& layer : views.layers) layer.dtype = buffers.front().flat.scalar_type();
  views.final_norm_M = viewer.norm("", outer.final_norm);
  views.final_norm_bias_M = viewer.norm_bias("", outer.final_norm);
  if (shape.whole().value_head) {
    views.value_M = viewer.one(kValueWeight), views.value_bias_1 = viewer.one(kValueBias);
    if (views.value_M.defined()) views.value_M = views.value_M.view({shape.own().hidden});
  } else {
    views.head_VM =
        shape.whole().tied_head ? views.embedding_VM : viewer.rows(std::string(outer.head.name) + ".weight");
    views.head_low_rank = viewer.low_rank_of_head(adapted_head(shape.whole()));
  }
  return views;
}

}  // namespace espalier
