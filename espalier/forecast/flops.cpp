// Counts of mathematics, section 9.
#include "espalier/forecast/flops.h"

#include <algorithm>
#include <vector>

#include "espalier/shape/parameter_shapes.h"

namespace espalier {
namespace {

double head_low_rank(const ModelShape& s, const Work& work) {
  return 2 * static_cast<double>(work.outputs) * static_cast<double>(adapted_head(s).low_rank());
}

// How often a pass computes what a forward computes once. A backward's product is one for the gradient of its input,
// and another one if its weight trains. An addend of low rank has x A^T again, the gradient of it for A and once more
// for x, and dA, dB, dx.
enum class Times { forward, backward };

// The mixer of a layer, with this many FLOPs of rows and pairs.
Flops mixer_flops(const LayerShape& layer, const PartParameters& p, const Work& work, Times times);

// A product's FLOPs for `rows` rows.
double product_flops(const ProductShape& product, bool trains, double rows, Times times) {
  const auto weights = static_cast<double>(product.weights()), low_rank = static_cast<double>(product.low_rank_work());
  if (times == Times::forward) return 2 * rows * (weights + low_rank);
  return 2 * rows * (weights * (trains ? 2 : 1) + low_rank * 3);
}

Flops mixer_flops(const LayerShape& layer, const PartParameters& p, const Work& work, Times times) {
  Flops flops;
  for (std::size_t i = 0; i < p.products().size(); ++i) {
    const ProductShape& product = p.products()[i];
    const std::int64_t rows = product.rows == ProductRows::all ? work.rows : work.outputs;
    flops.layers += product_flops(product, layer.trains.of_mixer(i), static_cast<double>(rows), times);
  }
  const MixerFlops of = layer.mixer->flops();
  const bool forward = times == Times::forward;
  const std::int64_t pairs = layer.mixer->window() > 0 ? work.window_output_pairs : work.output_pairs;
  flops.attention = of.pair * (forward ? 1 : of.pair_backward) * static_cast<double>(pairs);
  flops.states = of.row * (forward ? 1 : of.row_backward) * static_cast<double>(work.rows);
  return flops;
}

Flops mlp_flops(const ModelShape& s, const LayerShape& layer, const PartParameters& p, const Work& work, Times times,
                bool without_last = false) {
  Flops flops;
  const auto is_last = [&](std::size_t product) {
    return layer.has_experts() ? product == ExpertProductNumbers::down || product == ExpertProductNumbers::shared_down
                               : product == DenseProductNumbers::down;
  };
  for (std::size_t i = 0; i < p.products().size(); ++i) {
    if (without_last && is_last(i)) continue;
    const ProductShape& product = p.products()[i];
    const double of_rows = product_flops(product, layer.trains.of_mlp(i), static_cast<double>(work.outputs), times);
    if (product.rows == ProductRows::chosen)
      flops.experts += static_cast<double>(s.experts_per_token) * of_rows;
    else
      flops.layers += of_rows;
  }
  return flops;
}

// Sums of_layer(layer, its parameters, its work) over the layers from `first` on. In the last one only outputs
// continue, unless all rows choose experts there. Equal layers are asked once.
template <class OfLayer>
Flops sum_of_layers(const ModelShape& s, std::int64_t first, const Work& work, bool all_rows_choose, OfLayer of_layer) {
  struct Group {
    const LayerShape* layer;
    std::int64_t count;
  };
  std::vector<Group> groups;
  for (std::int64_t i = first; i + 1 < s.layers(); ++i) {
    const auto found = std::ranges::find_if(groups, [&](const Group& group) { return *group.layer == s.at(i); });
    found == groups.end() ? groups.push_back({&s.at(i), 1}) : void(++found->count);
  }
  Flops sum;
  const Work all = with_all_outputs(work);
  for (const Group& group : groups)
    sum += of_layer(*group.layer, layer_parameters(s, *group.layer), all) * static_cast<double>(group.count);
  if (first >= s.layers()) return sum;
  const LayerShape& last = s.layer.back();
  sum += of_layer(last, layer_parameters(s, last), all_rows_choose && last.has_experts() ? all : work);
  return sum;
}

Flops flops_of_layers(const ModelShape& s, std::int64_t first, const Work& work, bool all_rows_choose, Times times) {
  return sum_of_layers(s, first, work, all_rows_choose,
                       [&](const LayerShape& layer, const LayerParameters& p, const Work& rows) {
                         Flops flops = mixer_flops(layer, p.mixer, rows, times);
                         return flops += mlp_flops(s, layer, p.mlp, rows, times);
                       });
}

// The product of embedded rows for the inputs of all layers. An adapted one does not train.
double input_flops(const ModelShape& s, const Work& work, Times times) {
  const ProjectionShape p = outer_parameters(s).layer_projection;
  return product_flops({.parts = {p}}, p.rank == 0, static_cast<double>(work.rows), times);
}

double head_flops(const ModelShape& s, const Work& work) {
  return 2 * static_cast<double>(work.outputs * s.hidden) * static_cast<double>(s.head_width());
}

}  // namespace

Flops forward_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  Flops flops = flops_of_layers(s, 0, work, all_rows_choose, Times::forward);
  flops.layers += input_flops(s, work, Times::forward);
  flops.head = head_flops(s, work) + head_low_rank(s, work);
  return flops;
}

Flops backward_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  Flops flops = flops_of_layers(s, s.trained.first_layer, work, all_rows_choose, Times::backward);
  if (s.trained.input)  // the product again, and its backward
    flops.layers += input_flops(s, work, Times::forward) + input_flops(s, work, Times::backward);
  flops.head = (s.trained.head ? 2 : 1) * head_flops(s, work) + 3 * head_low_rank(s, work);
  return flops;
}

Flops recompute_flops(const ModelShape& shape, const Work& work, bool all_rows_choose) {
  return flops_of_layers(shape, 0, work, all_rows_choose, Times::forward);
}

// FLOPs of gate and up in the layers that have a backward.
Flops gate_up_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  return sum_of_layers(s, s.trained.first_layer, work, all_rows_choose,
                       [&](const LayerShape& layer, const LayerParameters& p, const Work& rows) {
                         return mlp_flops(s, layer, p.mlp, rows, Times::forward, !layer.has_norms_after());
                       });
}

Flops step_flops(const ModelShape& shape, const Work& work, const StepKind& kind, ItemState state) {
  Flops flops = forward_flops(shape, work, kind.all_rows_choose);
  if (!kind.gradients) return flops;
  const double head = flops.head;
  if (kind.sequence_pass) flops += forward_flops(shape, work, false);
  flops += backward_flops(shape, work, kind.all_rows_choose);
  if (kind.whole_rollout) flops.head += head;
  if (state.recomputes_attention())
    flops += flops_of_layers(shape, shape.trained.first_layer, work, kind.all_rows_choose, Times::forward);
  else if (state.recomputes_mlp())
    flops += gate_up_flops(shape, work, kind.all_rows_choose);
  if (kind.counting_pass) flops += recompute_flops(shape, work, kind.all_rows_choose);
  return flops;
}

}  // namespace espalier
