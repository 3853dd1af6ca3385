// The operations around a recurrence on a range of channels, on one thread (ops/delta_rule.h). Compiled once for each
// instruction set. silu(x) = x s, s = 1 / (1 + e^-x).
//
// Shapes: n rows, W channels, K rows of the convolution; T is the type of stored rows, A the type of arithmetic.
#pragma once

#include <cstdint>

#include "espalier/base/compiled_sets.h"
#include "espalier/base/dtype.h"

namespace espalier {

template <class A>
struct ConvolutionRanges {
  // mixed_r = bias + sum_j weight_j line_{r + j}. Overwrites mixed [n, W]; line [n + K - 1, W], weight [K, W], bias
  // [W].
  void (*convolve)(std::int64_t rows, std::int64_t width, std::int64_t kernel, const A* line, const A* weight,
                   const A* bias, A* mixed);
  // grad_r = sum_j weight_{K - 1 - j} grad_mixed_{r + j}. Overwrites grad [n, W]; grad_mixed [n + K - 1, W].
  void (*convolve_back)(std::int64_t rows, std::int64_t width, std::int64_t kernel, const A* grad_mixed,
                        const A* weight, A* grad);
  // sums_j += sum_r grad_mixed_r line_{r + j}; sums [K, W].
  void (*add_weight_gradient)(std::int64_t rows, std::int64_t width, std::int64_t kernel, const A* line,
                              const A* grad_mixed, double* sums);
  // y = silu(x). The backward turns the gradient of y into that of x, in place.
  void (*silu)(std::int64_t width, const A* x, A* y);
  void (*silu_backward)(std::int64_t width, const A* x, A* grad);
  // y = scale u / |u| with u = silu(x), |u|^2 = the sum of squares + 1e-6. Returns 1 / |u|, the backward's `inverse`.
  // The backward turns the gradient of y into that of x, in place.
  A (*unit)(std::int64_t width, const A* x, A scale, A* y);
  void (*unit_backward)(std::int64_t width, const A* x, const A* y, A scale, A inverse, A* grad);
};

template <class T>
struct GatedHeadRanges {
  using A = accumulator_t<T>;
  // y = weight o r silu(z),  r = 1 / sqrt(mean o^2 + eps).
  void (*norm)(std::int64_t width, A eps, const T* o, const T* z, const T* weight, T* y);
  // Overwrites grad_o, which may be grad_y, and grad_z; adds to sums of the weight's gradient.
  void (*norm_backward)(std::int64_t width, A eps, const T* o, const T* z, const T* weight, const T* grad_y, T* grad_o,
                        T* grad_z, double* sums);
  // The same with sigmoid(z) in place of silu(z).
  void (*norm_sigmoid)(std::int64_t width, A eps, const T* o, const T* z, const T* weight, T* y);
  void (*norm_sigmoid_backward)(std::int64_t width, A eps, const T* o, const T* z, const T* weight, const T* grad_y,
                                T* grad_o, T* grad_z, double* sums);
  // y = weight u r with u = o silu(z), r = 1 / sqrt(mean u^2 + eps). The backward is like that of `norm`.
  void (*gate_then_norm)(std::int64_t width, A eps, const T* o, const T* z, const T* weight, T* y);
  void (*gate_then_norm_backward)(std::int64_t width, A eps, const T* o, const T* z, const T* weight, const T* grad_y,
                                  T* grad_o, T* grad_z, double* sums);
  // y = x sigmoid(gate). The backward overwrites grad_x, which may be grad_y, and grad_gate.
  void (*gate)(std::int64_t width, const T* x, const T* gate, T* y);
  void (*gate_backward)(std::int64_t width, const T* x, const T* gate, const T* grad_y, T* grad_x, T* grad_gate);
};

#define ESPALIER_CONVOLUTION_RANGES(set)     \
  namespace set {                            \
  template <class A>                         \
  ConvolutionRanges<A> convolution_ranges(); \
  template <class T>                         \
  GatedHeadRanges<T> gated_head_ranges();    \
  }
ESPALIER_EACH_SET(ESPALIER_CONVOLUTION_RANGES)
#undef ESPALIER_CONVOLUTION_RANGES

}  // namespace espalier
