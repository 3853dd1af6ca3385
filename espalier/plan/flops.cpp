// Counts of mathematics, section 9.
#include "espalier/plan/flops.h"

namespace espalier {
namespace {

// Matrix weights that one row of a layer meets.
double query_output_weights(const ModelShape& s) { return 2.0 * s.hidden * s.heads * s.head_dim; }
double key_value_weights(const ModelShape& s) { return 2.0 * s.hidden * s.kv_heads * s.head_dim; }
double mlp_weights(const ModelShape& s, std::int64_t layer) {
  const bool expert = !s.expert_layer.empty() && s.expert_layer[layer];
  return expert ? static_cast<double>(s.hidden) * (s.experts + 3.0 * s.experts_per_token * s.expert_inner)
                : 3.0 * s.hidden * s.inner;
}

double full_layers_mlp(const ModelShape& s) {
  if (s.experts == 0) return 3.0 * s.hidden * s.inner * static_cast<double>(s.layers - 1);
  double sum = 0;
  for (std::int64_t layer = 0; layer + 1 < s.layers; ++layer) sum += mlp_weights(s, layer);
  return sum;
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

Flops forward_flops(const ModelShape& s, const Work& work) {
  const double T = static_cast<double>(work.rows), O = static_cast<double>(work.outputs);
  const double full = static_cast<double>(s.layers - 1);
  const double per_row = full * (query_output_weights(s) + key_value_weights(s)) + full_layers_mlp(s);
  const double last_row = query_output_weights(s) + mlp_weights(s, s.layers - 1);
  Flops flops;
  flops.layers = 2 * (T * (per_row + key_value_weights(s)) + O * last_row);
  flops.head = 2 * O * static_cast<double>(s.hidden) * static_cast<double>(s.vocabulary);
  flops.attention =
      4.0 * s.heads * s.head_dim * (full * static_cast<double>(work.pairs) + static_cast<double>(work.output_pairs));
  return flops;
}

Flops backward_flops(const ModelShape& shape, const Work& work) {
  Flops flops = forward_flops(shape, work);
  flops.layers *= 2;
  flops.head *= 2;
  flops.attention *= 2.5;
  return flops;
}

Flops recompute_flops(const ModelShape& shape, const Work& work) {
  Flops flops = forward_flops(shape, work);
  flops.head = 0;
  return flops;
}

Flops step_flops(const ModelShape& shape, const Work& work, const StepKind& kind, bool recompute) {
  Flops flops = forward_flops(shape, work);
  if (!kind.gradients) return flops;
  const double head = flops.head;
  flops += backward_flops(shape, work);
  if (kind.whole_rollout) flops.head += head;
  if (recompute) flops += recompute_flops(shape, work);
  return flops;
}

double published_ceiling(const ModelShape& s, std::int64_t prompt, std::int64_t response, std::int64_t n) {
  const double layers = static_cast<double>(s.layers) * (query_output_weights(s) + key_value_weights(s)) +
                        full_layers_mlp(s) + mlp_weights(s, s.layers - 1);
  const double head = static_cast<double>(s.hidden) * static_cast<double>(s.vocabulary);
  const double pair = 4.0 * s.heads * s.head_dim * static_cast<double>(s.layers);
  const double P = static_cast<double>(prompt), R = static_cast<double>(response), N = static_cast<double>(n);
  const double dense = 2 * N * (P + R) * (layers + head) + pair * N * (P + R) * (P + R + 1) / 2;
  const double shared =
      2 * ((P + N * R) * layers + N * R * head) + pair * (P * (P + 1) / 2 + N * (R * P + R * (R + 1) / 2));
  return dense / shared;  // forward and backward are the same multiple of both
}

}  // namespace espalier
