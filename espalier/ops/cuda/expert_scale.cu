// The factors of experts in their rows' weights.
#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_by_expert_kernel(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                           const T* scale_E, accumulator_t<T>* out_S) {
  const std::int64_t slot = grid_thread();
  if (slot < slots) out_S[slot] = weight_S[slot] * widened(scale_E[choice_S[slot]]);
}

// A block has an expert and reads all choices.
template <class A>
__global__ void __launch_bounds__(kThreads)
    add_scale_gradient_kernel(std::int64_t slots, const A* weight_S, const std::int32_t* choice_S, const A* grad_S,
                              A* grad_scale_E) {
  ESPALIER_SHARED(A[32], scratch);
  const std::int32_t expert = static_cast<std::int32_t>(blockIdx.x);
  A sum = 0;
  for (std::int64_t slot = threadIdx.x; slot < slots; slot += kThreads)
    if (choice_S[slot] == expert) sum += grad_S[slot] * weight_S[slot];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) grad_scale_E[expert] += sum;
}

}  // namespace

template <class T>
void scale_by_expert(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                     const T* scale_E, accumulator_t<T>* out_S) {
  launch(scale_by_expert_kernel<T>, {ceil_div(slots, kThreads)}, kThreads, 0, slots, weight_S, choice_S, scale_E,
         out_S);
}

template <class A>
void add_scale_gradient(std::int64_t slots, std::int64_t experts, const A* weight_S, const std::int32_t* choice_S,
                        const A* grad_S, A* grad_scale_E) {
  launch(add_scale_gradient_kernel<A>, {experts}, kThreads, 0, slots, weight_S, choice_S, grad_S, grad_scale_E);
}

#define ESPALIER_INSTANTIATE(T)                                                                       \
  template void scale_by_expert(std::int64_t, const accumulator_t<T>*, const std::int32_t*, const T*, \
                                accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE
template void add_scale_gradient(std::int64_t, std::int64_t, const float*, const std::int32_t*, const float*, float*);
template void add_scale_gradient(std::int64_t, std::int64_t, const double*, const std::int32_t*, const double*,
                                 double*);

}  // namespace espalier::cuda
