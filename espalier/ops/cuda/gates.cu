// Gates of heads, and the gated norm behind a delta rule: a thread has an element, or a warp a row's part.
#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostParts = 256;

template <class A>
__device__ __forceinline__ A sigmoid(A x) {
  return A(1) / (std::exp(-x) + A(1));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_heads_kernel(std::int64_t count, std::int64_t head_dim, const T* x, const T* query_gate, T* y) {
  const std::int64_t at = grid_thread();
  if (at >= count) return;
  const std::int64_t gate = at / head_dim * 2 * head_dim + head_dim + at % head_dim;
  y[at] = narrowed<T>(widened(x[at]) * sigmoid(widened(query_gate[gate])));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_heads_backward_kernel(std::int64_t count, std::int64_t head_dim, const T* x, const T* query_gate,
                               const T* grad_y, T* grad_x, T* grad_query_gate) {
  using A = accumulator_t<T>;
  const std::int64_t at = grid_thread();
  if (at >= count) return;
  const std::int64_t gate = at / head_dim * 2 * head_dim + head_dim + at % head_dim;
  const A s = sigmoid(widened(query_gate[gate])), of_y = widened(grad_y[at]);
  grad_query_gate[gate] = narrowed<T>(of_y * widened(x[at]) * (s * (A(1) - s)));
  grad_x[at] = narrowed<T>(of_y * s);
}

// The numbers that are normalised, and the column of their z.
template <class T>
struct Part {
  std::int64_t row, part, at, z;
};
template <class T>
__device__ __forceinline__ Part<T> part_of(const GatedParts& p, std::int64_t unit) {
  const std::int64_t row = unit / p.parts, part = unit % p.parts;
  return {row, part, unit * p.width, row * p.projected + p.z + part / p.each * p.step + part % p.each * p.width};
}
// The factor of the norm's result: 1 with the gate first, else silu(z) or sigmoid(z); and its slope in z.
template <class A>
__device__ __forceinline__ A gate_behind(const GatedParts& p, A z) {
  return p.gate_first ? A(1) : (p.by_sigmoid ? A(1) : z) / (std::exp(-z) + A(1));
}
template <class A>
__device__ __forceinline__ A gate_slope(const GatedParts& p, A z) {
  const A s = sigmoid(z);
  return s * (p.by_sigmoid ? A(1) - s : A(1) + z * (A(1) - s));
}
// o, or with the gate first o silu(z).
template <class A>
__device__ __forceinline__ A before_norm(const GatedParts& p, A o, A z) {
  return p.gate_first ? o * (z / (std::exp(-z) + A(1))) : o;
}
template <class T>
__device__ accumulator_t<T> inverse_root_mean(const GatedParts& p, const T* o, const T* z, int lane) {
  using A = accumulator_t<T>;
  A squares = 0;
  for (std::int64_t i = lane; i < p.width; i += 32) {
    const A u = before_norm(p, widened(o[i]), widened(z[i]));
    squares += u * u;
  }
  return A(1) / std::sqrt(warp_sum(squares) / static_cast<A>(p.width) + static_cast<A>(p.eps));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gated_norm_kernel(GatedParts p, const T* o, const T* projected, const T* weight, T* y) {
  using A = accumulator_t<T>;
  const std::int64_t unit = grid_thread() / 32;
  if (unit >= p.rows * p.parts) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Part<T> part = part_of<T>(p, unit);
  const T *const from = o + part.at, *const z = projected + part.z, *const w = weight + part.part * p.of_weight;
  const A inverse = inverse_root_mean(p, from, z, lane);
  for (std::int64_t i = lane; i < p.width; i += 32) {
    const A gate = widened(z[i]), normed = before_norm(p, widened(from[i]), gate) * inverse;
    y[part.at + i] = narrowed<T>(widened(w[i]) * normed * gate_behind(p, gate));
  }
}

// A warp has the units w, w + warps, ... of one part (y of the grid), and sums of its own for the weight's gradient,
// which it writes to part[w].
template <class T>
__global__ void __launch_bounds__(32)
    gated_norm_backward_kernel(GatedParts p, const T* o, const T* projected, const T* weight, const T* grad_y,
                               T* grad_o, T* grad_projected, accumulator_t<T>* part_sums) {
  using A = accumulator_t<T>;
  const int lane = static_cast<int>(threadIdx.x);
  A* const sums = dynamic_shared<A>();
  for (std::int64_t i = lane; i < p.width; i += 32) sums[i] = 0;
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Part<T> part = part_of<T>(p, row * p.parts + blockIdx.y);
    const T *const from = o + part.at, *const z = projected + part.z, *const w = weight + part.part * p.of_weight;
    const T* const grad = grad_y + part.at;
    const A inverse = inverse_root_mean(p, from, z, lane);
    A along = 0;
    for (std::int64_t i = lane; i < p.width; i += 32) {
      const A gate = widened(z[i]), normed = before_norm(p, widened(from[i]), gate) * inverse;
      along += widened(grad[i]) * widened(w[i]) * gate_behind(p, gate) * normed;
    }
    along = warp_sum(along) / static_cast<A>(p.width);
    for (std::int64_t i = lane; i < p.width; i += 32) {
      const A gate = widened(z[i]), x = widened(from[i]), of_y = widened(grad[i]), of_w = widened(w[i]);
      const A slope = gate_slope(p, gate), normed = before_norm(p, x, gate) * inverse;
      if (p.gate_first) {
        const A of_u = (of_y * of_w - normed * along) * inverse;
        sums[i] += of_y * normed;
        grad_projected[part.z + i] = narrowed<T>(of_u * x * slope);
        grad_o[part.at + i] = narrowed<T>(of_u * (gate * sigmoid(gate)));
      } else {
        const A behind = gate_behind(p, gate);
        sums[i] += of_y * normed * behind;
        grad_projected[part.z + i] = narrowed<T>(of_y * of_w * normed * slope);
        grad_o[part.at + i] = narrowed<T>((of_y * of_w * behind - normed * along) * inverse);
      }
    }
  }
  const std::int64_t to = (blockIdx.x * static_cast<std::int64_t>(gridDim.y) + blockIdx.y) * p.width;
  for (std::int64_t i = lane; i < p.width; i += 32) part_sums[to + i] = sums[i];
}

}  // namespace

template <class T>
void gate_heads(std::int64_t rows, std::int64_t width, std::int64_t head_dim, const T* x, const T* query_gate, T* y) {
  launch(gate_heads_kernel<T>, {ceil_div(rows * width, kThreads)}, kThreads, 0, rows * width, head_dim, x, query_gate,
         y);
}

template <class T>
void gate_heads_backward(std::int64_t rows, std::int64_t width, std::int64_t head_dim, const T* x, const T* query_gate,
                         const T* grad_y, T* grad_x, T* grad_query_gate) {
  launch(gate_heads_backward_kernel<T>, {ceil_div(rows * width, kThreads)}, kThreads, 0, rows * width, head_dim, x,
         query_gate, grad_y, grad_x, grad_query_gate);
}

template <class T>
void gated_norm(const GatedParts& parts, const T* o, const T* projected, const T* weight, T* y) {
  launch(gated_norm_kernel<T>, {ceil_div(parts.rows * parts.parts * 32, kThreads)}, kThreads, 0, parts, o, projected,
         weight, y);
}

template <class T>
void add_gated_norm_backward(const GatedParts& parts, const T* o, const T* projected, const T* weight, const T* grad_y,
                             T* grad_o, T* grad_projected, accumulator_t<T>* grad_weight) {
  using A = accumulator_t<T>;
  if (parts.rows == 0) return;
  const std::int64_t blocks = parts.rows < kMostParts ? parts.rows : kMostParts;
  const Scratch<A> sums(blocks * parts.parts * parts.width);
  launch(gated_norm_backward_kernel<T>, {blocks, parts.parts}, 32, parts.width * static_cast<std::int64_t>(sizeof(A)),
         parts, o, projected, weight, grad_y, grad_o, grad_projected, sums.get());
  if (grad_weight == nullptr) return;
  if (parts.gate_first)
    add_parts(blocks, parts.parts * parts.width, sums.get(), grad_weight);
  else
    add_parts(blocks * parts.parts, parts.width, sums.get(), grad_weight);
}

#define ESPALIER_INSTANTIATE(T)                                                                                      \
  template void gate_heads(std::int64_t, std::int64_t, std::int64_t, const T*, const T*, T*);                        \
  template void gate_heads_backward(std::int64_t, std::int64_t, std::int64_t, const T*, const T*, const T*, T*, T*); \
  template void gated_norm(const GatedParts&, const T*, const T*, const T*, T*);                                     \
  template void add_gated_norm_backward(const GatedParts&, const T*, const T*, const T*, const T*, T*, T*,           \
                                        accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
