// SwiGLU, biases and the moves between types and rows, on a range; compiled for each instruction set.
//
//   act = f(gate) up, e.g. silu(g) = g s,  s = 1/(1 + e^-g)
//   grad_gate = grad_act up f'(gate),  grad_up = grad_act f(gate)
// bfloat16: f is rounded before its product with up, as torch's act_fn(gate) * up does; the backward multiplies by
// that rounded value, takes everything else in float, and rounds when it stores.
#include "espalier/base/simd_tanh.h"
#include "espalier/ops/cpu/row_ranges.h"
#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// f(g) and f'(g).
template <class T>
struct Slope {
  Vector<T> value, slope;
};

template <class T>
ESPALIER_SIMD_INLINE Vector<T> error_function(Vector<T> x) {
  Vector<T> y{};
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    if constexpr (sizeof(accumulator_t<T>) == 4)
      y[lane] = __builtin_erff(x[lane]);
    else
      y[lane] = __builtin_erf(x[lane]);
  }
  return y;
}

// silu(g) = g s, silu' = s (1 + g (1 - s)).
template <class T>
struct Silu {
  static ESPALIER_SIMD_INLINE Vector<T> value(Vector<T> g) { return g / (exp(-g) + 1); }
  static ESPALIER_SIMD_INLINE Slope<T> with_slope(Vector<T> g) {
    const Vector<T> exponential = exp(-g) + 1, sigmoid = 1 / exponential;
    return {g / exponential, sigmoid * fma(g, 1 - sigmoid, 1)};
  }
};
// g/2 (1 + t), t = tanh(c (g + a g^3)).
template <class T>
struct GeluTanh {
  using A = accumulator_t<T>;
  static constexpr A kRoot = A(0.79788456080286535588), kCube = A(0.044715);
  static ESPALIER_SIMD_INLINE Vector<T> turn(Vector<T> g) { return tanh_of<T>(kRoot * fma(kCube * g * g, g, g)); }
  static ESPALIER_SIMD_INLINE Vector<T> value(Vector<T> g) { return A(0.5) * g * (1 + turn(g)); }
  static ESPALIER_SIMD_INLINE Slope<T> with_slope(Vector<T> g) {
    const Vector<T> t = turn(g), inner = kRoot * fma(3 * kCube * g, g, 1);
    return {A(0.5) * g * (1 + t), fma(A(0.5) * g * fma(-t, t, 1), inner, A(0.5) * (1 + t))};
  }
};
// g Phi(g).
template <class T>
struct Gelu {
  using A = accumulator_t<T>;
  static ESPALIER_SIMD_INLINE Vector<T> below(Vector<T> g) {
    return A(0.5) * (1 + error_function<T>(g * A(0.70710678118654752440)));
  }
  static ESPALIER_SIMD_INLINE Vector<T> value(Vector<T> g) { return g * below(g); }
  static ESPALIER_SIMD_INLINE Slope<T> with_slope(Vector<T> g) {
    const Vector<T> phi = below(g);
    return {g * phi, fma(g * A(0.39894228040143267794), exp(A(-0.5) * g * g), phi)};
  }
};

// max(g, 0)^2.
template <class T>
struct ReluSquared {
  static ESPALIER_SIMD_INLINE Vector<T> value(Vector<T> g) {
    const Vector<T> positive = max(g, Vector<T>{});
    return positive * positive;
  }
  static ESPALIER_SIMD_INLINE Slope<T> with_slope(Vector<T> g) {
    const Vector<T> positive = max(g, Vector<T>{});
    return {positive * positive, 2 * positive};
  }
};

template <class T, class F>
void activate(RowRange rows, bool gated, std::int64_t inner, const T* gate_up, T* act) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const gate = gate_up + r * (gated ? 2 : 1) * inner;
    T* const out = act + r * inner;
    for_lanes<T>(inner, [&](std::int64_t i, int count) {
      const Vector<T> f = rounded<T>(F::value(load_some(gate + i, count)));
      store_some(out + i, gated ? f * load_some(gate + inner + i, count) : f, count);
    });
  }
}

// Reads all it needs at i before it writes there: the buffers may be the same.
template <class T, class F>
void activate_backward(RowRange rows, bool gated, std::int64_t inner, const T* gate_up, const T* grad_act,
                       T* grad_gate_up, T* act) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const std::int64_t at = r * (gated ? 2 : 1) * inner;
    const T *const gate = gate_up + at, *const grad = grad_act + r * inner;
    T* const grad_gate = grad_gate_up + at;
    T* const out = act == nullptr ? nullptr : act + r * inner;
    for_lanes<T>(inner, [&](std::int64_t i, int count) {
      const Vector<T> d = load_some(grad + i, count);
      const Slope<T> of = F::with_slope(load_some(gate + i, count));
      const Vector<T> f = rounded<T>(of.value);
      if (!gated) {
        store_some(grad_gate + i, d * of.slope, count);
        if (out != nullptr) store_some(out + i, f, count);
        return;
      }
      const Vector<T> u = load_some(gate + inner + i, count);
      store_some(grad_gate + i, d * u * of.slope, count);
      store_some(grad_gate + inner + i, d * f, count);
      if (out != nullptr) store_some(out + i, f * u, count);
    });
  }
}

// g' = min(g, limit), u' = clamp(u): f = g' s, s = sigmoid(1.702 g'), act = f (u' + 1).
template <class T>
struct Clamped {
  using A = accumulator_t<T>;
  static constexpr A kSlope = A(1.702);
  Vector<T> g, u, sigmoid;

  Clamped(Vector<T> gate, Vector<T> up, A limit)
      : g(min(gate, broadcast(limit))), u(max(min(up, broadcast(limit)), broadcast(-limit))) {
    sigmoid = 1 / (exp(-kSlope * g) + 1);
  }
};

template <class T>
void activate_clamped(RowRange rows, double limit, std::int64_t inner, const T* gate_up, T* act) {
  using A = accumulator_t<T>;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const gate = gate_up + r * 2 * inner;
    for_lanes<T>(inner, [&](std::int64_t i, int count) {
      const Clamped<T> of(load_some(gate + i, count), load_some(gate + inner + i, count), static_cast<A>(limit));
      store_some(act + r * inner + i, of.g * of.sigmoid * (of.u + 1), count);
    });
  }
}

template <class T>
void activate_clamped_backward(RowRange rows, double limit, std::int64_t inner, const T* gate_up, const T* grad_act,
                               T* grad_gate_up, T* act) {
  using A = accumulator_t<T>;
  const A bound = static_cast<A>(limit);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T *const gate = gate_up + r * 2 * inner, *const grad = grad_act + r * inner;
    T* const to = grad_gate_up + r * 2 * inner;
    for_lanes<T>(inner, [&](std::int64_t i, int count) {
      const Vector<T> g = load_some(gate + i, count), u = load_some(gate + inner + i, count),
                      d = load_some(grad + i, count), zero{};
      const Clamped<T> of(g, u, bound);
      const Vector<T> f = of.g * of.sigmoid;
      const Vector<T> slope = of.sigmoid * fma(Clamped<T>::kSlope * of.g, 1 - of.sigmoid, 1);
      store_some(to + i, g <= broadcast(bound) ? d * (of.u + 1) * slope : zero, count);
      store_some(to + inner + i, ((u <= broadcast(bound)) & (u >= broadcast(-bound))) ? d * f : zero, count);
      if (act != nullptr) store_some(act + r * inner + i, f * (of.u + 1), count);
    });
  }
}

template <class T>
void swiglu(RowRange rows, const ActivationRule& rule, std::int64_t inner, const T* gate_up, T* act) {
  switch (rule.kind) {
    case Activation::silu:
      return activate<T, Silu<T>>(rows, rule.gated, inner, gate_up, act);
    case Activation::gelu:
      return activate<T, Gelu<T>>(rows, rule.gated, inner, gate_up, act);
    case Activation::gelu_tanh:
      return activate<T, GeluTanh<T>>(rows, rule.gated, inner, gate_up, act);
    case Activation::relu_squared:
      return activate<T, ReluSquared<T>>(rows, rule.gated, inner, gate_up, act);
    case Activation::clamped:
      return activate_clamped<T>(rows, rule.limit, inner, gate_up, act);
  }
}

template <class T>
void swiglu_backward(RowRange rows, const ActivationRule& rule, std::int64_t inner, const T* gate_up, const T* grad_act,
                     T* grad_gate_up, T* act) {
  switch (rule.kind) {
    case Activation::silu:
      return activate_backward<T, Silu<T>>(rows, rule.gated, inner, gate_up, grad_act, grad_gate_up, act);
    case Activation::gelu:
      return activate_backward<T, Gelu<T>>(rows, rule.gated, inner, gate_up, grad_act, grad_gate_up, act);
    case Activation::gelu_tanh:
      return activate_backward<T, GeluTanh<T>>(rows, rule.gated, inner, gate_up, grad_act, grad_gate_up, act);
    case Activation::relu_squared:
      return activate_backward<T, ReluSquared<T>>(rows, rule.gated, inner, gate_up, grad_act, grad_gate_up, act);
    case Activation::clamped:
      return activate_clamped_backward<T>(rows, rule.limit, inner, gate_up, grad_act, grad_gate_up, act);
  }
}

template <class T>
void add_scaled(RowRange elements, const T* base, const T* x, accumulator_t<T> factor, T* out) {
  const Vector<T> factors = Vector<T>{} + factor;
  for_lanes<T>(elements.end - elements.begin, [&](std::int64_t at, int count) {
    const std::int64_t i = elements.begin + at;
    const Vector<T> own = load_some(x + i, count);
    if (base == nullptr)
      store_some(out + i, own * factors, count);
    else if constexpr (sizeof(T) == 2)
      store_some(out + i, load_some(base + i, count) + rounded<T>(own * factors), count);
    else
      store_some(out + i, fma(own, factors, load_some(base + i, count)), count);
  });
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
  return {swiglu<T>, swiglu_backward<T>, add_bias<T>, add_scaled<T>, column_sums<T>};
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
