// Norms: a block has a row. Its later passes over the row come out of the cache. RMSNorm as in Llama has kernels of its
// own (kLlama); what the others do differently (block_kinds.h) is decided as they run.
#include "espalier/ops/cuda/norm.h"

#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostParts = 528;  // blocks of the backward: four for each processor of an H100

// n = (x - mean) rstd, as its product with the weight takes it, and that product's other factor.
template <class T, bool kLlama>
struct Rule {
  using A = accumulator_t<T>;
  NormKind kind;

  __device__ __forceinline__ bool centred() const { return !kLlama && kind == NormKind::layer; }
  __device__ __forceinline__ A factor(T weight) const {
    return !kLlama && kind == NormKind::rms_plus_one ? widened(weight) + A(1) : widened(weight);
  }
  __device__ __forceinline__ A taken(A n) const { return kLlama || kind == NormKind::rms ? rounded<T>(n) : n; }
};

// The mean over the threads of a block, all of which call it.
template <class T, int kPack>
__device__ __forceinline__ accumulator_t<T> mean_of(std::int64_t width, const T* x, accumulator_t<T> (&scratch)[32]) {
  using A = accumulator_t<T>;
  A sum = 0;
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    const Pack<T, kPack> v = load_pack<kPack>(x + m);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += widened(v.x[i]);
  }
  return block_sum(sum, scratch) / static_cast<A>(width);
}

template <class T, int kPack, bool kLlama>
__device__ __forceinline__ void write_normalized(Rule<T, kLlama> rule, std::int64_t width, const T* x, const T* weight,
                                                 const T* bias, accumulator_t<T> mean, accumulator_t<T> rstd, T* y) {
  using A = accumulator_t<T>;
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    const Pack<T, kPack> v = load_pack<kPack>(x + m), w = load_pack<kPack>(weight + m);
    Pack<T, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const A centre = kLlama ? widened(v.x[i]) : widened(v.x[i]) - mean;
      const A scaled = rule.taken(centre * rstd) * rule.factor(w.x[i]);
      out.x[i] = narrowed<T>(!kLlama && bias != nullptr ? scaled + widened(bias[m + i]) : scaled);
    }
    store_pack(y + m, out);
  }
}

template <class T, int kPack, bool kLlama>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(NormKind kind, std::int64_t width, const T* stream, const T* weight, const T* bias,
                accumulator_t<T> eps, T* y, accumulator_t<T>* rstd) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const Rule<T, kLlama> rule{kind};
  const std::int64_t row = blockIdx.x;
  const T* const x = stream + row * width;
  A mean = 0, squares = 0;
  if (rule.centred()) mean = mean_of<T, kPack>(width, x, scratch);
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    const Pack<T, kPack> v = load_pack<kPack>(x + m);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const A centre = kLlama ? widened(v.x[i]) : widened(v.x[i]) - mean;
      squares += centre * centre;
    }
  }
  const A r = A(1) / std::sqrt(block_sum(squares, scratch) / static_cast<A>(width) + eps);
  if (threadIdx.x == 0) rstd[row] = r;
  write_normalized<T, kPack>(rule, width, x, weight, bias, mean, r, y + row * width);
}

template <class T, int kPack, bool kLlama>
__global__ void __launch_bounds__(kThreads)
    norm_again_kernel(NormKind kind, std::int64_t width, const T* stream, const T* weight, const T* bias,
                      const accumulator_t<T>* rstd, T* y) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const Rule<T, kLlama> rule{kind};
  const std::int64_t row = blockIdx.x;
  const T* const x = stream + row * width;
  const A mean = rule.centred() ? mean_of<T, kPack>(width, x, scratch) : A(0);
  write_normalized<T, kPack>(rule, width, x, weight, bias, mean, rstd[row], y + row * width);
}

// Block b has the rows b, b + blocks, ... and writes what they add to the weight's gradient to part[b]. Its sums stand
// in shared memory, element i of all packs side by side, each read and written by one thread alone.
template <class T, int kPack, bool kLlama>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight,
                         const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* part) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const Rule<T, kLlama> rule{kind};
  A* const sums = dynamic_shared<A>();
  const std::int64_t packs = width / kPack;
  for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x)
    for (int i = 0; i < kPack; ++i) sums[i * packs + p] = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *const x = stream + row * width, *const g = grad_y + row * width;
    T* const out = grad_stream + row * width;
    const A r = rstd[row], middle = rule.centred() ? mean_of<T, kPack>(width, x, scratch) : A(0);
    A dot = 0, sum_u = 0;
    for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
      const Pack<T, kPack> v = load_pack<kPack>(x + p * kPack), d = load_pack<kPack>(g + p * kPack),
                           w = load_pack<kPack>(weight + p * kPack);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const A u = widened(d.x[i]) * rule.factor(w.x[i]);
        dot += u * ((kLlama ? widened(v.x[i]) : widened(v.x[i]) - middle) * r);
        if (!kLlama) sum_u += u;
      }
    }
    const A mean = block_sum(dot, scratch) / static_cast<A>(width);
    const A mean_u = rule.centred() ? block_sum(sum_u, scratch) / static_cast<A>(width) : A(0);
    for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
      const Pack<T, kPack> v = load_pack<kPack>(x + p * kPack), d = load_pack<kPack>(g + p * kPack),
                           w = load_pack<kPack>(weight + p * kPack);
      Pack<T, kPack> to = load_pack<kPack>(out + p * kPack);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const A n = (kLlama ? widened(v.x[i]) : widened(v.x[i]) - middle) * r, grad = widened(d.x[i]);
        const A u = kLlama ? grad * widened(w.x[i]) : grad * rule.factor(w.x[i]) - mean_u;
        to.x[i] = narrowed<T>(widened(to.x[i]) + r * (u - n * mean));
        sums[i * packs + p] += grad * rule.taken(n);
      }
      store_pack(out + p * kPack, to);
    }
  }
  for (std::int64_t p = threadIdx.x; p < packs; p += blockDim.x)
    for (int i = 0; i < kPack; ++i) part[blockIdx.x * width + p * kPack + i] = sums[i * packs + p];
}

// Calls body with 16 bytes of T as pack where that is possible, and whether the norm is Llama's.
template <class T, class Body>
void with_rule(bool possible, NormKind kind, Body&& body) {
  with_pack<T>(possible, [&]<int kPack>() {
    kind == NormKind::rms ? body.template operator()<kPack, true>() : body.template operator()<kPack, false>();
  });
}

}  // namespace

template <class T>
void norm(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight, const T* bias,
          double eps, T* y, accumulator_t<T>* rstd) {
  const bool possible = width % kPackOf<T> == 0 && aligned_16(stream, weight, y);
  with_rule<T>(possible, kind, [&]<int kPack, bool kLlama>() {
    launch(norm_kernel<T, kPack, kLlama>, {rows}, threads_for(width / kPack, kThreads), 0, kind, width, stream, weight,
           bias, eps, y, rstd);
  });
}

template <class T>
void norm_again(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight, const T* bias,
                const accumulator_t<T>* rstd, T* y) {
  const bool possible = width % kPackOf<T> == 0 && aligned_16(stream, weight, y);
  with_rule<T>(possible, kind, [&]<int kPack, bool kLlama>() {
    launch(norm_again_kernel<T, kPack, kLlama>, {rows}, threads_for(width / kPack, kThreads), 0, kind, width, stream,
           weight, bias, rstd, y);
  });
}

template <class T>
void add_norm_backward(NormKind kind, std::int64_t rows, std::int64_t width, const T* stream, const T* weight,
                       const accumulator_t<T>* rstd, const T* grad_y, T* grad_stream, accumulator_t<T>* grad_weight) {
  using A = accumulator_t<T>;
  if (rows == 0) return;
  const std::int64_t parts = rows < kMostParts ? rows : kMostParts;
  const Scratch<A> part(parts * width);
  const bool possible = width % kPackOf<T> == 0 && aligned_16(stream, weight, grad_y, grad_stream);
  with_rule<T>(possible, kind, [&]<int kPack, bool kLlama>() {
    launch(norm_backward_kernel<T, kPack, kLlama>, {parts}, threads_for(width / kPack, kThreads),
           width * static_cast<std::int64_t>(sizeof(A)), kind, rows, width, stream, weight, rstd, grad_y, grad_stream,
           part.get());
  });
  if (grad_weight != nullptr) add_parts(parts, width, part.get(), grad_weight);
}

#define ESPALIER_INSTANTIATE(T)                                                                                      \
  template void norm(NormKind, std::int64_t, std::int64_t, const T*, const T*, const T*, double, T*,                 \
                     accumulator_t<T>*);                                                                             \
  template void norm_again(NormKind, std::int64_t, std::int64_t, const T*, const T*, const T*,                       \
                           const accumulator_t<T>*, T*);                                                             \
  template void add_norm_backward(NormKind, std::int64_t, std::int64_t, const T*, const T*, const accumulator_t<T>*, \
                                  const T*, T*, accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
