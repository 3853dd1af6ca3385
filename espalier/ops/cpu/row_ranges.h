// The kernels of row_kernels.h on one thread, for rows (or columns, or elements) [begin, end). Compiled once for each
// instruction set; row_kernels.cpp chooses the set and splits the range over threads.
//
// Tables of function pointers, so that a set is chosen once per call. The parameter gradient of these rows is added to
// `sums` [width] (or [head_dim]); the caller adds `sums` to the parameter's accumulator.
#pragma once

#include <cstdint>

#include "espalier/base/compiled_sets.h"
#include "espalier/base/dtype.h"
#include "espalier/ops/cpu/row_kernels.h"

namespace espalier {

struct RowRange {
  std::int64_t begin, end;
};

template <class T>
struct NormRanges {
  using A = accumulator_t<T>;
  void (*rms_norm)(RowRange rows, std::int64_t width, const T* stream, const rows::NormParameters<T>& norm, A eps, T* y,
                   A* rstd);
  void (*rms_norm_again)(RowRange rows, std::int64_t width, const T* stream, const rows::NormParameters<T>& norm,
                         const A* rstd, T* y);
  void (*add_rms_norm_backward)(RowRange rows, std::int64_t width, const T* stream, const rows::NormParameters<T>& norm,
                                const A* rstd, const T* grad_y, T* grad_stream, A* sums);
  void (*norm_rotate)(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride,
                      const T* norm_weight, const A* cos, const A* sin, T* out, std::int64_t out_stride);
};

// G: the type of the incoming gradient.
template <class T, class G>
struct RotateBackwardRanges {
  using A = accumulator_t<T>;
  void (*add_norm_rotate_backward)(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride,
                                   const T* norm_weight, const A* cos, const A* sin, const G* grad_out,
                                   std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride, A* sums);
};

template <class T>
struct GateRanges {
  using A = accumulator_t<T>;
  void (*swiglu)(RowRange rows, const ActivationRule& rule, std::int64_t inner, const T* gate_up, T* act);
  void (*swiglu_backward)(RowRange rows, const ActivationRule& rule, std::int64_t inner, const T* gate_up,
                          const T* grad_act, T* grad_gate_up, T* act);
  void (*add_bias)(RowRange rows, std::int64_t width, const T* bias, T* y);
  void (*add_scaled)(RowRange elements, const T* base, const T* x, A factor, T* out);
  void (*column_sums)(RowRange rows, std::int64_t width, const T* grad_y, std::int64_t stride, A* sums);
};

template <class In, class Out>
struct MoveRanges {
  // Columns [begin, end) of all rows, so that threads never meet at a repeated id.
  void (*add_scatter)(RowRange columns, std::int64_t rows, std::int64_t width, const In* x, const std::int32_t* id,
                      Out* into);
  void (*convert)(RowRange rows, std::int64_t width, const In* in, std::int64_t in_stride, Out* out,
                  std::int64_t out_stride);
  void (*add)(RowRange elements, const In* x, Out* into);
};

#define ESPALIER_ROW_RANGES(set)                       \
  namespace set {                                      \
  template <class T>                                   \
  NormRanges<T> norm_ranges();                         \
  template <class T, class G>                          \
  RotateBackwardRanges<T, G> rotate_backward_ranges(); \
  template <class T>                                   \
  GateRanges<T> gate_ranges();                         \
  template <class In, class Out>                       \
  MoveRanges<In, Out> move_ranges();                   \
  }
ESPALIER_EACH_SET(ESPALIER_ROW_RANGES)
#undef ESPALIER_ROW_RANGES

}  // namespace espalier
