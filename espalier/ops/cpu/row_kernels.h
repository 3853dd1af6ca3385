// The memory-bound parts of a block, each in one pass over its rows, forward and backward.
//
// Plain pointers; T is float, double or bfloat16, A = accumulator_t<T> (sums, statistics, parameter gradients). Row
// strides are in elements. Every output is documented as overwritten or added to. Parameter gradients are added in a
// fixed order for any number of threads. In bfloat16 norms and rotations are computed in float and rounded as in
// Hugging Face.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"
#include "espalier/shape/block_kinds.h"

namespace espalier::rows {

// Weights of a norm; only NormKind::layer has a bias.
template <class T>
struct NormParameters {
  NormParameters(const T* of, NormKind of_kind = NormKind::rms,
                 const T* added = nullptr)  // NOLINT(google-explicit-constructor)
      : weight(of), bias(added), kind(of_kind) {}

  const T *weight, *bias;
  NormKind kind;
};
// Lets T be inferred from the other arguments only.
template <class T>
struct Same {
  using Type = T;
};
template <class T>
using NormOf = const NormParameters<typename Same<T>::Type>&;

// rstd_r = 1/sqrt(mean_m stream_rm^2 + eps);  y_rm = weight_m * (stream_rm * rstd_r).
// Overwrites y [rows, width] and rstd [rows]; all contiguous. The other kinds of norms: ops/norm.h.
template <class T>
void rms_norm(std::int64_t rows, std::int64_t width, const T* stream, NormOf<T> norm, double eps, T* y,
              accumulator_t<T>* rstd);

// Recomputes y from stream and rstd.
template <class T>
void rms_norm_again(std::int64_t rows, std::int64_t width, const T* stream, NormOf<T> norm,
                    const accumulator_t<T>* rstd, T* y);

// With n = stream * rstd and u = grad_y * weight:
//   grad_stream_r += rstd_r (u_r - n_r mean_m(u_rm n_rm)) ;  grad_weight_m += sum_r grad_y_rm n_rm
template <class T>
void add_rms_norm_backward(std::int64_t rows, std::int64_t width, const T* stream, NormOf<T> norm,
                           const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* grad_weight,
                           accumulator_t<T>* grad_bias = nullptr);

// Heads of `in` (head h of row r at in + r*in_stride + h*D), normalised over D when norm_weight [D] is given (QK-norm),
// then rotated by the row's position:  (a, b) -> (a cos - b sin, b cos + a sin) on halves, tables cos/sin [positions,
// D/2]. Overwrites out.
struct HeadShape {
  std::int64_t rows = 0, heads = 0, head_dim = 0;
  double eps = 1e-6;
  const std::int32_t* position = nullptr;  // [rows]
  std::int64_t rotary = -1;                // number of first channels that rotate; below 0: all
  bool interleaved = false;                // even and odd channels are the pairs; without a norm
  bool wide_norm = false;                  // over all heads of a row, norm_weight [heads * D]
  NormKind norm = NormKind::rms;           // not layer
  std::int64_t first = 0;                  // the first channel that may rotate, without a norm; earlier ones stay

  std::int64_t rotating() const { return rotary < 0 ? head_dim : rotary; }
};
template <class T>
void norm_rotate(const HeadShape& shape, const T* in, std::int64_t in_stride, const T* norm_weight,
                 const accumulator_t<T>* cos, const accumulator_t<T>* sin, T* out, std::int64_t out_stride);

// G is T or A. Overwrites grad_in; adds to grad_norm_weight [D] if norm_weight is given.
template <class T, class G>
void add_norm_rotate_backward(const HeadShape& shape, const T* in, std::int64_t in_stride, const T* norm_weight,
                              const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                              std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                              accumulator_t<T>* grad_norm_weight);

// gate_up [rows, 2F] holds gate then up;  act_rf = f(gate_rf) up_rf; without a gate [rows, F]: f(up_rf). Overwrites act
// [rows, F].
template <class T>
void swiglu(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up, T* act);

// Overwrites grad_gate_up [rows, 2F] or [rows, F], which may be gate_up itself; also overwrites act (as swiglu) if it
// is given. act may be grad_act itself.
template <class T>
void swiglu_backward(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up,
                     const T* grad_act, T* grad_gate_up, T* act);

// x_r = table[id_r]. Overwrites x [rows, width].
template <class T>
void gather(std::int64_t rows, std::int64_t width, const T* table, const std::int32_t* id, T* x);
// into[id_r] += x_r, rows in order. Ids may repeat. In: T or A.
template <class In, class Out>
void add_scatter(std::int64_t rows, std::int64_t width, const In* x, const std::int32_t* id, Out* into);

// out_i = base_i + factor x_i, the product rounded first; base null: 0. out may be base, or x.
template <class T>
void add_scaled(std::int64_t count, const T* base, const T* x, double factor, T* out);

// y_r += bias, in place; and its backward: grad_bias_m += sum_r grad_y_rm.
template <class T>
void add_bias(std::int64_t rows, std::int64_t width, const T* bias, T* y);
template <class T>
void add_column_sums(std::int64_t rows, std::int64_t width, const T* grad_y, std::int64_t stride,
                     accumulator_t<T>* grad_bias);

// out_r = in_r, another type or stride. Overwrites out [rows, width].
template <class In, class Out>
void convert(std::int64_t rows, std::int64_t width, const In* in, std::int64_t in_stride, Out* out,
             std::int64_t out_stride);
// into_i += x_i over a flat range.
template <class In, class Out>
void add(std::int64_t count, const In* x, Out* into);

}  // namespace espalier::rows
