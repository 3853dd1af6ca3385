// RMSNorm: a block has a row. Its second pass over the row comes out of the cache.
#include "espalier/ops/cuda/norm.h"

#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostParts = 528;  // blocks of the backward: four for each processor of an H100

template <class T, int kPack>
__device__ __forceinline__ void write_normalized(std::int64_t width, const T* x, const T* weight, accumulator_t<T> rstd,
                                                 T* y) {
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    const Pack<T, kPack> v = load_pack<kPack>(x + m), w = load_pack<kPack>(weight + m);
    Pack<T, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i) out.x[i] = narrowed<T>(rounded<T>(widened(v.x[i]) * rstd) * widened(w.x[i]));
    store_pack(y + m, out);
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) norm_kernel(std::int64_t width, const T* stream, const T* weight,
                                                        accumulator_t<T> eps, T* y, accumulator_t<T>* rstd) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const std::int64_t row = blockIdx.x;
  const T* const x = stream + row * width;
  A squares = 0;
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    const Pack<T, kPack> v = load_pack<kPack>(x + m);
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares += widened(v.x[i]) * widened(v.x[i]);
  }
  const A r = A(1) / std::sqrt(block_sum(squares, scratch) / static_cast<A>(width) + eps);
  if (threadIdx.x == 0) rstd[row] = r;
  write_normalized<T, kPack>(width, x, weight, r, y + row * width);
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    norm_again_kernel(std::int64_t width, const T* stream, const T* weight, const accumulator_t<T>* rstd, T* y) {
  const std::int64_t row = blockIdx.x;
  write_normalized<T, kPack>(width, stream + row * width, weight, rstd[row], y + row * width);
}

// Block b has the rows b, b + blocks, ... and writes what they add to the weight's gradient to part[b]. Its sums stand
// in shared memory, element i of all packs side by side, each read and written by one thread alone.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(std::int64_t rows, std::int64_t width, const T* stream, const T* weight,
                         const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* part) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  A* const sums = dynamic_shared<A>();
  const std::int64_t packs = width / kPack;
  for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x)
    for (int i = 0; i < kPack; ++i) sums[i * packs + p] = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *const x = stream + row * width, *const g = grad_y + row * width;
    T* const out = grad_stream + row * width;
    const A r = rstd[row];
    A dot = 0;
    for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
      const Pack<T, kPack> v = load_pack<kPack>(x + p * kPack), d = load_pack<kPack>(g + p * kPack),
                           w = load_pack<kPack>(weight + p * kPack);
#pragma unroll
      for (int i = 0; i < kPack; ++i) dot += widened(d.x[i]) * widened(w.x[i]) * (widened(v.x[i]) * r);
    }
    const A mean = block_sum(dot, scratch) / static_cast<A>(width);
    for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
      const Pack<T, kPack> v = load_pack<kPack>(x + p * kPack), d = load_pack<kPack>(g + p * kPack),
                           w = load_pack<kPack>(weight + p * kPack);
      Pack<T, kPack> to = load_pack<kPack>(out + p * kPack);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const A n = widened(v.x[i]) * r, grad = widened(d.x[i]);
        to.x[i] = narrowed<T>(widened(to.x[i]) + r * (grad * widened(w.x[i]) - n * mean));
        sums[i * packs + p] += grad * rounded<T>(n);
      }
      store_pack(out + p * kPack, to);
    }
  }
  for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x)
    for (int i = 0; i < kPack; ++i) part[blockIdx.x * width + p * kPack + i] = sums[i * packs + p];
}

}  // namespace

template <class T>
void norm(std::int64_t rows, std::int64_t width, const T* stream, const T* weight, double eps, T* y,
          accumulator_t<T>* rstd) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(stream, weight, y), [&]<int kPack>() {
    launch(norm_kernel<T, kPack>, {rows}, threads_for(width / kPack, kThreads), 0, width, stream, weight, eps, y, rstd);
  });
}

template <class T>
void norm_again(std::int64_t rows, std::int64_t width, const T* stream, const T* weight, const accumulator_t<T>* rstd,
                T* y) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(stream, weight, y), [&]<int kPack>() {
    launch(norm_again_kernel<T, kPack>, {rows}, threads_for(width / kPack, kThreads), 0, width, stream, weight, rstd,
           y);
  });
}

template <class T>
void add_norm_backward(std::int64_t rows, std::int64_t width, const T* stream, const T* weight,
                       const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* grad_weight) {
  using A = accumulator_t<T>;
  if (rows == 0) return;
  const std::int64_t parts = rows < kMostParts ? rows : kMostParts;
  const Scratch<A> part(parts * width);
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(stream, weight, grad_y, grad_stream), [&]<int kPack>() {
    launch(norm_backward_kernel<T, kPack>, {parts}, threads_for(width / kPack, kThreads),
           width * static_cast<std::int64_t>(sizeof(A)), rows, width, stream, weight, rstd, grad_y, grad_stream,
           part.get());
  });
  if (grad_weight != nullptr) add_parts(parts, width, part.get(), grad_weight);
}

#define ESPALIER_INSTANTIATE(T)                                                                                      \
  template void norm(std::int64_t, std::int64_t, const T*, const T*, double, T*, accumulator_t<T>*);                 \
  template void norm_again(std::int64_t, std::int64_t, const T*, const T*, const accumulator_t<T>*, T*);             \
  template void add_norm_backward(std::int64_t, std::int64_t, const T*, const T*, const accumulator_t<T>*, const T*, \
                                  T*, accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
