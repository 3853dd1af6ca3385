// SwiGLU, biases and the moves between types and rows, on a range; compiled for each instruction set.
//
//   act = silu(gate) up,  silu(g) = g s,  s = 1/(1 + e^-g)
//   grad_gate = grad_act up s (1 + g (1 - s)),  grad_up = grad_act silu(gate)
// bfloat16: silu is rounded before its product with up, as torch's act_fn(gate) * up does; the backward multiplies by
// that rounded value, takes everything else in float, and rounds when it stores.
#include "espalier/ops/cpu/row_ranges.h"
#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

template <class T>
void swiglu(RowRange rows, std::int64_t inner, const T* gate_up, T* act) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const gate = gate_up + r * 2 * inner;
    const T* const up = gate + inner;
    T* const out = act + r * inner;
    for_lanes<T>(inner, [&](std::int64_t i, int count) {
      const Vector<T> g = load_some(gate + i, count);
      const Vector<T> silu = rounded<T>(g / (exp(-g) + 1));
      store_some(out + i, silu * load_some(up + i, count), count);
    });
  }
}

// Reads all it needs at i before it writes there: the buffers may be the same.
template <class T>
void swiglu_backward(RowRange rows, std::int64_t inner, const T* gate_up, const T* grad_act, T* grad_gate_up, T* act) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const gate = gate_up + r * 2 * inner;
    const T* const up = gate + inner;
    const T* const grad = grad_act + r * inner;
    T* const grad_gate = grad_gate_up + r * 2 * inner;
    T* const grad_up = grad_gate + inner;
    T* const out = act == nullptr ? nullptr : act + r * inner;
    for_lanes<T>(inner, [&](std::int64_t i, int count) {
      const Vector<T> g = load_some(gate + i, count), u = load_some(up + i, count), d = load_some(grad + i, count);
      const Vector<T> exponential = exp(-g) + 1;
      const Vector<T> sigmoid = 1 / exponential, silu = rounded<T>(g / exponential);
      store_some(grad_gate + i, d * u * (sigmoid * (1 + g * (1 - sigmoid))), count);
      store_some(grad_up + i, d * silu, count);
      if (out != nullptr) store_some(out + i, silu * u, count);
    });
  }
}

template <class T>
void add_bias(RowRange rows, std::int64_t width, const T* bias, T* y) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    T* const row = y + r * width;
    for_lanes<T>(width, [&](std::int64_t i, int count) {
      store_some(row + i, load_some(row + i, count) + load_some(bias + i, count), count);
    });
  }
}

template <class T>
void column_sums(RowRange rows, std::int64_t width, const T* grad_y, std::int64_t stride, accumulator_t<T>* sums) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const row = grad_y + r * stride;
    for_lanes<T>(width, [&](std::int64_t i, int count) {
      store_some(sums + i, load_some(sums + i, count) + load_some(row + i, count), count);
    });
  }
}

template <class In, class Out>
void add_values(std::int64_t count_all, const In* x, Out* into) {
  for_lanes<Out>(count_all, [&](std::int64_t i, int count) {
    store_some(into + i, load_some(into + i, count) + load_some(x + i, count), count);
  });
}

template <class In, class Out>
void add_scatter(RowRange columns, std::int64_t rows, std::int64_t width, const In* x, const std::int32_t* id,
                 Out* into) {
  for (std::int64_t r = 0; r < rows; ++r)
    add_values(columns.end - columns.begin, x + r * width + columns.begin, into + id[r] * width + columns.begin);
}

template <class In, class Out>
void add(RowRange elements, const In* x, Out* into) {
  add_values(elements.end - elements.begin, x + elements.begin, into + elements.begin);
}

template <class In, class Out>
inline constexpr bool kSameType = false;
template <class T>
inline constexpr bool kSameType<T, T> = true;

template <class In, class Out>
void convert(RowRange rows, std::int64_t width, const In* in, std::int64_t in_stride, Out* out,
             std::int64_t out_stride) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const In* const from = in + r * in_stride;
    Out* const to = out + r * out_stride;
    if constexpr (kSameType<In, Out>) {
      __builtin_memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(width) * sizeof(In));
    } else if constexpr (kLanes<In> == kLanes<Out>) {
      for_lanes<In>(width, [&](std::int64_t i, int count) { store_some(to + i, load_some(from + i, count), count); });
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < width; ++i) to[i] = static_cast<Out>(from[i]);
    }
  }
}

}  // namespace

template <class T>
GateRanges<T> gate_ranges() {
  return {swiglu<T>, swiglu_backward<T>, add_bias<T>, column_sums<T>};
}
template GateRanges<float> gate_ranges<float>();
template GateRanges<double> gate_ranges<double>();
template GateRanges<bfloat16> gate_ranges<bfloat16>();

// Between float and double there is only `convert`.
template <class In, class Out>
MoveRanges<In, Out> move_ranges() {
  if constexpr (kLanes<In> == kLanes<Out>)
    return {add_scatter<In, Out>, convert<In, Out>, add<In, Out>};
  else
    return {nullptr, convert<In, Out>, nullptr};
}
template MoveRanges<float, float> move_ranges<float, float>();
template MoveRanges<double, double> move_ranges<double, double>();
template MoveRanges<bfloat16, bfloat16> move_ranges<bfloat16, bfloat16>();
template MoveRanges<bfloat16, float> move_ranges<bfloat16, float>();
template MoveRanges<float, bfloat16> move_ranges<float, bfloat16>();
template MoveRanges<float, double> move_ranges<float, double>();
template MoveRanges<double, float> move_ranges<double, float>();

}  // namespace espalier::ESPALIER_SIMD
