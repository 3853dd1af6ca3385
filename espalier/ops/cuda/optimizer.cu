// AdamW; compiled without contraction, so that multiply-adds are fused where the source says so and nowhere else.
#include "espalier/ops/cuda/optimizer.h"

#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kOfBlock = 16 * 1024, kMostBlocks = 1056;  // elements of a block where there are few

template <class P>
__global__ void __launch_bounds__(kThreads) squares_kernel(std::int64_t count, const P* x, double* part) {
  ESPALIER_SHARED(double[32], scratch);
  double sum = 0;
  for (std::int64_t i = grid_thread(); i < count; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const double value = static_cast<double>(x[i]);
    sum += value * value;
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) sum_kernel(std::int64_t count, const double* part, double* result) {
  ESPALIER_SHARED(double[32], scratch);
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += part[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *result = sum;
}

// The numbers of a step as they multiply, rounded to P once.
template <class P>
struct Factors {
  P grad_scale, decay, coefficient, beta2, one_minus_beta2, correction2_root, eps, minus_step_size;
  bool from_momentum;  // torch's lerp starts from the nearer end
};

template <class P>
Factors<P> factors_of(const AdamWStep& step) {
  const auto t = static_cast<double>(step.step);
  const double correction1 = 1 - std::pow(step.beta1, t), correction2 = 1 - std::pow(step.beta2, t);
  const P lerp = static_cast<P>(1 - step.beta1);
  const bool small = lerp < P(0.5);
  return {static_cast<P>(step.grad_scale),
          static_cast<P>(1 - step.lr * step.weight_decay),
          small ? lerp : lerp - P(1),
          static_cast<P>(step.beta2),
          static_cast<P>(1 - step.beta2),
          static_cast<P>(std::sqrt(correction2)),
          static_cast<P>(step.eps),
          static_cast<P>(-(step.lr / correction1)),
          small};
}

template <class P, int kPack>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(std::int64_t count, P* p, const P* grad, P* m, P* v, Factors<P> f, bfloat16* narrow) {
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  Pack<P, kPack> p4 = load_pack<kPack>(p + at), m4 = load_pack<kPack>(m + at), v4 = load_pack<kPack>(v + at);
  const Pack<P, kPack> g4 = load_pack<kPack>(grad + at);
  Pack<bfloat16, kPack> narrow4;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const P g = g4.x[i] * f.grad_scale, decayed = p4.x[i] * f.decay;
    const P first = std::fma(f.coefficient, g - m4.x[i], f.from_momentum ? m4.x[i] : g);
    const P second = std::fma(f.one_minus_beta2 * g, g, v4.x[i] * f.beta2);
    const P denominator = std::sqrt(second) / f.correction2_root + f.eps;
    const P updated = decayed + f.minus_step_size * first / denominator;
    p4.x[i] = updated, m4.x[i] = first, v4.x[i] = second;
    narrow4.x[i] = narrowed<bfloat16>(static_cast<float>(updated));
  }
  store_pack(p + at, p4);
  store_pack(m + at, m4);
  store_pack(v + at, v4);
  if (narrow != nullptr) store_pack(narrow + at, narrow4);
}

}  // namespace

template <class P>
void sum_of_squares(std::int64_t count, const P* x, double* sum) {
  const std::int64_t wanted = ceil_div(count, kOfBlock), blocks = wanted < kMostBlocks ? wanted : kMostBlocks;
  const Scratch<double> part(blocks < 1 ? 1 : blocks);
  launch(squares_kernel<P>, {blocks}, kThreads, 0, count, x, part.get());
  launch(sum_kernel, {1}, kThreads, 0, blocks, part.get(), sum);
}

template <class P>
void adamw(std::int64_t count, P* p, const P* grad, P* m, P* v, const AdamWStep& step, bfloat16* rounded) {
  const Factors<P> factors = factors_of<P>(step);
  with_pack<P>(count % kPackOf<P> == 0 && aligned_16(p, grad, m, v, rounded), [&]<int kPack>() {
    launch(adamw_kernel<P, kPack>, {ceil_div(count, kPack * kThreads)}, kThreads, 0, count, p, grad, m, v, factors,
           rounded);
  });
}

#define ESPALIER_INSTANTIATE(P)                                  \
  template void sum_of_squares(std::int64_t, const P*, double*); \
  template void adamw(std::int64_t, P*, const P*, P*, P*, const AdamWStep&, bfloat16*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
