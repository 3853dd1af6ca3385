// Rows as the kernels of the delta rule read them: the short convolution, unit vectors, decays and steps.
#pragma once

#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/kernel.h"

namespace espalier::cuda {

constexpr double kUnitEps = 1e-6;

__device__ __forceinline__ DeltaPlaces at_head(const DeltaPlaces& first, const DeltaPlaces& step, std::int64_t head) {
  return {first.q + head * step.q, first.k + head * step.k, first.v + head * step.v,
          first.z + head * step.z, first.b + head * step.b, first.a + head * step.a};
}
// Channels of a key head: q, k, and v of its value heads.
__device__ __forceinline__ std::int64_t width_of(const DeltaShape& s) {
  return 2 * s.key_dim + s.value_heads / s.key_heads * s.value_dim;
}
__device__ __forceinline__ std::int64_t matrix_of(const DeltaShape& s) {
  return s.value_heads * s.key_dim * s.value_dim;
}

// The place of a key head's channel c in a projected row and in the convolution.
struct Channel {
  std::int64_t column, channel;
};
__device__ __forceinline__ Channel channel_at(const DeltaShape& s, std::int64_t key_head, std::int64_t c) {
  const DeltaPlaces column = at_head(s.column, s.column_step, key_head),
                    channel = at_head(s.channel, s.channel_step, key_head);
  if (c < s.key_dim) return {column.q + c, channel.q + c};
  if (c < 2 * s.key_dim) return {column.k + c - s.key_dim, channel.k + c - s.key_dim};
  return {column.v + c - 2 * s.key_dim, channel.v + c - 2 * s.key_dim};
}

// Where a state stores the input `rows_before` rows before its end (-1 .. 1 - K).
__device__ __forceinline__ std::int64_t tail_at(const DeltaShape& s, std::int64_t rows_before, std::int64_t channel) {
  return matrix_of(s) + (s.kernel - 1 + rows_before) * s.channels + channel;
}
// The convolution's input at a row of the run, or at one before it.
template <class T>
__device__ __forceinline__ accumulator_t<T> input_at(const DeltaShape& s, const DeltaWeights<T>& w,
                                                     const DeltaRun<accumulator_t<T>>& run, std::int64_t row,
                                                     std::int64_t column, std::int64_t channel) {
  if (row >= run.begin) return widened(w.projected_TW[row * s.projected + column]);
  return run.start != nullptr ? run.start[tail_at(s, row - run.begin, channel)] : accumulator_t<T>(0);
}
template <class T>
__device__ __forceinline__ accumulator_t<T> convolved(const DeltaShape& s, const DeltaWeights<T>& w,
                                                      const DeltaRun<accumulator_t<T>>& run, std::int64_t row,
                                                      std::int64_t column, std::int64_t channel) {
  using A = accumulator_t<T>;
  A sum = w.conv_bias_C != nullptr ? widened(w.conv_bias_C[channel]) : A(0);
  for (std::int64_t j = 0; j < s.kernel; ++j)
    sum += widened(w.conv_CK[channel * s.kernel + j]) * input_at(s, w, run, row - s.kernel + 1 + j, column, channel);
  return sum;
}

template <class A>
__device__ __forceinline__ A silu(A x) {
  return x / (std::exp(-x) + A(1));
}
template <class A>
__device__ __forceinline__ A silu_slope(A x) {
  const A s = A(1) / (std::exp(-x) + A(1));
  return s * (A(1) + x * (A(1) - s));
}
template <class A>
__device__ __forceinline__ A query_scale(std::int64_t key_dim) {
  return std::sqrt(A(1) / static_cast<A>(key_dim));
}

// y = scale y / sqrt(sum y^2 + eps), by a warp; returns 1 / the root. Lanes read and write their own elements alone.
template <class A>
__device__ __forceinline__ A make_unit(std::int64_t width, int lane, A scale, A* y) {
  A squares = 0;
  for (std::int64_t i = lane; i < width; i += 32) squares += y[i] * y[i];
  const A inverse = A(1) / std::sqrt(warp_sum(squares) + static_cast<A>(kUnitEps));
  for (std::int64_t i = lane; i < width; i += 32) y[i] *= inverse * scale;
  return inverse;
}

// A value head at a row, the head numbered `of_key` of the key head whose columns begin at `place`.
struct HeadRow {
  std::int64_t row, head, of_key;
  DeltaPlaces place;
};
// One of a head's decays: the channel's, or 0 for the head's own. softplus is taken of `before`, and is the step
// within its limits.
template <class A>
struct Decay {
  A before, step, log_decay;
  bool clamped;
};
template <bool kChannels, class T>
__device__ __forceinline__ Decay<accumulator_t<T>> decay_of(const DeltaShape& s, const DeltaWeights<T>& w,
                                                            const HeadRow& at, std::int64_t channel) {
  using A = accumulator_t<T>;
  const std::int64_t decays = kChannels ? s.key_dim : 1;
  const A before = widened(w.projected_TW[at.row * s.projected + at.place.a + at.of_key * decays + channel]) +
                   widened(w.dt_bias_H[at.head * decays + channel]);
  const A softplus = before > 0 ? before + std::log1p(std::exp(-before)) : std::log1p(std::exp(before));
  const A least = static_cast<A>(s.least_step), largest = static_cast<A>(s.largest_step);
  const A step = !s.mamba ? softplus : softplus < least ? least : largest < softplus ? largest : softplus;
  return {before, step, -std::exp(widened(w.a_log_H[at.head])) * step, step != softplus};
}
template <class T>
__device__ __forceinline__ accumulator_t<T> beta_of(const DeltaShape& s, const DeltaWeights<T>& w, const HeadRow& at) {
  using A = accumulator_t<T>;
  if (s.mamba) return decay_of<false>(s, w, at, 0).step;
  return A(1) / (std::exp(-widened(w.projected_TW[at.row * s.projected + at.place.b + at.of_key])) + A(1));
}

}  // namespace espalier::cuda
