// Counts of mathematics, section 9.
#include "espalier/plan/flops.h"

#include "espalier/plan/parameter_shapes.h"

namespace espalier {
namespace {

// Matrix weights that one row of a layer meets.
struct RowWeights {
  double query_output, key_value, dense_mlp, router, experts;
};
RowWeights row_weights(const ModelShape& s) {
  const LayerParameters dense = layer_parameters(s, false), experts = layer_parameters(s, true);
  const auto number = [](std::int64_t weights) { return static_cast<double>(weights); };
  return {number(dense.query.weights() + dense.output.weights()), number(dense.key.weights() + dense.value.weights()),
          number(dense.mlp_weights()), number(experts.router.weights()),
          static_cast<double>(s.experts_per_token) * number(experts.mlp_weights())};
}

// Of the MLPs of all layers but the last.
struct FullLayers {
  double dense = 0, experts = 0;  // layers
};
FullLayers full_layers(const ModelShape& s) {
  FullLayers out;
  if (s.experts == 0) return {static_cast<double>(s.layers - 1), 0};  // asked for very often
  for (std::int64_t layer = 0; layer + 1 < s.layers; ++layer) (s.has_experts(layer) ? out.experts : out.dense) += 1;
  return out;
}

}  // namespace

Work work_of_depths(std::int64_t begin, std::int64_t end, bool outputs) {
  Work work;
  if (end <= begin) return work;
  work.rows = end - begin;
  work.pairs = end * (end + 1) / 2 - begin * (begin + 1) / 2;
  if (outputs) work.outputs = work.rows, work.output_pairs = work.pairs;
  return work;
}

Flops forward_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  const bool experts_last = s.has_experts(s.layers - 1), wide = all_rows_choose && experts_last;
  const double T = static_cast<double>(work.rows), O = static_cast<double>(work.outputs), R = wide ? T : O;
  const double full = static_cast<double>(s.layers - 1);
  const FullLayers mlp = full_layers(s);
  const RowWeights w = row_weights(s);
  const double last_mlp = experts_last ? w.router : w.dense_mlp;
  Flops flops;
  flops.layers =
      2 * (T * (full * w.query_output + (full + 1) * w.key_value + mlp.dense * w.dense_mlp + mlp.experts * w.router) +
           R * (w.query_output + last_mlp));
  flops.experts = 2 * (T * mlp.experts + (experts_last ? R : 0)) * w.experts;
  flops.head = 2 * O * static_cast<double>(s.hidden) * static_cast<double>(s.head_width());
  flops.attention =
      4.0 * s.heads * s.head_dim *
      (full * static_cast<double>(work.pairs) + static_cast<double>(wide ? work.pairs : work.output_pairs));
  return flops;
}

Flops backward_flops(const ModelShape& shape, const Work& work, bool all_rows_choose) {
  Flops flops = forward_flops(shape, work, all_rows_choose);
  flops.layers *= 2;
  flops.experts *= 2;
  flops.head *= 2;
  flops.attention *= 2.5;
  return flops;
}

Flops recompute_flops(const ModelShape& shape, const Work& work, bool all_rows_choose) {
  Flops flops = forward_flops(shape, work, all_rows_choose);
  flops.head = 0;
  return flops;
}

Flops gate_up_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  const bool experts_last = s.has_experts(s.layers - 1), wide = all_rows_choose && experts_last;
  const double T = static_cast<double>(work.rows), R = static_cast<double>(wide ? work.rows : work.outputs);
  const FullLayers mlp = full_layers(s);
  const RowWeights w = row_weights(s);
  constexpr double kGateUp = 2.0 / 3;  // of an MLP's weights
  Flops flops;
  flops.layers = 2 * (T * (mlp.dense * kGateUp * w.dense_mlp + mlp.experts * w.router) +
                      R * (experts_last ? w.router : kGateUp * w.dense_mlp));
  flops.experts = 2 * kGateUp * (T * mlp.experts + (experts_last ? R : 0)) * w.experts;
  return flops;
}

Flops step_flops(const ModelShape& shape, const Work& work, const StepKind& kind, ItemState state) {
  Flops flops = forward_flops(shape, work, kind.all_rows_choose);
  if (!kind.gradients) return flops;
  const double head = flops.head;
  flops += backward_flops(shape, work, kind.all_rows_choose);
  if (kind.whole_rollout) flops.head += head;
  if (state.recomputes_attention())
    flops += recompute_flops(shape, work, kind.all_rows_choose);
  else if (state.recomputes_mlp())
    flops += gate_up_flops(shape, work, kind.all_rows_choose);
  if (kind.counting_pass) flops += recompute_flops(shape, work, kind.all_rows_choose);
  return flops;
}

}  // namespace espalier
