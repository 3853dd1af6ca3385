// Keys and values of latent attention (ops/latent.h): a block has a row.
#include "espalier/ops/cuda/latent.h"

#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    expand_heads_kernel(LatentHeads s, LatentRows<const T> from, LatentRows<T> to) {
  const std::int64_t row = blockIdx.x, key = s.plain + s.shared, all = s.plain + s.value;
  const T *const kv = from.kv + row * from.kv_stride, *const shared = from.shared + row * from.shared_stride;
  T *const k = to.k + row * to.k_stride, *const v = to.v + row * to.v_stride;
  for (std::int64_t i = threadIdx.x; i < s.heads * key; i += blockDim.x) {
    const std::int64_t head = i / key, c = i % key;
    k[i] = c < s.plain ? kv[head * all + c] : shared[c - s.plain];
  }
  for (std::int64_t i = threadIdx.x; i < s.heads * s.value; i += blockDim.x)
    v[i] = kv[i / s.value * all + s.plain + i % s.value];
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    expand_heads_backward_kernel(LatentHeads s, LatentRows<const accumulator_t<T>> from, T* grad_kv,
                                 std::int64_t grad_kv_stride, accumulator_t<T>* grad_shared,
                                 std::int64_t grad_shared_stride) {
  using A = accumulator_t<T>;
  const std::int64_t row = blockIdx.x, key = s.plain + s.shared, all = s.plain + s.value;
  const A *const k = from.k + row * from.k_stride, *const v = from.v + row * from.v_stride;
  T* const kv = grad_kv + row * grad_kv_stride;
  for (std::int64_t i = threadIdx.x; i < s.heads * all; i += blockDim.x) {
    const std::int64_t head = i / all, c = i % all;
    kv[i] = narrowed<T>(c < s.plain ? k[head * key + c] : v[head * s.value + c - s.plain]);
  }
  for (std::int64_t c = threadIdx.x; c < s.shared; c += blockDim.x) {
    A sum = 0;
    for (std::int64_t head = 0; head < s.heads; ++head) sum += k[head * key + s.plain + c];
    grad_shared[row * grad_shared_stride + c] = sum;
  }
}

}  // namespace

template <class T>
void expand_heads(std::int64_t rows, const LatentHeads& heads, const LatentRows<const T>& from,
                  const LatentRows<T>& to) {
  launch(expand_heads_kernel<T>, {rows}, kThreads, 0, heads, from, to);
}

template <class T>
void expand_heads_backward(std::int64_t rows, const LatentHeads& heads, const LatentRows<const accumulator_t<T>>& from,
                           T* grad_kv, std::int64_t grad_kv_stride, accumulator_t<T>* grad_shared,
                           std::int64_t grad_shared_stride) {
  launch(expand_heads_backward_kernel<T>, {rows}, kThreads, 0, heads, from, grad_kv, grad_kv_stride, grad_shared,
         grad_shared_stride);
}

#define ESPALIER_INSTANTIATE(T)                                                                                        \
  template void expand_heads(std::int64_t, const LatentHeads&, const LatentRows<const T>&, const LatentRows<T>&);      \
  template void expand_heads_backward(std::int64_t, const LatentHeads&, const LatentRows<const accumulator_t<T>>&, T*, \
                                      std::int64_t, accumulator_t<T>*, std::int64_t);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
