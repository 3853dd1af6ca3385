// RMSNorm, and QK-norm with rotary positions, on a range of rows; compiled for each instruction set.
//
//   n = x rstd,  rstd = 1/sqrt(mean x^2 + eps),  y = n w
//   with u = grad_y w:  grad_x = rstd (u - n mean(u n)),  grad_w = sum grad_y n
// bfloat16 follows transformers' LlamaRMSNorm / Qwen3RMSNorm (statistics and n in float, n rounded, then the rounded
// product with w) and apply_rotary_pos_emb (cos and sin rounded, each product rounded, then their sum). Backward the
// rounded values of the forward are used where it used them, and gradients are rounded only when they are stored.
#include "espalier/ops/cpu/row_ranges.h"
#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

template <class T>
void write_normalized(std::int64_t width, const T* x, const T* weight, accumulator_t<T> rstd, T* y) {
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    const Vector<T> n = rounded<T>(load_some(x + i, count) * rstd);
    store_some(y + i, n * load_some(weight + i, count), count);
  });
}

template <class T>
accumulator_t<T> root_mean_inverse(std::int64_t width, const T* x, accumulator_t<T> eps) {
  const accumulator_t<T> squares = sum_over<T>(width, [&](std::int64_t i, int count) {
    const Vector<T> value = load_some(x + i, count);
    return value * value;
  });
  return inverse_root(squares / static_cast<accumulator_t<T>>(width) + eps);
}

template <class T>
void rms_norm(RowRange rows, std::int64_t width, const T* stream, const T* weight, accumulator_t<T> eps, T* y,
              accumulator_t<T>* rstd) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const x = stream + r * width;
    rstd[r] = root_mean_inverse(width, x, eps);
    write_normalized(width, x, weight, rstd[r], y + r * width);
  }
}

template <class T>
void rms_norm_again(RowRange rows, std::int64_t width, const T* stream, const T* weight, const accumulator_t<T>* rstd,
                    T* y) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r)
    write_normalized(width, stream + r * width, weight, rstd[r], y + r * width);
}

template <class T>
void add_rms_norm_backward(RowRange rows, std::int64_t width, const T* stream, const T* weight,
                           const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* sums) {
  using A = accumulator_t<T>;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const x = stream + r * width;
    const T* const g = grad_y + r * width;
    T* const out = grad_stream + r * width;
    const A scale = rstd[r];
    const A dot = sum_over<T>(width, [&](std::int64_t i, int count) {
      return load_some(g + i, count) * load_some(weight + i, count) * (load_some(x + i, count) * scale);
    });
    const A mean = dot / static_cast<A>(width);
    for_lanes<T>(width, [&](std::int64_t i, int count) {
      const Vector<T> n = load_some(x + i, count) * scale, grad = load_some(g + i, count);
      const Vector<T> u = grad * load_some(weight + i, count);
      store_some(out + i, load_some(out + i, count) + scale * (u - n * mean), count);
      store_some(sums + i, load_some(sums + i, count) + grad * rounded<T>(n), count);
    });
  }
}

// Both halves of a head at i and i + D/2.
template <class T>
struct Pair {
  Vector<T> a, b;
};
template <class T, class V>
ESPALIER_SIMD_INLINE Pair<V> load_pair(const T* head, std::int64_t half, std::int64_t i, int count) {
  return {load_some(head + i, count), load_some(head + half + i, count)};
}
// cos and sin as the stored type holds them.
template <class T>
ESPALIER_SIMD_INLINE Pair<T> load_angles(const accumulator_t<T>* cos, const accumulator_t<T>* sin, std::int64_t i,
                                         int count) {
  return {rounded<T>(load_some(cos + i, count)), rounded<T>(load_some(sin + i, count))};
}

template <class T, bool kNorm>
void norm_rotate_rows(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride,
                      const T* norm_weight, const accumulator_t<T>* cos, const accumulator_t<T>* sin, T* out,
                      std::int64_t out_stride) {
  const std::int64_t half = shape.head_dim / 2;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const accumulator_t<T>* const row_cos = cos + shape.position[r] * half;
    const accumulator_t<T>* const row_sin = sin + shape.position[r] * half;
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const T* const x = in + r * in_stride + h * shape.head_dim;
      T* const y = out + r * out_stride + h * shape.head_dim;
      accumulator_t<T> rstd = 1;
      if constexpr (kNorm) rstd = root_mean_inverse(shape.head_dim, x, static_cast<accumulator_t<T>>(shape.eps));
      for_lanes<T>(half, [&](std::int64_t i, int count) {
        Pair<T> v = load_pair<T, T>(x, half, i, count);
        if constexpr (kNorm) {
          const Pair<T> w = load_pair<T, T>(norm_weight, half, i, count);
          v = {rounded<T>(rounded<T>(v.a * rstd) * w.a), rounded<T>(rounded<T>(v.b * rstd) * w.b)};
        }
        const auto [c, s] = load_angles<T>(row_cos, row_sin, i, count);
        store_some(y + i, rounded<T>(v.a * c) - rounded<T>(v.b * s), count);
        store_some(y + half + i, rounded<T>(v.b * c) + rounded<T>(v.a * s), count);
      });
    }
  }
}

template <class T>
void norm_rotate(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride, const T* norm_weight,
                 const accumulator_t<T>* cos, const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  if (norm_weight != nullptr)
    norm_rotate_rows<T, true>(rows, shape, in, in_stride, norm_weight, cos, sin, out, out_stride);
  else
    norm_rotate_rows<T, false>(rows, shape, in, in_stride, norm_weight, cos, sin, out, out_stride);
}

// One head. The rotation's transpose gives grad_y of the norm; without a norm that is the result.
template <class T, class G, bool kNorm>
void head_backward(std::int64_t head_dim, double eps, const T* x, const T* norm_weight, const accumulator_t<T>* cos,
                   const accumulator_t<T>* sin, const G* grad_out, T* grad_in, accumulator_t<T>* sums) {
  using A = accumulator_t<T>;
  const std::int64_t half = head_dim / 2;
  const auto rotated_back = [&](std::int64_t i, int count) -> Pair<T> {
    const auto [ga, gb] = load_pair<G, T>(grad_out, half, i, count);
    const auto [c, s] = load_angles<T>(cos, sin, i, count);
    return {ga * c + gb * s, gb * c - ga * s};
  };
  if constexpr (!kNorm) {
    for_lanes<T>(half, [&](std::int64_t i, int count) {
      const Pair<T> g = rotated_back(i, count);
      store_some(grad_in + i, g.a, count);
      store_some(grad_in + half + i, g.b, count);
    });
  } else {
    const A rstd = root_mean_inverse(head_dim, x, static_cast<A>(eps));
    const A dot = sum_over<T>(half, [&](std::int64_t i, int count) {
      const Pair<T> g = rotated_back(i, count), v = load_pair<T, T>(x, half, i, count);
      const Pair<T> w = load_pair<T, T>(norm_weight, half, i, count);
      return g.a * w.a * (v.a * rstd) + g.b * w.b * (v.b * rstd);
    });
    const A mean = dot / static_cast<A>(head_dim);
    for_lanes<T>(half, [&](std::int64_t i, int count) {
      const Pair<T> g = rotated_back(i, count), v = load_pair<T, T>(x, half, i, count);
      const Pair<T> w = load_pair<T, T>(norm_weight, half, i, count);
      const Vector<T> na = v.a * rstd, nb = v.b * rstd;
      store_some(sums + i, load_some(sums + i, count) + g.a * rounded<T>(na), count);
      store_some(sums + half + i, load_some(sums + half + i, count) + g.b * rounded<T>(nb), count);
      store_some(grad_in + i, rstd * (g.a * w.a - na * mean), count);
      store_some(grad_in + half + i, rstd * (g.b * w.b - nb * mean), count);
    });
  }
}

template <class T, class G>
void add_norm_rotate_backward(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride,
                              const T* norm_weight, const accumulator_t<T>* cos, const accumulator_t<T>* sin,
                              const G* grad_out, std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                              accumulator_t<T>* sums) {
  const std::int64_t head_dim = shape.head_dim, half = head_dim / 2;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const accumulator_t<T>* const row_cos = cos + shape.position[r] * half;
    const accumulator_t<T>* const row_sin = sin + shape.position[r] * half;
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const T* const x = norm_weight == nullptr ? nullptr : in + r * in_stride + h * head_dim;
      const G* const g = grad_out + r * grad_out_stride + h * head_dim;
      T* const gx = grad_in + r * grad_in_stride + h * head_dim;
      if (norm_weight != nullptr)
        head_backward<T, G, true>(head_dim, shape.eps, x, norm_weight, row_cos, row_sin, g, gx, sums);
      else
        head_backward<T, G, false>(head_dim, shape.eps, x, norm_weight, row_cos, row_sin, g, gx, sums);
    }
  }
}

}  // namespace

template <class T>
NormRanges<T> norm_ranges() {
  return {rms_norm<T>, rms_norm_again<T>, add_rms_norm_backward<T>, norm_rotate<T>};
}
template NormRanges<float> norm_ranges<float>();
template NormRanges<double> norm_ranges<double>();
template NormRanges<bfloat16> norm_ranges<bfloat16>();

template <class T, class G>
RotateBackwardRanges<T, G> rotate_backward_ranges() {
  return {add_norm_rotate_backward<T, G>};
}
template RotateBackwardRanges<float, float> rotate_backward_ranges<float, float>();
template RotateBackwardRanges<double, double> rotate_backward_ranges<double, double>();
template RotateBackwardRanges<bfloat16, bfloat16> rotate_backward_ranges<bfloat16, bfloat16>();
template RotateBackwardRanges<bfloat16, float> rotate_backward_ranges<bfloat16, float>();

}  // namespace espalier::ESPALIER_SIMD
