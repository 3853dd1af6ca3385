// Norms, rotation and activations on a device. Equations, shapes and roundings: ops/norm.h, ops/rotation.h,
// ops/swiglu.h, ops/cpu/row_kernels.h. T is float, double or bfloat16; row strides are in elements.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/shape/block_kinds.h"

namespace espalier::cuda {

// Overwrites y [rows, width] and rstd [rows]. bias null: none.
template <class T>
void norm(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight, const T* bias,
          double eps, T* y, accumulator_t<T>* rstd);
template <class T>
void norm_again(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight, const T* bias,
                const accumulator_t<T>* rstd, T* y);
// The most bytes of a row of accumulators: its column sums fit a block's shared memory on every GPU.
inline constexpr std::int64_t kWidestNorm = 96 * 1024;
// Adds to grad_stream and grad_weight (null: it has no gradient); the order of additions depends on `rows` alone.
template <class T>
void add_norm_backward(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight,
                       const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* grad_weight);

struct Heads {
  std::int64_t rows = 0, heads = 0, head_dim = 0;
  double eps = 0;
  const std::int32_t* position = nullptr;  // [rows]
  // Read by rotate_part alone. rotate takes whole heads whose halves are the pairs, with RMSNorm or no norm.
  std::int64_t rotary = 0, first = 0;  // channels that rotate, and the first one
  bool interleaved = false;            // even and odd channels are the pairs
  bool wide_norm = false;              // over all heads of a row, weight [heads * D]
  NormKind norm = NormKind::rms;
};
// Overwrites out. weight [D] null: no norm. cos, sin [positions, D/2].
template <class T>
void rotate(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight, const accumulator_t<T>* cos,
            const accumulator_t<T>* sin, T* out, std::int64_t out_stride);
// G is T or accumulator_t<T>. Overwrites grad_in; adds to grad_weight if there is a weight.
template <class T, class G>
void add_rotate_backward(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight,
                         const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                         std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                         accumulator_t<T>* grad_weight);
// The same for all rotations and norms that ops/rotation.h has; cos, sin [positions, rotary/2].
template <class T>
void rotate_part(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight, const accumulator_t<T>* cos,
                 const accumulator_t<T>* sin, T* out, std::int64_t out_stride);
template <class T, class G>
void add_rotate_part_backward(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight,
                              const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                              std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                              accumulator_t<T>* grad_weight);

// Overwrites act [rows, inner].
template <class T>
void swiglu(std::int64_t rows, std::int64_t inner, const T* gate_up, T* act);
// Overwrites grad_gate_up, which may be gate_up, and act, which may be grad_act.
template <class T>
void swiglu_backward(std::int64_t rows, std::int64_t inner, const T* gate_up, const T* grad_act, T* grad_gate_up,
                     T* act);
// The same for all activations.
template <class T>
void activate(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up, T* act);
template <class T>
void activate_backward(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up,
                       const T* grad_act, T* grad_gate_up, T* act);

}  // namespace espalier::cuda
