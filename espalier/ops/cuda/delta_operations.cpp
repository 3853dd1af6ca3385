// Layers that carry a state from row to row on a GPU: tensors to the kernels of delta_rule.h.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "espalier/ops/cuda/chunk_trial.h"
#include "espalier/ops/cuda/delta_chunks.h"
#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/state_launches.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

DeltaPlaces of_columns(const RecurrenceShape::Columns& c) { return {c.q, c.k, c.v, c.z, c.b, c.a}; }
DeltaPlaces of_channels(const RecurrenceShape::Channels& c) { return {c.q, c.k, c.v, 0, 0, 0}; }
DeltaPlaces difference(const DeltaPlaces& x, const DeltaPlaces& y) {
  return {x.q - y.q, x.k - y.k, x.v - y.v, x.z - y.z, x.b - y.b, x.a - y.a};
}

DeltaShape shape_of(const RecurrenceShape& s) {
  const DeltaPlaces column = of_columns(s.columns(0)), channel = of_channels(s.channels(0));
  return {.key_heads = s.key_heads,
          .value_heads = s.value_heads,
          .key_dim = s.key_dim,
          .value_dim = s.value_dim,
          .kernel = s.kernel,
          .projected = s.projected(),
          .channels = s.channels(),
          .decays = s.decays_channels() ? s.key_dim : 1,
          .mamba = s.mamba,
          .least_step = s.least_step,
          .largest_step = s.largest_step,
          .column = column,
          .column_step = difference(of_columns(s.columns(1)), column),
          .channel = channel,
          .channel_step = difference(of_channels(s.channels(1)), channel)};
}

template <class T>
DeltaWeights<T> weights_of(const DeltaRuleProblem& p) {
  return {pointer<T>(p.projected_TW), pointer<T>(p.conv_CK),   pointer<T>(p.conv_bias_C),
          pointer<T>(p.a_log_H),      pointer<T>(p.dt_bias_H), pointer<T>(p.skip_H)};
}

// On tensor cores by chunks, or row by row. A shape and a run's rows alone decide, so that a state that is computed
// again for the backward has the bits of the forward.
template <class T>
constexpr bool kTensorCores = std::is_same_v<T, bfloat16>;

bool runs_in_chunks(const DeltaShape& shape) { return trusts_chunks() && fits_chunks(shape); }

void delta_rule_rows(const DeltaRuleProblem& problem, const at::Tensor& o_TV) {
  dispatch(problem.projected_TW.scalar_type(), [&]<class T>() {
    const DeltaShape shape = shape_of(problem.shape);
    for (std::vector<const StateRun*>& launch : launches_of(problem.runs)) {
      if constexpr (kTensorCores<T>) {
        const auto in_chunks = std::ranges::stable_partition(launch, [&](const StateRun* run) {
          return !runs_in_chunks(shape) || run->end - run->begin < kLeastChunkedRows;
        });
        const std::vector<const StateRun*> chunked(in_chunks.begin(), in_chunks.end());
        launch.erase(in_chunks.begin(), in_chunks.end());
        if (!chunked.empty())
          chunked_delta_rule(shape, weights_of<T>(problem), runs_of<accumulator_t<T>>(chunked), pointer<T>(o_TV));
        if (launch.empty()) continue;
      }
      delta_rule<T>(shape, weights_of<T>(problem), runs_of<accumulator_t<T>>(launch), pointer<T>(o_TV));
    }
  });
}

void add_delta_rule_rows_backward(const DeltaRuleProblem& problem, const at::Tensor& grad_o_TV,
                                  const DeltaRuleGradients& gradients) {
  dispatch(grad_o_TV.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const DeltaSums<A> sums{pointer<A>(gradients.conv_CK), pointer<A>(gradients.conv_bias_C),
                            pointer<A>(gradients.a_log_H), pointer<A>(gradients.dt_bias_H),
                            pointer<A>(gradients.skip_H)};
    const std::vector<std::vector<const StateRun*>> launches = launches_of(problem.runs);
    const DeltaShape shape = shape_of(problem.shape);
    auto* backward = add_delta_rule_backward<T>;
    if constexpr (kTensorCores<T>)
      if (runs_in_chunks(shape)) backward = add_chunked_backward;
    for (auto launch = launches.rbegin(); launch != launches.rend(); ++launch)
      backward(shape, weights_of<T>(problem), runs_of<A>(*launch), pointer<T>(grad_o_TV),
               pointer<T>(gradients.projected_TW), sums);
  });
}

GatedParts parts_of(const GatedNormProblem& p) {
  const RecurrenceShape& s = p.shape;
  const std::int64_t parts = s.mamba ? s.key_heads : s.value_heads, width = s.value_width() / parts;
  return {.rows = p.o_TV.size(0),
          .parts = parts,
          .width = width,
          .each = parts / s.key_heads,
          .of_weight = s.mamba ? width : 0,
          .projected = s.projected(),
          .z = s.columns(0).z,
          .step = s.columns(1).z - s.columns(0).z,
          .eps = p.eps,
          .gate_first = s.mamba,
          .by_sigmoid = s.decays_channels()};
}

void gated_norm_rows(const GatedNormProblem& p, const at::Tensor& y_TV) {
  dispatch(y_TV.scalar_type(), [&]<class T>() {
    gated_norm<T>(parts_of(p), pointer<T>(p.o_TV), pointer<T>(p.projected_TW), pointer<T>(p.weight), pointer<T>(y_TV));
  });
}

void add_gated_norm_rows_backward(const GatedNormProblem& p, const at::Tensor& grad_y_TV, const at::Tensor& grad_o_TV,
                                  const at::Tensor& grad_projected_TW, const at::Tensor& grad_weight) {
  dispatch(grad_y_TV.scalar_type(), [&]<class T>() {
    add_gated_norm_backward<T>(parts_of(p), pointer<T>(p.o_TV), pointer<T>(p.projected_TW), pointer<T>(p.weight),
                               pointer<T>(grad_y_TV), pointer<T>(grad_o_TV), pointer<T>(grad_projected_TW),
                               pointer<accumulator_t<T>>(grad_weight));
  });
}

void gate_head_rows(const at::Tensor& x_RW, const at::Tensor& query_gate_RW, std::int64_t head_dim,
                    const at::Tensor& y_RW) {
  dispatch(y_RW.scalar_type(), [&]<class T>() {
    gate_heads<T>(y_RW.size(0), y_RW.size(1), head_dim, pointer<T>(x_RW), pointer<T>(query_gate_RW), pointer<T>(y_RW));
  });
}

void gate_head_rows_backward(const at::Tensor& x_RW, const at::Tensor& query_gate_RW, std::int64_t head_dim,
                             const at::Tensor& grad_y_RW, const at::Tensor& grad_x_RW,
                             const at::Tensor& grad_query_gate_RW) {
  dispatch(x_RW.scalar_type(), [&]<class T>() {
    gate_heads_backward<T>(x_RW.size(0), x_RW.size(1), head_dim, pointer<T>(x_RW), pointer<T>(query_gate_RW),
                           pointer<T>(grad_y_RW), pointer<T>(grad_x_RW), pointer<T>(grad_query_gate_RW));
  });
}

}  // namespace

DeltaRuleOperations delta_rule_operations() {
  return {delta_rule_rows, add_delta_rule_rows_backward, gated_norm_rows, add_gated_norm_rows_backward,
          gate_head_rows,  gate_head_rows_backward};
}

}  // namespace espalier::cuda
