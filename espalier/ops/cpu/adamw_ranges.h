// AdamW on one block of a flat buffer and one thread; adamw_kernels.cpp spreads blocks over threads. Compiled once for
// each instruction set.
#pragma once

#include <cstdint>

#include "espalier/base/compiled_sets.h"
#include "espalier/base/dtype.h"

namespace espalier {

// The factors derived from AdamWStep, each rounded to T once, as torch rounds its scalars.
template <class T>
struct AdamWFactors {
  T grad_scale;
  T decay;        // 1 - lr weight_decay
  T lerp_weight;  // 1 - beta1
  T beta2, one_minus_beta2;
  T correction2_root;  // sqrt(1 - beta2^t)
  T eps;
  T minus_step_size;  // -lr/(1 - beta1^t)
};

template <class T>
struct AdamWRanges {
  double (*sum_of_squares)(std::int64_t count, const T* x);
  void (*adamw)(std::int64_t count, T* p, const T* grad, T* m, T* v, const AdamWFactors<T>& factors, bfloat16* rounded);
};

#define ESPALIER_ADAMW_RANGES(set) \
  namespace set {                  \
  template <class T>               \
  AdamWRanges<T> adamw_ranges();   \
  }
ESPALIER_EACH_SET(ESPALIER_ADAMW_RANGES)
#undef ESPALIER_ADAMW_RANGES

}  // namespace espalier
