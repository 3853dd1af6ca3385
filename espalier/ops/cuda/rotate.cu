// QK-norm and rotation: a group of neighbouring lanes has a few heads of a row, each lane packs of both halves of each.
#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/norm.h"
#include "espalier/ops/cuda/ptx.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostParts = 528;
constexpr int kHeadsAtOnce = 4;

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

// Rounds numbers to T, bfloat16 two at a time: else rounding would take longer than memory does.
template <class T, int kCount>
__device__ __forceinline__ void round_all(accumulator_t<T> (&x)[kCount]) {
  if constexpr (std::is_same_v<T, bfloat16> && kCount % 2 == 0) {
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      const unsigned both = packed(x[n], x[n + 1]);
      x[n] = unpacked(both, false), x[n + 1] = unpacked(both, true);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = rounded<T>(x[n]);
  }
}

// A group's part of a row: up to kHeadsAtOnce heads behind each other, which share cosines and sines. The division has
// 32 bits, which hold any number of units whose heads fit into a GPU's memory; one of 64 bits takes longer than all
// else that a lane does.
struct Unit {
  std::int64_t row;
  int first, heads;  // none behind the last unit

  __device__ __forceinline__ Unit(const Heads& shape, std::int64_t number, std::int64_t units) {
    const bool inside = number < units;
    const auto of_row = static_cast<std::uint32_t>((shape.heads + kHeadsAtOnce - 1) / kHeadsAtOnce);
    const std::uint32_t unit = inside ? static_cast<std::uint32_t>(number) : 0;
    row = unit / of_row;
    first = static_cast<int>(unit % of_row) * kHeadsAtOnce;
    const int left = static_cast<int>(shape.heads) - first;
    heads = !inside ? 0 : left < kHeadsAtOnce ? left : kHeadsAtOnce;
  }
};

std::int64_t units_of(const Heads& shape) { return shape.rows * ceil_div(shape.heads, kHeadsAtOnce); }

template <class T, int kPack, int kLanes>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(Heads shape, std::int64_t units, const T* in, std::int64_t in_stride, const T* weight,
                  const accumulator_t<T>* cos, const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  using A = accumulator_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t D = shape.head_dim, half = D / 2;
  const Unit unit(shape, grid_thread() / kLanes, units);
  const T* const x = in + unit.row * in_stride + unit.first * D;
  T* const y = out + unit.row * out_stride + unit.first * D;
  A rstd[kHeadsAtOnce];
#pragma unroll
  for (int h = 0; h < kHeadsAtOnce; ++h)
    rstd[h] =
        weight != nullptr ? inverse_root_mean<kPack, kLanes>(x + h * D, half, lane, h < unit.heads, shape.eps) : A(1);
  if (unit.heads == 0) return;
  const std::int64_t angle = shape.position[unit.row] * half;
  for (std::int64_t i = lane * kPack; i < half; i += kLanes * kPack) {
    Halves<T, kPack> v[kHeadsAtOnce], w;
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h)
      if (h < unit.heads) v[h] = load_halves<kPack>(x + h * D, half, i);
    if (weight != nullptr) w = load_halves<kPack>(weight, half, i);
    Pack<A, kPack> c = load_pack<kPack>(cos + angle + i), s = load_pack<kPack>(sin + angle + i);
    round_all<T>(c.x), round_all<T>(s.x);
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (h >= unit.heads) break;
      A a[kPack], b[kPack];
#pragma unroll
      for (int n = 0; n < kPack; ++n) a[n] = widened(v[h].a.x[n]), b[n] = widened(v[h].b.x[n]);
      if (weight != nullptr) {
#pragma unroll
        for (int n = 0; n < kPack; ++n) a[n] *= rstd[h], b[n] *= rstd[h];
        round_all<T>(a), round_all<T>(b);
#pragma unroll
        for (int n = 0; n < kPack; ++n) a[n] *= widened(w.a.x[n]), b[n] *= widened(w.b.x[n]);
        round_all<T>(a), round_all<T>(b);
      }
      A ac[kPack], as[kPack], bc[kPack], bs[kPack];
#pragma unroll
      for (int n = 0; n < kPack; ++n)
        ac[n] = a[n] * c.x[n], as[n] = a[n] * s.x[n], bc[n] = b[n] * c.x[n], bs[n] = b[n] * s.x[n];
      round_all<T>(ac), round_all<T>(as), round_all<T>(bc), round_all<T>(bs);
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        v[h].a.x[n] = narrowed<T>(ac[n] - bs[n]);
        v[h].b.x[n] = narrowed<T>(bc[n] + as[n]);
      }
      store_pack(y + h * D + i, v[h].a);
      store_pack(y + h * D + half + i, v[h].b);
    }
  }
}

// The transpose of the rotation, then of the norm. Group g of block b has the units g of b, of b + blocks, ...; its
// sums for the weight's gradient stand in shared memory, and part[b] gets the sums of the block's groups in order.
template <class T, class G, int kPack, int kLanes>
__global__ void __launch_bounds__(kThreads)
    rotate_backward_kernel(Heads shape, std::int64_t units, const T* in, std::int64_t in_stride, const T* weight,
                           const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                           std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                           accumulator_t<T>* part) {
  using A = accumulator_t<T>;
  constexpr int kGroups = kThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t D = shape.head_dim, half = D / 2, first_pack = lane * kPack;
  A* const sums = weight != nullptr ? dynamic_shared<A>() + group * D : nullptr;
  for (std::int64_t i = lane; weight != nullptr && i < D; i += kLanes) sums[i] = 0;
  __syncwarp();  // lanes add to others' zeros
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kGroups; first < units;
       first += static_cast<std::int64_t>(gridDim.x) * kGroups) {
    const Unit unit(shape, first + group, units);
    const std::int64_t angle = shape.position[unit.row] * half;
    Pack<A, kPack> first_cos, first_sin;
    if (first_pack < half) {
      first_cos = load_pack<kPack>(cos + angle + first_pack), first_sin = load_pack<kPack>(sin + angle + first_pack);
      round_all<T>(first_cos.x), round_all<T>(first_sin.x);
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      const bool inside = h < unit.heads;
      const std::int64_t head = inside ? unit.first + h : 0;
      const T* const x = in + unit.row * in_stride + head * D;
      const G* const grad = grad_out + unit.row * grad_out_stride + head * D;
      T* const to = grad_in + unit.row * grad_in_stride + head * D;
      const auto rotated_back = [&](std::int64_t i, A(&ga)[kPack], A(&gb)[kPack]) {
        const Halves<G, kPack> g = load_halves<kPack>(grad, half, i);
        Pack<A, kPack> c = first_cos, s = first_sin;
        if (i != first_pack) {
          c = load_pack<kPack>(cos + angle + i), s = load_pack<kPack>(sin + angle + i);
          round_all<T>(c.x), round_all<T>(s.x);
        }
#pragma unroll
        for (int n = 0; n < kPack; ++n) {
          const A a = widened(g.a.x[n]), b = widened(g.b.x[n]);
          ga[n] = a * c.x[n] + b * s.x[n];
          gb[n] = b * c.x[n] - a * s.x[n];
        }
      };
      A rstd = 1, mean = 0;
      if (weight != nullptr) {
        rstd = inverse_root_mean<kPack, kLanes>(x, half, lane, inside, shape.eps);
        A dot = 0;
        for (std::int64_t i = first_pack; inside && i < half; i += kLanes * kPack) {
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
      for (std::int64_t i = first_pack; inside && i < half; i += kLanes * kPack) {
        A ga[kPack], gb[kPack];
        rotated_back(i, ga, gb);
        Halves<T, kPack> out;
        if (weight == nullptr) {
#pragma unroll
          for (int n = 0; n < kPack; ++n) out.a.x[n] = narrowed<T>(ga[n]), out.b.x[n] = narrowed<T>(gb[n]);
        } else {
          const Halves<T, kPack> v = load_halves<kPack>(x, half, i), w = load_halves<kPack>(weight, half, i);
          A na[kPack], nb[kPack];
#pragma unroll
          for (int n = 0; n < kPack; ++n) {
            na[n] = widened(v.a.x[n]) * rstd, nb[n] = widened(v.b.x[n]) * rstd;
            out.a.x[n] = narrowed<T>(rstd * (ga[n] * widened(w.a.x[n]) - na[n] * mean));
            out.b.x[n] = narrowed<T>(rstd * (gb[n] * widened(w.b.x[n]) - nb[n] * mean));
          }
          round_all<T>(na), round_all<T>(nb);
#pragma unroll
          for (int n = 0; n < kPack; ++n) {
            sums[i + n] += ga[n] * na[n];
            sums[half + i + n] += gb[n] * nb[n];
          }
        }
        store_pack(to + i, out.a);
        store_pack(to + half + i, out.b);
      }
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
    const std::int64_t units = units_of(shape);
    launch(rotate_kernel<T, kPack, kLanes>, {ceil_div(units * kLanes, kThreads)}, kThreads, 0, shape, units, in,
           in_stride, weight, cos, sin, out, out_stride);
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
    const std::int64_t units = units_of(shape), wanted = ceil_div(units, kGroups);
    if (wanted == 0) return;
    const std::int64_t parts = weight == nullptr || wanted < kMostParts ? wanted : kMostParts;
    const Scratch<A> part(weight == nullptr ? 1 : parts * shape.head_dim);
    const std::int64_t shared = weight == nullptr ? 0 : kGroups * shape.head_dim * static_cast<std::int64_t>(sizeof(A));
    launch(rotate_backward_kernel<T, G, kPack, kLanes>, {parts}, kThreads, shared, shape, units, in, in_stride, weight,
           cos, sin, grad_out, grad_out_stride, grad_in, grad_in_stride, part.get());
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
