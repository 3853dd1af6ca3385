// QK-norm and rotation: a group of neighbouring lanes has a head of a row, each lane packs of both halves.
#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/norm.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostParts = 528;

template <class T, int kPack>
struct Halves {
  Pack<T, kPack> a, b;
};
template <int kPack, class T>
__device__ __forceinline__ Halves<T, kPack> load_halves(const T* head, std::int64_t half, std::int64_t i) {
  return {load_pack<kPack>(head + i), load_pack<kPack>(head + half + i)};
}

// 1/sqrt(mean + eps) of the squares of a head, called by the lanes of its group.
template <int kPack, int kLanes, class T>
__device__ accumulator_t<T> inverse_root_mean(const T* head, std::int64_t half, int lane, bool inside, double eps) {
  using A = accumulator_t<T>;
  A squares = 0;
  for (std::int64_t i = lane * kPack; inside && i < half; i += kLanes * kPack) {
    const Halves<T, kPack> x = load_halves<kPack>(head, half, i);
#pragma unroll
    for (int c = 0; c < kPack; ++c)
      squares += widened(x.a.x[c]) * widened(x.a.x[c]) + widened(x.b.x[c]) * widened(x.b.x[c]);
  }
  return A(1) / std::sqrt(warp_sum<kLanes>(squares) / static_cast<A>(2 * half) + static_cast<A>(eps));
}

template <class T, int kPack, int kLanes>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(Heads shape, const T* in, std::int64_t in_stride, const T* weight, const accumulator_t<T>* cos,
                  const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  using A = accumulator_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t item = grid_thread() / kLanes, half = shape.head_dim / 2;
  const bool inside = item < shape.rows * shape.heads;
  const std::int64_t row = inside ? item / shape.heads : 0, head = inside ? item % shape.heads : 0;
  const T* const x = in + row * in_stride + head * shape.head_dim;
  T* const y = out + row * out_stride + head * shape.head_dim;
  A rstd = 1;
  if (weight != nullptr) rstd = inverse_root_mean<kPack, kLanes>(x, half, lane, inside, shape.eps);
  if (!inside) return;
  const std::int64_t angle = shape.position[row] * half;
  for (std::int64_t i = lane * kPack; i < half; i += kLanes * kPack) {
    Halves<T, kPack> v = load_halves<kPack>(x, half, i);
    const Pack<A, kPack> c = load_pack<kPack>(cos + angle + i), s = load_pack<kPack>(sin + angle + i);
    Halves<T, kPack> w = v;
    if (weight != nullptr) w = load_halves<kPack>(weight, half, i);
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      A a = widened(v.a.x[n]), b = widened(v.b.x[n]);
      if (weight != nullptr) {
        a = rounded<T>(rounded<T>(a * rstd) * widened(w.a.x[n]));
        b = rounded<T>(rounded<T>(b * rstd) * widened(w.b.x[n]));
      }
      const A cosine = rounded<T>(c.x[n]), sine = rounded<T>(s.x[n]);
      v.a.x[n] = narrowed<T>(rounded<T>(a * cosine) - rounded<T>(b * sine));
      v.b.x[n] = narrowed<T>(rounded<T>(b * cosine) + rounded<T>(a * sine));
    }
    store_pack(y + i, v.a);
    store_pack(y + half + i, v.b);
  }
}

// The transpose of the rotation, then of the norm. Group g of block b has the heads (row by row) g of b, of b + blocks,
// ...; its sums for the weight's gradient stand in shared memory, and part[b] gets the sums of the block's groups in
// order.
template <class T, class G, int kPack, int kLanes>
__global__ void __launch_bounds__(kThreads)
    rotate_backward_kernel(Heads shape, const T* in, std::int64_t in_stride, const T* weight,
                           const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                           std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                           accumulator_t<T>* part) {
  using A = accumulator_t<T>;
  constexpr int kGroups = kThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t D = shape.head_dim, half = D / 2, items = shape.rows * shape.heads;
  A* const sums = weight != nullptr ? dynamic_shared<A>() + group * D : nullptr;
  for (std::int64_t i = lane; weight != nullptr && i < D; i += kLanes) sums[i] = 0;
  __syncwarp();  // lanes add to others' zeros
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kGroups; first < items;
       first += static_cast<std::int64_t>(gridDim.x) * kGroups) {
    const bool inside = first + group < items;
    const std::int64_t item = inside ? first + group : 0, row = item / shape.heads, head = item % shape.heads;
    const T* const x = in + row * in_stride + head * D;
    const G* const grad = grad_out + row * grad_out_stride + head * D;
    T* const to = grad_in + row * grad_in_stride + head * D;
    const std::int64_t angle = shape.position[row] * half;
    const auto rotated_back = [&](std::int64_t i, A(&ga)[kPack], A(&gb)[kPack]) {
      const Halves<G, kPack> g = load_halves<kPack>(grad, half, i);
      const Pack<A, kPack> c = load_pack<kPack>(cos + angle + i), s = load_pack<kPack>(sin + angle + i);
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        const A a = widened(g.a.x[n]), b = widened(g.b.x[n]);
        const A cosine = rounded<T>(c.x[n]), sine = rounded<T>(s.x[n]);
        ga[n] = a * cosine + b * sine;
        gb[n] = b * cosine - a * sine;
      }
    };
    A rstd = 1, mean = 0;
    if (weight != nullptr) {
      rstd = inverse_root_mean<kPack, kLanes>(x, half, lane, inside, shape.eps);
      A dot = 0;
      for (std::int64_t i = lane * kPack; inside && i < half; i += kLanes * kPack) {
        A ga[kPack], gb[kPack];
        rotated_back(i, ga, gb);
        const Halves<T, kPack> v = load_halves<kPack>(x, half, i), w = load_halves<kPack>(weight, half, i);
#pragma unroll
        for (int n = 0; n < kPack; ++n)
          dot += ga[n] * widened(w.a.x[n]) * (widened(v.a.x[n]) * rstd) +
                 gb[n] * widened(w.b.x[n]) * (widened(v.b.x[n]) * rstd);
      }
      mean = warp_sum<kLanes>(dot) / static_cast<A>(D);
    }
    for (std::int64_t i = lane * kPack; inside && i < half; i += kLanes * kPack) {
      A ga[kPack], gb[kPack];
      rotated_back(i, ga, gb);
      Halves<T, kPack> out;
      if (weight == nullptr) {
#pragma unroll
        for (int n = 0; n < kPack; ++n) out.a.x[n] = narrowed<T>(ga[n]), out.b.x[n] = narrowed<T>(gb[n]);
      } else {
        const Halves<T, kPack> v = load_halves<kPack>(x, half, i), w = load_halves<kPack>(weight, half, i);
#pragma unroll
        for (int n = 0; n < kPack; ++n) {
          const A na = widened(v.a.x[n]) * rstd, nb = widened(v.b.x[n]) * rstd;
          sums[i + n] += ga[n] * rounded<T>(na);
          sums[half + i + n] += gb[n] * rounded<T>(nb);
          out.a.x[n] = narrowed<T>(rstd * (ga[n] * widened(w.a.x[n]) - na * mean));
          out.b.x[n] = narrowed<T>(rstd * (gb[n] * widened(w.b.x[n]) - nb * mean));
        }
      }
      store_pack(to + i, out.a);
      store_pack(to + half + i, out.b);
    }
  }
  if (weight == nullptr) return;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < D; i += kThreads) {
    A sum = 0;
    for (int g = 0; g < kGroups; ++g) sum += dynamic_shared<A>()[g * D + i];
    part[blockIdx.x * D + i] = sum;
  }
}

// Calls body with the pack and the lanes that a head takes: as few as have a pack of each half, so that none idles.
template <class T, class Body>
void with_lanes(bool possible, std::int64_t half, Body&& body) {
  constexpr int kWhole = kPackOf<T>;
  const std::int64_t packs = half / kWhole;
  if (!possible || half % kWhole != 0)
    body.template operator()<1, 32>();
  else if (packs <= 8)
    body.template operator()<kWhole, 8>();
  else if (packs <= 16)
    body.template operator()<kWhole, 16>();
  else
    body.template operator()<kWhole, 32>();
}

}  // namespace

template <class T>
void rotate(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight, const accumulator_t<T>* cos,
            const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  const bool possible = aligned_16(in, weight, cos, sin, out) && (in_stride | out_stride) % kPackOf<T> == 0;
  with_lanes<T>(possible, shape.head_dim / 2, [&]<int kPack, int kLanes>() {
    launch(rotate_kernel<T, kPack, kLanes>, {ceil_div(shape.rows * shape.heads * kLanes, kThreads)}, kThreads, 0, shape,
           in, in_stride, weight, cos, sin, out, out_stride);
  });
}

template <class T, class G>
void add_rotate_backward(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight,
                         const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                         std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                         accumulator_t<T>* grad_weight) {
  using A = accumulator_t<T>;
  const bool possible = aligned_16(in, weight, cos, sin, grad_out, grad_in) &&
                        (in_stride | grad_out_stride | grad_in_stride) % kPackOf<T> == 0;
  with_lanes<T>(possible, shape.head_dim / 2, [&]<int kPack, int kLanes>() {
    constexpr int kGroups = kThreads / kLanes;
    const std::int64_t wanted = ceil_div(shape.rows * shape.heads, kGroups);
    if (wanted == 0) return;
    const std::int64_t parts = weight == nullptr || wanted < kMostParts ? wanted : kMostParts;
    const Scratch<A> part(weight == nullptr ? 1 : parts * shape.head_dim);
    const std::int64_t shared = weight == nullptr ? 0 : kGroups * shape.head_dim * static_cast<std::int64_t>(sizeof(A));
    launch(rotate_backward_kernel<T, G, kPack, kLanes>, {parts}, kThreads, shared, shape, in, in_stride, weight, cos,
           sin, grad_out, grad_out_stride, grad_in, grad_in_stride, part.get());
    if (grad_weight != nullptr) add_parts(parts, shape.head_dim, part.get(), grad_weight);
  });
}

#define ESPALIER_INSTANTIATE_BACKWARD(T, G)                                                                  \
  template void add_rotate_backward(const Heads&, const T*, std::int64_t, const T*, const accumulator_t<T>*, \
                                    const accumulator_t<T>*, const G*, std::int64_t, T*, std::int64_t,       \
                                    accumulator_t<T>*);
#define ESPALIER_INSTANTIATE(T)                                                                 \
  ESPALIER_INSTANTIATE_BACKWARD(T, T)                                                           \
  template void rotate(const Heads&, const T*, std::int64_t, const T*, const accumulator_t<T>*, \
                       const accumulator_t<T>*, T*, std::int64_t);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
ESPALIER_INSTANTIATE_BACKWARD(bfloat16, float)
#undef ESPALIER_INSTANTIATE
#undef ESPALIER_INSTANTIATE_BACKWARD

}  // namespace espalier::cuda
