// Norms, and QK-norm with rotary positions, on a range of rows; compiled for each instruction set.
//
//   n = x rstd,  rstd = 1/sqrt(mean x^2 + eps),  y = n w
//   with u = grad_y w:  grad_x = rstd (u - n mean(u n)),  grad_w = sum grad_y n;  LayerNorm: ops/norm.h
// bfloat16 follows transformers' LlamaRMSNorm / Qwen3RMSNorm (statistics and n in float, n rounded, then the rounded
// product with w) and apply_rotary_pos_emb (cos and sin rounded, each product rounded, then their sum). Backward the
// rounded values of the forward are used where it used them, and gradients are rounded only when they are stored.
#include "espalier/ops/cpu/row_ranges.h"
#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// A kind of norm: n = (x - mean) rstd, rounded or not, times weight or 1 + weight.
template <class T>
struct Rule {
  explicit Rule(NormKind kind)
      : plus(kind == NormKind::rms_plus_one ? 1 : 0), rounds(kind == NormKind::rms), centred(kind == NormKind::layer) {}

  ESPALIER_SIMD_INLINE Vector<T> factor(const T* weight, std::int64_t i, int count) const {
    return plus ? load_some(weight + i, count) + plus : load_some(weight + i, count);
  }
  // n as its product with the weight takes it.
  ESPALIER_SIMD_INLINE Vector<T> taken(Vector<T> n) const { return rounds ? rounded<T>(n) : n; }
  accumulator_t<T> mean(std::int64_t width, const T* x) const {
    if (!centred) return 0;
    return sum_over<T>(width, [&](Vector<T> sum, std::int64_t i, int count) { return sum + load_some(x + i, count); }) /
           static_cast<accumulator_t<T>>(width);
  }

  accumulator_t<T> plus;
  bool rounds, centred;
};

template <class T>
void write_normalized(std::int64_t width, const T* x, const rows::NormParameters<T>& norm, accumulator_t<T> mean,
                      accumulator_t<T> rstd, T* y) {
  const Rule<T> rule(norm.kind);
  for_lanes<T>(width, [&](std::int64_t i, int count) {
    const Vector<T> n = rule.taken((load_some(x + i, count) - mean) * rstd);
    const Vector<T> scaled = n * rule.factor(norm.weight, i, count);
    store_some(y + i, norm.bias != nullptr ? scaled + load_some(norm.bias + i, count) : scaled, count);
  });
}

template <class T>
accumulator_t<T> root_mean_inverse(std::int64_t width, const T* x, accumulator_t<T> eps) {
  return inverse_root(sum_of_squares(width, x) / static_cast<accumulator_t<T>>(width) + eps);
}

// 1/sqrt(mean (x - mean)^2 + eps). Lanes behind the row are left out.
template <class T>
accumulator_t<T> centred_inverse(std::int64_t width, const T* x, accumulator_t<T> mean, accumulator_t<T> eps) {
  accumulator_t<T> squares = 0;
  for (std::int64_t i = 0; i < width; i += kLanes<T>) {
    const int count = width - i < kLanes<T> ? static_cast<int>(width - i) : kLanes<T>;
    const Vector<T> c = load_some(x + i, count) - mean;
    const Vector<T> square = c * c;
    for (int lane = 0; lane < count; ++lane) squares += square[lane];
  }
  return inverse_root(squares / static_cast<accumulator_t<T>>(width) + eps);
}

template <class T>
void rms_norm(RowRange rows, std::int64_t width, const T* stream, const rows::NormParameters<T>& norm,
              accumulator_t<T> eps, T* y, accumulator_t<T>* rstd) {
  const Rule<T> rule(norm.kind);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const x = stream + r * width;
    const accumulator_t<T> mean = rule.mean(width, x);
    rstd[r] = rule.centred ? centred_inverse(width, x, mean, eps) : root_mean_inverse(width, x, eps);
    write_normalized(width, x, norm, mean, rstd[r], y + r * width);
  }
}

template <class T>
void rms_norm_again(RowRange rows, std::int64_t width, const T* stream, const rows::NormParameters<T>& norm,
                    const accumulator_t<T>* rstd, T* y) {
  const Rule<T> rule(norm.kind);
  for (std::int64_t r = rows.begin; r < rows.end; ++r)
    write_normalized(width, stream + r * width, norm, rule.mean(width, stream + r * width), rstd[r], y + r * width);
}

// sums: of the weight's gradient [width], and behind it of the bias' where there is one.
template <class T>
void add_rms_norm_backward(RowRange rows, std::int64_t width, const T* stream, const rows::NormParameters<T>& norm,
                           const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* sums) {
  using A = accumulator_t<T>;
  const Rule<T> rule(norm.kind);
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const T* const x = stream + r * width;
    const T* const g = grad_y + r * width;
    T* const out = grad_stream + r * width;
    const A scale = rstd[r], middle = rule.mean(width, x);
    const A along = sum_over<T>(width, [&](Vector<T> sum, std::int64_t i, int count) {
      const Vector<T> u = load_some(g + i, count) * rule.factor(norm.weight, i, count);
      return fma(u, (load_some(x + i, count) - middle) * scale, sum);
    });
    const A mean = along / static_cast<A>(width);
    A mean_u = 0;
    if (rule.centred)
      mean_u = sum_over<T>(width,
                           [&](Vector<T> sum, std::int64_t i, int count) {
                             return fma(load_some(g + i, count), rule.factor(norm.weight, i, count), sum);
                           }) /
               static_cast<A>(width);
    for_lanes<T>(width, [&](std::int64_t i, int count) {
      const Vector<T> n = (load_some(x + i, count) - middle) * scale, grad = load_some(g + i, count);
      const Vector<T> of_n = fma(-n, mean, fma(grad, rule.factor(norm.weight, i, count), -mean_u));
      store_some(out + i, fma(of_n, scale, load_some(out + i, count)), count);
      store_some(sums + i, fma(grad, rule.taken(n), load_some(sums + i, count)), count);
      if (norm.bias != nullptr) store_some(sums + width + i, load_some(sums + width + i, count) + grad, count);
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

// Largest head of interleaved pairs.
constexpr std::int64_t kLargestHead = 4096;

// Channels 2i, 2i + 1 of the first `rotary` to i and rotary/2 + i, and back; the others stay.
template <class T>
void take_apart(std::int64_t head_dim, std::int64_t rotary, const T* from, T* to) {
  for (std::int64_t i = 0; i < rotary / 2; ++i) to[i] = from[2 * i], to[rotary / 2 + i] = from[2 * i + 1];
  for (std::int64_t i = rotary; i < head_dim; ++i) to[i] = from[i];
}
template <class T>
void put_together(std::int64_t head_dim, std::int64_t rotary, const T* from, T* to) {
  for (std::int64_t i = 0; i < rotary / 2; ++i) to[2 * i] = from[i], to[2 * i + 1] = from[rotary / 2 + i];
  for (std::int64_t i = rotary; i < head_dim; ++i) to[i] = from[i];
}

// The heads from their first channel on that may rotate.
rows::HeadShape behind_first(const rows::HeadShape& shape) {
  rows::HeadShape rest = shape;
  rest.head_dim -= shape.first;
  return rest;
}
template <class T, class From>
ESPALIER_SIMD_INLINE void copy_first(std::int64_t count, const From* from, T* to) {
  for_lanes<T>(count,
               [&](std::int64_t i, int some) { store_some(to + i, Vector<T>(load_some(from + i, some)), some); });
}

// a b + c with a product that T holds: rounded to it, or not at all.
template <class T>
ESPALIER_SIMD_INLINE Vector<T> add_held(Vector<T> a, Vector<T> b, Vector<T> c) {
  if constexpr (sizeof(T) == 2)
    return rounded<T>(a * b) + c;
  else
    return fma(a, b, c);
}

// One head: its norm with the given rstd, and its rotation.
template <class T, bool kNorm>
ESPALIER_SIMD_INLINE void rotate_head(const rows::HeadShape& shape, const Rule<T>& rule, const T* x,
                                      const T* norm_weight, accumulator_t<T> rstd, const accumulator_t<T>* cos,
                                      const accumulator_t<T>* sin, T* y) {
  const std::int64_t rotary = shape.rotating(), half = rotary / 2;
  const auto normed = [&](std::int64_t i, int count) -> Vector<T> {
    const Vector<T> value = load_some(x + i, count);
    if constexpr (kNorm)
      return rounded<T>(rule.taken(value * rstd) * rule.factor(norm_weight, i, count));
    else
      return value;
  };
  for_lanes<T>(half, [&](std::int64_t i, int count) {
    const Pair<T> v{normed(i, count), normed(half + i, count)};
    const auto [c, s] = load_angles<T>(cos, sin, i, count);
    store_some(y + i, add_held<T>(v.a, c, -rounded<T>(v.b * s)), count);
    store_some(y + half + i, add_held<T>(v.b, c, rounded<T>(v.a * s)), count);
  });
  for_lanes<T>(shape.head_dim - rotary,
               [&](std::int64_t i, int count) { store_some(y + rotary + i, normed(rotary + i, count), count); });
}

template <class T, bool kNorm>
void norm_rotate_rows(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride,
                      const T* norm_weight, const accumulator_t<T>* cos, const accumulator_t<T>* sin, T* out,
                      std::int64_t out_stride) {
  const std::int64_t D = shape.head_dim, half = shape.rotating() / 2, span = shape.wide_norm ? shape.heads : 1;
  const rows::HeadShape turning = behind_first(shape);
  const Rule<T> rule(shape.norm);
  const auto eps = static_cast<accumulator_t<T>>(shape.eps);
  T apart[kLargestHead], turned[kLargestHead];
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const accumulator_t<T>* const row_cos = cos + shape.position[r] * half;
    const accumulator_t<T>* const row_sin = sin + shape.position[r] * half;
    accumulator_t<T> rstd = 1;
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      const T* const x = in + r * in_stride + h * D + shape.first;
      T* const y = out + r * out_stride + h * D + shape.first;
      if (shape.first > 0) copy_first(shape.first, x - shape.first, y - shape.first);
      if constexpr (kNorm)
        if (h % span == 0) rstd = root_mean_inverse(span * D, x, eps);
      const T* const weight = kNorm ? norm_weight + h % span * D : nullptr;
      if (!shape.interleaved) {
        rotate_head<T, kNorm>(turning, rule, x, weight, rstd, row_cos, row_sin, y);
      } else {
        take_apart(turning.head_dim, 2 * half, x, apart);
        rotate_head<T, kNorm>(turning, rule, apart, weight, rstd, row_cos, row_sin, turned);
        put_together(turning.head_dim, 2 * half, turned, y);
      }
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

// The rotation's transpose of the gradient of one head: channel pairs, then those that stay. Calls
// visit(i, count, gradient).
template <class T, class G, class Visit>
ESPALIER_SIMD_INLINE void rotate_back(const rows::HeadShape& shape, const accumulator_t<T>* cos,
                                      const accumulator_t<T>* sin, const G* grad_out, Visit&& visit) {
  const std::int64_t rotary = shape.rotating(), half = rotary / 2;
  for_lanes<T>(half, [&](std::int64_t i, int count) {
    const auto [ga, gb] = load_pair<G, T>(grad_out, half, i, count);
    const auto [c, s] = load_angles<T>(cos, sin, i, count);
    const Vector<T> a = fma(ga, c, gb * s), b = fma(gb, c, -(ga * s));
    visit(i, count, a);
    visit(half + i, count, b);
  });
  for_lanes<T>(shape.head_dim - rotary, [&](std::int64_t i, int count) {
    visit(rotary + i, count, Vector<T>(load_some(grad_out + rotary + i, count)));
  });
}

// The heads of one norm, or one head without a norm.
template <class T, class G, bool kNorm>
void heads_backward(const rows::HeadShape& shape, std::int64_t heads, const T* x, const T* norm_weight,
                    const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out, T* grad_in,
                    accumulator_t<T>* sums) {
  using A = accumulator_t<T>;
  const std::int64_t D = shape.head_dim;
  const Rule<T> rule(shape.norm);
  if constexpr (!kNorm) {
    rotate_back<T>(shape, cos, sin, grad_out,
                   [&](std::int64_t i, int count, Vector<T> g) { store_some(grad_in + i, g, count); });
  } else {
    const A rstd = root_mean_inverse(heads * D, x, static_cast<A>(shape.eps));
    Vector<T> dots{};
    for (std::int64_t h = 0; h < heads; ++h)
      rotate_back<T>(shape, cos, sin, grad_out + h * D, [&](std::int64_t i, int count, Vector<T> g) {
        const Vector<T> u = g * rule.factor(norm_weight, h * D + i, count);
        dots = fma(u, load_some(x + h * D + i, count) * rstd, dots);
      });
    const A mean = sum(dots) / static_cast<A>(heads * D);
    for (std::int64_t h = 0; h < heads; ++h)
      rotate_back<T>(shape, cos, sin, grad_out + h * D, [&](std::int64_t i, int count, Vector<T> g) {
        const std::int64_t at = h * D + i;
        const Vector<T> n = load_some(x + at, count) * rstd;
        store_some(sums + at, fma(g, rule.taken(n), load_some(sums + at, count)), count);
        store_some(grad_in + at, rstd * fma(g, rule.factor(norm_weight, at, count), -(n * mean)), count);
      });
  }
}

template <class T, class G>
void add_norm_rotate_backward(RowRange rows, const rows::HeadShape& shape, const T* in, std::int64_t in_stride,
                              const T* norm_weight, const accumulator_t<T>* cos, const accumulator_t<T>* sin,
                              const G* grad_out, std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                              accumulator_t<T>* sums) {
  const std::int64_t D = shape.head_dim, half = shape.rotating() / 2, span = shape.wide_norm ? shape.heads : 1;
  const rows::HeadShape turning = behind_first(shape);
  G apart[kLargestHead];
  T turned[kLargestHead];
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const accumulator_t<T>* const row_cos = cos + shape.position[r] * half;
    const accumulator_t<T>* const row_sin = sin + shape.position[r] * half;
    for (std::int64_t h = 0; h < shape.heads; h += span) {
      const T* const x = norm_weight == nullptr ? nullptr : in + r * in_stride + h * D;
      const G* const g = grad_out + r * grad_out_stride + h * D + shape.first;
      T* const gx = grad_in + r * grad_in_stride + h * D + shape.first;
      if (shape.first > 0) copy_first(shape.first, g - shape.first, gx - shape.first);
      if (norm_weight != nullptr) {
        heads_backward<T, G, true>(shape, span, x, norm_weight, row_cos, row_sin, g, gx, sums);
      } else if (!shape.interleaved) {
        heads_backward<T, G, false>(turning, 1, x, norm_weight, row_cos, row_sin, g, gx, sums);
      } else {
        take_apart(turning.head_dim, 2 * half, g, apart);
        heads_backward<T, G, false>(turning, 1, x, norm_weight, row_cos, row_sin, apart, turned, sums);
        put_together(turning.head_dim, 2 * half, turned, gx);
      }
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
