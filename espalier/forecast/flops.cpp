// Counts of mathematics, section 9.
#include "espalier/forecast/flops.h"

#include <algorithm>

#include "espalier/shape/parameter_shapes.h"

namespace espalier {
namespace {

// Matrix weights that one row of a layer meets.
struct RowWeights {
  double query_output, key_value, dense_mlp, router, shared, experts;  // the router with the shared expert's gate
};
RowWeights row_weights(const ModelShape& s) {
  const LayerParameters dense = layer_parameters(s, false), experts = layer_parameters(s, true);
  const auto number = [](std::int64_t weights) { return static_cast<double>(weights); };
  return {number(dense.query_latent.weights() + dense.query.weights() + dense.output.weights()),
          number(dense.key_value_latent.weights() + dense.key.weights() + dense.value.weights()),
          number(dense.mlp_weights()),
          number(experts.router.weights() + experts.shared_expert_gate.weights()),
          number(experts.shared_weights()),
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

// Pairs of all layers but the last, in the number of layers times pairs, and of the last one's output rows.
double pairs_of_full_layers(const ModelShape& s, const Work& work) {
  double windowed = 0;
  for (std::int64_t layer = 0; s.window > 0 && layer + 1 < s.layers; ++layer) windowed += s.window_of(layer) > 0;
  return (static_cast<double>(s.layers - 1) - windowed) * static_cast<double>(work.pairs) +
         windowed * static_cast<double>(work.window_pairs);
}
std::int64_t output_pairs_of(const ModelShape& s, std::int64_t layer, const Work& work) {
  return s.window_of(layer) > 0 ? work.window_output_pairs : work.output_pairs;
}

// Of a visible pair: q k and A v.
double pair_flops(const ModelShape& s) { return 2.0 * static_cast<double>(s.query_width() + s.attended_width()); }
// Five products for two: S, dQ and dK again over channels of keys, dA and dV over those of values.
double attention_backward(const ModelShape& s) {
  const auto keys = static_cast<double>(s.head_dim), values = static_cast<double>(s.value_dim());
  return (3 * keys + 2 * values) / (keys + values);
}

// Of a row of the delta rule in one layer: row by row forward, in blocks of C rows backward, where the states before
// the blocks are made again (ops/cpu/delta_rule_ranges.h). A block's small products are of triangles.
// Mamba-2 does not read its state before it writes. With decays of channels the backward goes row by row, too
// (ops/cpu/channel_decay_ranges.h): twice a row's forward for the states, and 15 operations for a number of the state.
double state_flops(const DeltaRuleShape& s) { return (s.mamba ? 4.0 : 6.0) * static_cast<double>(s.matrix()); }
double state_backward(const DeltaRuleShape& s) {
  constexpr double kBlockRows = 64;
  const auto dk = static_cast<double>(s.key_dim), dv = static_cast<double>(s.value_dim);
  if (s.decays_channels()) return 1 + (2 * 6 + 15) / 6.0;
  const double of_states = (s.mamba ? 8 : 14) * dk * dv, of_rows = s.mamba ? 2 * dv + 2 * dk : 5 * dv + 4 * dk;
  const double blocks = static_cast<double>(s.value_heads) * (of_states + kBlockRows * of_rows) +
                        static_cast<double>(s.key_heads) * kBlockRows * 2 * dk;
  return 1 + blocks / state_flops(s);
}

// Elements of a layer's adapters, by the rows that they are computed for; an A as often as it is read.
struct AdapterWork {
  std::int64_t all_rows, continuing_rows, experts;
};
AdapterWork adapter_work(const LayerParameters& p, std::int64_t experts_per_token) {
  std::int64_t all_rows = p.key.low_rank() + p.value.low_rank() + p.key_value_latent.low_rank();
  for (const ProjectionShape& projected : p.projected) all_rows += projected.low_rank();
  for (const ProjectionShape& latent : p.gate_latents) all_rows += latent.low_rank();
  for (const ProjectionShape& gate : p.gates) all_rows += gate.low_rank();
  const std::int64_t continuing = p.low_rank() - all_rows;
  if (p.key.shares_a) all_rows += p.key.rank * p.key.in.size;  // once for queries, once for keys and values
  if (p.key_value_latent.rank > 0) all_rows += p.key_value_latent.rank * p.key_value_latent.in.size;  // and shared keys
  return {all_rows, continuing, experts_per_token * p.expert_low_rank()};
}
double head_low_rank(const ModelShape& s, const Work& work) {
  return 2 * static_cast<double>(work.outputs) * static_cast<double>(adapted_head(s).low_rank());
}

}  // namespace

namespace {

// Layer by layer from `first` on: `of_layer(layer, rows past keys and values: in the last layer those with outputs)`.
template <class OfLayer>
Flops sum_of_layers(const ModelShape& s, std::int64_t first, const Work& work, bool all_rows_choose, OfLayer of_layer) {
  Flops sum;
  for (std::int64_t layer = first; layer < s.layers; ++layer) {
    const bool narrow = layer + 1 == s.layers && !(all_rows_choose && s.has_experts(layer));
    sum += of_layer(layer, narrow ? work : with_all_outputs(work));
  }
  return sum;
}

// A layer's forward, each product as often as `times` says.
struct Times {
  double query = 1, key_value = 1, output = 1, router = 1, gate_up = 1, down = 1, attention = 1, low_rank = 1;
  double shared_gate_up = 1, shared_down = 1, shared_expert_gate = 1;
  double query_latent = 1, key_value_latent = 1;
  double states = 1;
};
Flops layer_flops(const ModelShape& s, std::int64_t layer, const Work& work, const Times& times) {
  const auto product = [](std::int64_t rows, double factor, std::int64_t weights) {
    return 2 * static_cast<double>(rows) * factor * static_cast<double>(weights);
  };
  const LayerParameters p = adapted_parameters(s, layer);
  const AdapterWork adapters = adapter_work(p, s.experts_per_token);
  Flops flops;
  flops.layers = product(work.rows, times.key_value, p.key.weights() + p.value.weights() + p.projected_weights()) +
                 product(work.rows, times.key_value_latent, p.key_value_latent.weights()) +
                 product(work.outputs, times.query_latent, p.query_latent.weights()) +
                 product(work.outputs, times.query, p.query.weights()) +
                 product(work.outputs, times.output, p.output.weights()) +
                 product(work.rows, times.low_rank, adapters.all_rows) +
                 product(work.outputs, times.low_rank, adapters.continuing_rows);
  const double mlp = product(work.outputs, times.gate_up, p.gate.weights() + p.up.weights()) +
                     product(work.outputs, times.down, p.down.weights());
  if (p.experts == 0)
    flops.layers += mlp;
  else
    flops.experts =
        static_cast<double>(s.experts_per_token) * mlp + product(work.outputs, times.low_rank, adapters.experts);
  flops.layers += product(work.outputs, times.router, p.router.weights()) +
                  product(work.outputs, times.shared_gate_up, p.shared_gate.weights() + p.shared_up.weights()) +
                  product(work.outputs, times.shared_down, p.shared_down.weights()) +
                  product(work.outputs, times.shared_expert_gate, p.shared_expert_gate.weights());
  if (s.mixer_of(layer) == Mixer::delta_rule)
    flops.attention = state_flops(s.delta_rule) * times.states * static_cast<double>(work.rows);
  else
    flops.attention = pair_flops(s) * times.attention * static_cast<double>(output_pairs_of(s, layer, work));
  return flops;
}

}  // namespace

Flops forward_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  if (s.has_states()) {
    Flops flops = sum_of_layers(s, 0, work, all_rows_choose,
                                [&](std::int64_t layer, const Work& rows) { return layer_flops(s, layer, rows, {}); });
    flops.head =
        2 * static_cast<double>(work.outputs * s.hidden) * static_cast<double>(s.head_width()) + head_low_rank(s, work);
    return flops;
  }
  const bool experts_last = s.has_experts(s.layers - 1), wide = all_rows_choose && experts_last;
  const double T = static_cast<double>(work.rows), O = static_cast<double>(work.outputs), R = wide ? T : O;
  const double full = static_cast<double>(s.layers - 1);
  const FullLayers mlp = full_layers(s);
  const RowWeights w = row_weights(s);
  const double beside_experts = w.router + w.shared, last_mlp = experts_last ? beside_experts : w.dense_mlp;
  Flops flops;
  flops.layers =
      2 *
      (T * (full * w.query_output + (full + 1) * w.key_value + mlp.dense * w.dense_mlp + mlp.experts * beside_experts) +
       R * (w.query_output + last_mlp));
  flops.experts = 2 * (T * mlp.experts + (experts_last ? R : 0)) * w.experts;
  flops.head = 2 * O * static_cast<double>(s.hidden) * static_cast<double>(s.head_width()) + head_low_rank(s, work);
  flops.attention =
      pair_flops(s) * (pairs_of_full_layers(s, work) +
                       static_cast<double>(output_pairs_of(s, s.layers - 1, wide ? with_all_outputs(work) : work)));
  for (std::int64_t layer = 0; s.trained.adapter.rank > 0 && layer < s.layers; ++layer) {
    const AdapterWork adapters = adapter_work(adapted_parameters(s, layer), s.experts_per_token);
    const double continuing = layer + 1 < s.layers ? T : R;
    flops.layers +=
        2 * (T * static_cast<double>(adapters.all_rows) + continuing * static_cast<double>(adapters.continuing_rows));
    flops.experts += 2 * continuing * static_cast<double>(adapters.experts);
  }
  return flops;
}

namespace {

// The gradient of an input is a product; the gradient of a weight that trains another. An adapter's: x A^T again, the
// gradient of it for A and once more for x, and dA, dB, dx.
Times backward_times(const ModelShape& shape, const TrainedLayer& trains) {
  const auto products = [](bool trained) { return trained ? 2.0 : 1.0; };
  return {products(trains.query),
          products(trains.key_value),
          products(trains.output),
          products(trains.router),
          products(trains.gate_up),
          products(trains.down),
          attention_backward(shape),
          3,
          products(trains.shared_gate_up),
          products(trains.shared_down),
          products(trains.shared_expert_gate),
          products(trains.query_latent),
          products(trains.key_value_latent),
          shape.has_states() ? state_backward(shape.delta_rule) : 0};
}

}  // namespace

Flops backward_flops(const ModelShape& shape, const Work& work, bool all_rows_choose) {
  if (!shape.trained.all() || shape.has_states()) {
    const auto trains = [&](std::int64_t layer) {
      return shape.trained.of_layer.empty() ? TrainedLayer{} : shape.trained.of_layer[static_cast<std::size_t>(layer)];
    };
    Flops flops = sum_of_layers(shape, shape.trained.first_layer, work, all_rows_choose,
                                [&](std::int64_t layer, const Work& rows) {
                                  return layer_flops(shape, layer, rows, backward_times(shape, trains(layer)));
                                });
    const double low_rank = head_low_rank(shape, work);
    flops.head =
        (shape.trained.head ? 2 : 1) * (forward_flops(shape, work, all_rows_choose).head - low_rank) + 3 * low_rank;
    return flops;
  }
  Flops flops = forward_flops(shape, work, all_rows_choose);
  flops.layers *= 2;
  flops.experts *= 2;
  flops.head *= 2;
  flops.attention *= attention_backward(shape);
  return flops;
}

Flops recompute_flops(const ModelShape& shape, const Work& work, bool all_rows_choose) {
  Flops flops = forward_flops(shape, work, all_rows_choose);
  flops.head = 0;
  return flops;
}

namespace {

// Of the layers that have a backward.
Flops again_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  if (s.trained.first_layer == 0) return recompute_flops(s, work, all_rows_choose);
  return sum_of_layers(s, s.trained.first_layer, work, all_rows_choose,
                       [&](std::int64_t layer, const Work& rows) { return layer_flops(s, layer, rows, {}); });
}

}  // namespace

Flops gate_up_flops(const ModelShape& s, const Work& work, bool all_rows_choose) {
  if (s.trained.first_layer > 0 || s.has_states())
    return sum_of_layers(s, s.trained.first_layer, work, all_rows_choose, [&](std::int64_t layer, const Work& rows) {
      const double down = s.norm_place == NormPlace::before ? 0 : 1;
      return layer_flops(s, layer, rows, {0, 0, 0, 1, 1, down, 0, 0, 1, down, 1, 0, 0, 0});
    });
  const bool experts_last = s.has_experts(s.layers - 1), wide = all_rows_choose && experts_last;
  const double T = static_cast<double>(work.rows), R = static_cast<double>(wide ? work.rows : work.outputs);
  const FullLayers mlp = full_layers(s);
  const RowWeights w = row_weights(s);
  // Of an MLP's weights; what a norm behind it reads is made again too.
  const double gate_up = s.norm_place != NormPlace::before ? 1 : s.activation.gated ? 2.0 / 3 : 0.5;
  Flops flops;
  const double beside_experts = w.router + gate_up * w.shared;
  flops.layers = 2 * (T * (mlp.dense * gate_up * w.dense_mlp + mlp.experts * beside_experts) +
                      R * (experts_last ? beside_experts : gate_up * w.dense_mlp));
  flops.experts = 2 * gate_up * (T * mlp.experts + (experts_last ? R : 0)) * w.experts;
  return flops;
}

Flops step_flops(const ModelShape& shape, const Work& work, const StepKind& kind, ItemState state) {
  Flops flops = forward_flops(shape, work, kind.all_rows_choose);
  if (!kind.gradients) return flops;
  const double head = flops.head;
  flops += backward_flops(shape, work, kind.all_rows_choose);
  if (kind.whole_rollout) flops.head += head;
  if (state.recomputes_attention())
    flops += again_flops(shape, work, kind.all_rows_choose);
  else if (state.recomputes_mlp())
    flops += gate_up_flops(shape, work, kind.all_rows_choose);
  if (kind.counting_pass) flops += recompute_flops(shape, work, kind.all_rows_choose);
  return flops;
}

}  // namespace espalier
