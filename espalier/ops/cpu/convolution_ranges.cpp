#include "espalier/ops/cpu/convolution_ranges.h"

#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

constexpr double kUnitEps = 1e-6;

template <class V>
ESPALIER_SIMD_INLINE V sigmoid(V x) {
  return 1 / (exp(-x) + 1);
}
template <class V>
ESPALIER_SIMD_INLINE V silu_slope(V x) {
  const V s = sigmoid(x);
  return s * fma(x, 1 - s, 1);
}

template <class A>
void convolve(std::int64_t rows, std::int64_t width, std::int64_t kernel, const A* line, const A* weight, const A* bias,
              A* mixed) {
  for (std::int64_t r = 0; r < rows; ++r)
    for_lanes<A>(width, [&](std::int64_t c, int count) {
      Vector<A> sum = load_some(bias + c, count);
      for (std::int64_t j = 0; j < kernel; ++j)
        sum = fma(load_some(weight + j * width + c, count), load_some(line + (r + j) * width + c, count), sum);
      store_some(mixed + r * width + c, sum, count);
    });
}

template <class A>
void convolve_back(std::int64_t rows, std::int64_t width, std::int64_t kernel, const A* grad_mixed, const A* weight,
                   A* grad) {
  for (std::int64_t r = 0; r < rows; ++r)
    for_lanes<A>(width, [&](std::int64_t c, int count) {
      Vector<A> sum{};
      for (std::int64_t j = 0; j < kernel; ++j)
        sum = fma(load_some(weight + (kernel - 1 - j) * width + c, count),
                  load_some(grad_mixed + (r + j) * width + c, count), sum);
      store_some(grad + r * width + c, sum, count);
    });
}

template <class A>
ESPALIER_SIMD_INLINE void add_to(double* sums, Vector<A> value, int count) {
  A values[kLanes<A>];
  store(values, value);
  for (int lane = 0; lane < count; ++lane) sums[lane] += static_cast<double>(values[lane]);
}

template <class A>
void add_weight_gradient(std::int64_t rows, std::int64_t width, std::int64_t kernel, const A* line, const A* grad_mixed,
                         double* sums) {
  for (std::int64_t j = 0; j < kernel; ++j)
    for_lanes<A>(width, [&](std::int64_t c, int count) {
      Vector<A> sum{};
      for (std::int64_t r = 0; r < rows; ++r)
        sum = fma(load_some(grad_mixed + r * width + c, count), load_some(line + (r + j) * width + c, count), sum);
      add_to<A>(sums + j * width + c, sum, count);
    });
}

template <class A>
void silu(std::int64_t width, const A* x, A* y) {
  for_lanes<A>(width, [&](std::int64_t i, int count) {
    const Vector<A> v = load_some(x + i, count);
    store_some(y + i, v / (exp(-v) + 1), count);
  });
}

template <class A>
void silu_backward(std::int64_t width, const A* x, A* grad) {
  for_lanes<A>(width, [&](std::int64_t i, int count) {
    store_some(grad + i, load_some(grad + i, count) * silu_slope(load_some(x + i, count)), count);
  });
}

template <class A>
A unit(std::int64_t width, const A* x, A scale, A* y) {
  silu(width, x, y);
  const A inverse = inverse_root(sum_of_squares(width, y) + A(kUnitEps)), factor = inverse * scale;
  for_lanes<A>(width, [&](std::int64_t i, int count) { store_some(y + i, load_some(y + i, count) * factor, count); });
  return inverse;
}

template <class A>
void unit_backward(std::int64_t width, const A* x, const A* y, A scale, A inverse, A* grad) {
  const A along = dot(width, grad, y) / scale;
  for_lanes<A>(width, [&](std::int64_t i, int count) {
    const Vector<A> of_u = fma(load_some(grad + i, count), scale, -(load_some(y + i, count) * along)) * inverse;
    store_some(grad + i, of_u * silu_slope(load_some(x + i, count)), count);
  });
}

template <class T>
ESPALIER_SIMD_INLINE accumulator_t<T> inverse_root_mean(std::int64_t width, accumulator_t<T> eps, const T* o) {
  return inverse_root(sum_of_squares(width, o) / static_cast<accumulator_t<T>>(width) + eps);
}

// The factor of a normed row, and its derivative.
struct Silu {
  template <class V>
  static ESPALIER_SIMD_INLINE V value(V z) {
    return z / (exp(-z) + 1);
  }
  template <class V>
  static ESPALIER_SIMD_INLINE V slope(V z) {
    return silu_slope(z);
  }
};
struct Sigmoid {
  template <class V>
  static ESPALIER_SIMD_INLINE V value(V z) {
    return sigmoid(z);
  }
  template <class V>
  static ESPALIER_SIMD_INLINE V slope(V z) {
    const V s = sigmoid(z);
    return s * (1 - s);
  }
};

template <class T, class Gate>
void norm(std::int64_t width, accumulator_t<T> eps, const T* o, const T* z, const T* weight, T* y) {
  const accumulator_t<T> inverse = inverse_root_mean(width, eps, o);
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    store_some(
        y + i,
        load_some(weight + i, count) * (load_some(o + i, count) * inverse) * Gate::value(load_some(z + i, count)),
        count);
  });
}

template <class T, class Gate>
void norm_backward(std::int64_t width, accumulator_t<T> eps, const T* o, const T* z, const T* weight, const T* grad_y,
                   T* grad_o, T* grad_z, double* sums) {
  const accumulator_t<T> inverse = inverse_root_mean(width, eps, o);
  const accumulator_t<T> along = sum_over<T>(width,
                                             [&](Vector<T> sum, std::int64_t i, int count) {
                                               const Vector<T> of_normed = load_some(grad_y + i, count) *
                                                                           load_some(weight + i, count) *
                                                                           Gate::value(load_some(z + i, count));
                                               return fma(of_normed, load_some(o + i, count) * inverse, sum);
                                             }) /
                                 static_cast<accumulator_t<T>>(width);
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    const Vector<T> gate = load_some(z + i, count), normed = load_some(o + i, count) * inverse;
    const Vector<T> of_y = load_some(grad_y + i, count), w = load_some(weight + i, count);
    add_to<accumulator_t<T>>(sums + i, of_y * normed * Gate::value(gate), count);
    store_some(grad_z + i, of_y * w * normed * Gate::slope(gate), count);
    store_some(grad_o + i, fma(of_y * w, Gate::value(gate), -(normed * along)) * inverse, count);
  });
}

template <class T>
ESPALIER_SIMD_INLINE Vector<T> gated(const T* o, const T* z, std::int64_t i, int count) {
  const Vector<T> gate = load_some(z + i, count);
  return load_some(o + i, count) * (gate / (exp(-gate) + 1));
}
template <class T>
ESPALIER_SIMD_INLINE accumulator_t<T> inverse_root_of_gated(std::int64_t width, accumulator_t<T> eps, const T* o,
                                                            const T* z) {
  const accumulator_t<T> squares = sum_over<T>(width, [&](Vector<T> sum, std::int64_t i, int count) {
    const Vector<T> u = gated(o, z, i, count);
    return fma(u, u, sum);
  });
  return inverse_root(squares / static_cast<accumulator_t<T>>(width) + eps);
}

template <class T>
void gate_then_norm(std::int64_t width, accumulator_t<T> eps, const T* o, const T* z, const T* weight, T* y) {
  const accumulator_t<T> inverse = inverse_root_of_gated(width, eps, o, z);
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    store_some(y + i, load_some(weight + i, count) * (gated(o, z, i, count) * inverse), count);
  });
}

template <class T>
void gate_then_norm_backward(std::int64_t width, accumulator_t<T> eps, const T* o, const T* z, const T* weight,
                             const T* grad_y, T* grad_o, T* grad_z, double* sums) {
  const accumulator_t<T> inverse = inverse_root_of_gated(width, eps, o, z);
  const accumulator_t<T> along = sum_over<T>(width,
                                             [&](Vector<T> sum, std::int64_t i, int count) {
                                               return fma(load_some(grad_y + i, count) * load_some(weight + i, count),
                                                          gated(o, z, i, count) * inverse, sum);
                                             }) /
                                 static_cast<accumulator_t<T>>(width);
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    const Vector<T> gate = load_some(z + i, count), s = sigmoid(gate), from = load_some(o + i, count);
    const Vector<T> normed = gated(o, z, i, count) * inverse, of_y = load_some(grad_y + i, count);
    const Vector<T> of_u = fma(of_y, load_some(weight + i, count), -(normed * along)) * inverse;
    add_to<accumulator_t<T>>(sums + i, of_y * normed, count);
    store_some(grad_z + i, of_u * from * (s * fma(gate, 1 - s, 1)), count);
    store_some(grad_o + i, of_u * (gate * s), count);
  });
}

template <class T>
void gate(std::int64_t width, const T* x, const T* gates, T* y) {
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    store_some(y + i, load_some(x + i, count) * sigmoid(load_some(gates + i, count)), count);
  });
}

template <class T>
void gate_backward(std::int64_t width, const T* x, const T* gates, const T* grad_y, T* grad_x, T* grad_gate) {
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    const Vector<T> s = sigmoid(load_some(gates + i, count)), of_y = load_some(grad_y + i, count);
    store_some(grad_gate + i, of_y * load_some(x + i, count) * (s * (1 - s)), count);
    store_some(grad_x + i, of_y * s, count);
  });
}

}  // namespace

template <class A>
ConvolutionRanges<A> convolution_ranges() {
  return {convolve<A>, convolve_back<A>, add_weight_gradient<A>, silu<A>, silu_backward<A>, unit<A>, unit_backward<A>};
}
template ConvolutionRanges<float> convolution_ranges<float>();
template ConvolutionRanges<double> convolution_ranges<double>();

template <class T>
GatedHeadRanges<T> gated_head_ranges() {
  return {norm<T, Silu>,     norm_backward<T, Silu>,     norm<T, Sigmoid>, norm_backward<T, Sigmoid>,
          gate_then_norm<T>, gate_then_norm_backward<T>, gate<T>,          gate_backward<T>};
}
template GatedHeadRanges<float> gated_head_ranges<float>();
template GatedHeadRanges<double> gated_head_ranges<double>();
template GatedHeadRanges<bfloat16> gated_head_ranges<bfloat16>();

}  // namespace espalier::ESPALIER_SIMD
