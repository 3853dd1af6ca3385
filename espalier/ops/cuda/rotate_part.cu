// QK-norm and rotation of every kind that ops/rotation.h has: of a part of a head, of even and odd channels, behind
// norms of other kinds or over all heads of a row. A warp has the heads of one norm, or one head where there is none.
#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/norm.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostParts = 528;

// Channels of `heads` heads, in items of a pair or of a channel that stays: lane l has the items l, l + 32, ...
struct Channels {
  std::int64_t head_dim, rotary, first, heads;
  bool interleaved;

  __device__ __forceinline__ Channels(const Heads& shape)
      : head_dim(shape.head_dim),
        rotary(shape.rotary),
        first(shape.first),
        heads(shape.wide_norm ? shape.heads : 1),
        interleaved(shape.interleaved) {}
  __device__ __forceinline__ std::int64_t items() const { return heads * (head_dim - rotary / 2); }
  // Calls turn(channel, its partner, angle) or stay(channel); channels are counted from the first head's.
  template <class Turn, class Stay>
  __device__ __forceinline__ void visit(std::int64_t item, Turn&& turn, Stay&& stay) const {
    const std::int64_t half = rotary / 2, each = head_dim - half, head = item / each * head_dim, i = item % each;
    if (i < half)
      interleaved ? turn(head + first + 2 * i, head + first + 2 * i + 1, i)
                  : turn(head + first + i, head + first + half + i, i);
    else
      stay(head + (i - half < first ? i - half : i + half));
  }
};

template <class T>
struct HeadNorm {
  using A = accumulator_t<T>;
  const T* weight;  // of these heads
  NormKind kind;

  __device__ __forceinline__ A factor(std::int64_t c) const {
    return kind == NormKind::rms_plus_one ? widened(weight[c]) + A(1) : widened(weight[c]);
  }
  __device__ __forceinline__ A taken(A n) const { return kind == NormKind::rms ? rounded<T>(n) : n; }
};

// 1/sqrt(mean + eps) of a warp's channels; each lane reads those that it has.
template <class T>
__device__ accumulator_t<T> inverse_root_mean(const Channels& channels, const T* x, int lane, double eps) {
  using A = accumulator_t<T>;
  A squares = 0;
  const auto add = [&](std::int64_t c) { squares += widened(x[c]) * widened(x[c]); };
  for (std::int64_t item = lane; item < channels.items(); item += 32)
    channels.visit(
        item, [&](std::int64_t a, std::int64_t b, std::int64_t) { add(a), add(b); }, add);
  return A(1) / std::sqrt(warp_sum(squares) / static_cast<A>(channels.heads * channels.head_dim) + static_cast<A>(eps));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    rotate_part_kernel(Heads shape, const T* in, std::int64_t in_stride, const T* weight, const accumulator_t<T>* cos,
                       const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  using A = accumulator_t<T>;
  const Channels channels(shape);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t unit = grid_thread() / 32, of_row = shape.heads / channels.heads;
  if (unit >= shape.rows * of_row) return;
  const std::int64_t row = unit / of_row, begin = unit % of_row * shape.head_dim;
  const T* const x = in + row * in_stride + begin;
  T* const y = out + row * out_stride + begin;
  const HeadNorm<T> norm{weight, shape.norm};
  const A rstd = weight != nullptr ? inverse_root_mean(channels, x, lane, shape.eps) : A(1);
  const auto normed = [&](std::int64_t c) {
    return weight != nullptr ? rounded<T>(norm.taken(widened(x[c]) * rstd) * norm.factor(c)) : widened(x[c]);
  };
  const std::int64_t angle = shape.position[row] * (shape.rotary / 2);
  for (std::int64_t item = lane; item < channels.items(); item += 32)
    channels.visit(
        item,
        [&](std::int64_t a, std::int64_t b, std::int64_t i) {
          const A va = normed(a), vb = normed(b), c = rounded<T>(cos[angle + i]), s = rounded<T>(sin[angle + i]);
          y[a] = narrowed<T>(rounded<T>(va * c) - rounded<T>(vb * s));
          y[b] = narrowed<T>(rounded<T>(vb * c) + rounded<T>(va * s));
        },
        [&](std::int64_t c) { y[c] = narrowed<T>(normed(c)); });
}

// The transpose of the rotation, then of the norm. A warp has sums of its own for the weight's gradient, in shared
// memory; part[b] gets the sums of the block's warps in order.
template <class T, class G>
__global__ void __launch_bounds__(kThreads)
    rotate_part_backward_kernel(Heads shape, const T* in, std::int64_t in_stride, const T* weight,
                                const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                                std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                                accumulator_t<T>* part) {
  using A = accumulator_t<T>;
  const Channels channels(shape);
  const std::int64_t width = channels.heads * shape.head_dim, of_row = shape.heads / channels.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            warps = static_cast<int>(blockDim.x) / 32;
  A* const sums = dynamic_shared<A>() + warp * width;
  for (std::int64_t c = lane; weight != nullptr && c < width; c += 32) sums[c] = 0;
  __syncwarp();  // lanes add to others' zeros
  const HeadNorm<T> norm{weight, shape.norm};
  for (std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * warps + warp; unit < shape.rows * of_row;
       unit += static_cast<std::int64_t>(gridDim.x) * warps) {
    const std::int64_t row = unit / of_row, begin = unit % of_row * shape.head_dim;
    const T* const x = in + row * in_stride + begin;
    const G* const grad = grad_out + row * grad_out_stride + begin;
    T* const to = grad_in + row * grad_in_stride + begin;
    const std::int64_t angle = shape.position[row] * (shape.rotary / 2);
    // Calls body(channel, gradient before the rotation).
    const auto for_each = [&](auto body) {
      for (std::int64_t item = lane; item < channels.items(); item += 32)
        channels.visit(
            item,
            [&](std::int64_t a, std::int64_t b, std::int64_t i) {
              const A ga = widened(grad[a]), gb = widened(grad[b]);
              const A c = rounded<T>(cos[angle + i]), s = rounded<T>(sin[angle + i]);
              body(a, ga * c + gb * s);
              body(b, gb * c - ga * s);
            },
            [&](std::int64_t c) { body(c, widened(grad[c])); });
    };
    if (weight == nullptr) {
      for_each([&](std::int64_t c, A g) { to[c] = narrowed<T>(g); });
      continue;
    }
    const A rstd = inverse_root_mean(channels, x, lane, shape.eps);
    A dot = 0;
    for_each([&](std::int64_t c, A g) { dot += g * norm.factor(c) * (widened(x[c]) * rstd); });
    const A mean = warp_sum(dot) / static_cast<A>(width);
    for_each([&](std::int64_t c, A g) {
      const A n = widened(x[c]) * rstd;
      sums[c] += g * norm.taken(n);
      to[c] = narrowed<T>(rstd * (g * norm.factor(c) - n * mean));
    });
  }
  if (weight == nullptr) return;
  __syncthreads();
  for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x) {
    A sum = 0;
    for (int w = 0; w < warps; ++w) sum += dynamic_shared<A>()[w * width + c];
    part[blockIdx.x * width + c] = sum;
  }
}

}  // namespace

template <class T>
void rotate_part(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight, const accumulator_t<T>* cos,
                 const accumulator_t<T>* sin, T* out, std::int64_t out_stride) {
  const std::int64_t units = shape.rows * (shape.wide_norm ? 1 : shape.heads);
  launch(rotate_part_kernel<T>, {ceil_div(units * 32, kThreads)}, kThreads, 0, shape, in, in_stride, weight, cos, sin,
         out, out_stride);
}

template <class T, class G>
void add_rotate_part_backward(const Heads& shape, const T* in, std::int64_t in_stride, const T* weight,
                              const accumulator_t<T>* cos, const accumulator_t<T>* sin, const G* grad_out,
                              std::int64_t grad_out_stride, T* grad_in, std::int64_t grad_in_stride,
                              accumulator_t<T>* grad_weight) {
  using A = accumulator_t<T>;
  // Sums over all heads of a row take the shared memory of one warp.
  const int threads = shape.wide_norm ? 32 : kThreads;
  const std::int64_t width = shape.wide_norm ? shape.heads * shape.head_dim : shape.head_dim, warps = threads / 32;
  const std::int64_t wanted = ceil_div(shape.rows * (shape.wide_norm ? 1 : shape.heads), warps);
  if (wanted == 0) return;
  const std::int64_t parts = weight == nullptr || wanted < kMostParts ? wanted : kMostParts;
  const Scratch<A> part(weight == nullptr ? 1 : parts * width);
  const std::int64_t shared = weight == nullptr ? 0 : warps * width * static_cast<std::int64_t>(sizeof(A));
  launch(rotate_part_backward_kernel<T, G>, {parts}, threads, shared, shape, in, in_stride, weight, cos, sin, grad_out,
         grad_out_stride, grad_in, grad_in_stride, part.get());
  if (grad_weight != nullptr) add_parts(parts, width, part.get(), grad_weight);
}

#define ESPALIER_INSTANTIATE_BACKWARD(T, G)                                                                       \
  template void add_rotate_part_backward(const Heads&, const T*, std::int64_t, const T*, const accumulator_t<T>*, \
                                         const accumulator_t<T>*, const G*, std::int64_t, T*, std::int64_t,       \
                                         accumulator_t<T>*);
#define ESPALIER_INSTANTIATE(T)                                                                      \
  ESPALIER_INSTANTIATE_BACKWARD(T, T)                                                                \
  template void rotate_part(const Heads&, const T*, std::int64_t, const T*, const accumulator_t<T>*, \
                            const accumulator_t<T>*, T*, std::int64_t);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
ESPALIER_INSTANTIATE_BACKWARD(bfloat16, float)
#undef ESPALIER_INSTANTIATE
#undef ESPALIER_INSTANTIATE_BACKWARD

}  // namespace espalier::cuda
