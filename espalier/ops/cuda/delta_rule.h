// The gated delta rule with decays of heads or of channels, and Mamba-2, behind a short convolution on a device:
// equations and shapes in ops/delta_rule.h, a block's matrices in ops/cpu/delta_rule_ranges.h, a row's in
// ops/cpu/channel_decay_ranges.h. T is float, double or bfloat16, A = accumulator_t<T>.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::cuda {

inline constexpr std::int64_t kLargestKernel = 8;  // rows of the convolution
inline constexpr int kRunsAtOnce = 16;             // of a launch

// Where the parts of key head g stand: first + g step.
struct DeltaPlaces {
  std::int64_t q = 0, k = 0, v = 0, z = 0, b = 0, a = 0;
};
struct DeltaShape {
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, kernel = 0;
  std::int64_t projected = 0, channels = 0;  // W, C
  std::int64_t decays = 1;                   // of a value head: 1, or one for each key channel
  bool mamba = false;
  double least_step = 0, largest_step = 0;
  DeltaPlaces column, column_step;    // of a projected row
  DeltaPlaces channel, channel_step;  // of the convolution: q, k, v
};

// Null: as in DeltaRuleProblem. dt_bias is [H, decays].
template <class T>
struct DeltaWeights {
  const T *projected_TW, *conv_CK, *conv_bias_C, *a_log_H, *dt_bias_H, *skip_H;
};
template <class A>
struct DeltaRun {
  std::int64_t begin = 0, end = 0;
  const A* start = nullptr;
  A* end_state = nullptr;
  A* grad_start = nullptr;
  const A* grad_end = nullptr;
};
template <class A>
struct DeltaRuns {
  std::int64_t count = 0;
  DeltaRun<A> of[kRunsAtOnce];
};
template <class A>
struct DeltaSums {
  A *conv_CK, *conv_bias_C, *a_log_H, *dt_bias_H, *skip_H;
};

// Shared memory of one block of the forward, which must not exceed kMostDeltaBytes: every GPU has that much.
inline constexpr std::int64_t kMostDeltaBytes = 96 * 1024;
std::int64_t delta_forward_bytes(std::int64_t key_dim, std::int64_t decays, std::int64_t number_bytes);

// For runs that do not follow each other. Overwrites o_TV (null: not computed) and the runs' end states.
template <class T>
void delta_rule(const DeltaShape& shape, const DeltaWeights<T>& weights, const DeltaRuns<accumulator_t<T>>& runs,
                T* o_TV);
// For runs that do not follow each other. Overwrites grad_projected except z, and adds to the runs' grad_start and to
// sums, whose members may be null.
template <class T>
void add_delta_rule_backward(const DeltaShape& shape, const DeltaWeights<T>& weights,
                             const DeltaRuns<accumulator_t<T>>& runs, const T* grad_o_TV, T* grad_projected_TW,
                             const DeltaSums<accumulator_t<T>>& sums);

// Each row has parts of `width` channels, part p with its z at column z + p / each * step + p % each * width and its
// weights at p * of_weight. Gate first: Mamba-2; gated by a sigmoid: with decays of channels (ops/delta_rule.h).
struct GatedParts {
  std::int64_t rows = 0, parts = 0, width = 0, each = 1, of_weight = 0;
  std::int64_t projected = 0, z = 0, step = 0;
  double eps = 0;
  bool gate_first = false, by_sigmoid = false;
};
template <class T>
void gated_norm(const GatedParts& parts, const T* o, const T* projected, const T* weight, T* y);
// grad_o may be grad_y; grad_weight [width], or with gate_first [parts * width]; null: it has no gradient.
template <class T>
void add_gated_norm_backward(const GatedParts& parts, const T* o, const T* projected, const T* weight, const T* grad_y,
                             T* grad_o, T* grad_projected, accumulator_t<T>* grad_weight);

// y = x sigmoid(gate) for rows of `width`; a row of query_gate has each head's query and gate, [2 head_dim].
template <class T>
void gate_heads(std::int64_t rows, std::int64_t width, std::int64_t head_dim, const T* x, const T* query_gate, T* y);
// grad_x may be grad_y.
template <class T>
void gate_heads_backward(std::int64_t rows, std::int64_t width, std::int64_t head_dim, const T* x, const T* query_gate,
                         const T* grad_y, T* grad_x, T* grad_query_gate);

}  // namespace espalier::cuda
