// SwiGLU: a thread has a pack of gates and the pack of their partners.
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/norm.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(std::int64_t count, std::int64_t inner, const T* gate_up, T* act) {
  using A = accumulator_t<T>;
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const std::int64_t gate_at = at / inner * 2 * inner + at % inner;
  const Pack<T, kPack> gate = load_pack<kPack>(gate_up + gate_at), up = load_pack<kPack>(gate_up + gate_at + inner);
  Pack<T, kPack> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const A g = widened(gate.x[i]), silu = rounded<T>(g / (std::exp(-g) + A(1)));
    out.x[i] = narrowed<T>(silu * widened(up.x[i]));
  }
  store_pack(act + at, out);
}

// Reads all it needs at a place before it writes there: the buffers may be the same.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(std::int64_t count, std::int64_t inner, const T* gate_up, const T* grad_act, T* grad_gate_up,
                           T* act) {
  using A = accumulator_t<T>;
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const std::int64_t gate_at = at / inner * 2 * inner + at % inner;
  const Pack<T, kPack> gate = load_pack<kPack>(gate_up + gate_at), up = load_pack<kPack>(gate_up + gate_at + inner),
                       grad = load_pack<kPack>(grad_act + at);
  Pack<T, kPack> grad_gate, grad_up, out;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const A g = widened(gate.x[i]), u = widened(up.x[i]), d = widened(grad.x[i]);
    const A exponential = std::exp(-g) + A(1), sigmoid = A(1) / exponential, silu = rounded<T>(g / exponential);
    grad_gate.x[i] = narrowed<T>(d * u * (sigmoid * (A(1) + g * (A(1) - sigmoid))));
    grad_up.x[i] = narrowed<T>(d * silu);
    out.x[i] = narrowed<T>(silu * u);
  }
  store_pack(grad_gate_up + gate_at, grad_gate);
  store_pack(grad_gate_up + gate_at + inner, grad_up);
  store_pack(act + at, out);
}

}  // namespace

template <class T>
void swiglu(std::int64_t rows, std::int64_t inner, const T* gate_up, T* act) {
  with_pack<T>(inner % kPackOf<T> == 0 && aligned_16(gate_up, act), [&]<int kPack>() {
    launch(swiglu_kernel<T, kPack>, {ceil_div(rows * inner, kPack * kThreads)}, kThreads, 0, rows * inner, inner,
           gate_up, act);
  });
}

template <class T>
void swiglu_backward(std::int64_t rows, std::int64_t inner, const T* gate_up, const T* grad_act, T* grad_gate_up,
                     T* act) {
  with_pack<T>(inner % kPackOf<T> == 0 && aligned_16(gate_up, grad_act, grad_gate_up, act), [&]<int kPack>() {
    launch(swiglu_backward_kernel<T, kPack>, {ceil_div(rows * inner, kPack * kThreads)}, kThreads, 0, rows * inner,
           inner, gate_up, grad_act, grad_gate_up, act);
  });
}

#define ESPALIER_INSTANTIATE(T)                                   \
  template void swiglu(std::int64_t, std::int64_t, const T*, T*); \
  template void swiglu_backward(std::int64_t, std::int64_t, const T*, const T*, T*, T*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
