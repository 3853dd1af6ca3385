// Activations other than SwiGLU (swiglu.cu), with a gate or without: a thread has a pack of gates and the pack of their
// partners. The kernel chooses the activation as it runs: it waits for memory either way.
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/norm.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

// f(g) and f'(g).
template <class A>
struct Slope {
  A value, slope;
};

template <class A>
__device__ __forceinline__ Slope<A> activated(Activation kind, A g) {
  if (kind == Activation::gelu_tanh) {
    const A root = A(0.79788456080286535588), cube = A(0.044715);
    const A t = std::tanh(root * (g + cube * g * g * g)), inner = root * (A(1) + A(3) * cube * g * g);
    return {A(0.5) * g * (A(1) + t), A(0.5) * (A(1) + t) + A(0.5) * g * (A(1) - t * t) * inner};
  }
  if (kind == Activation::gelu) {
    const A below = A(0.5) * (A(1) + std::erf(g * A(0.70710678118654752440)));
    return {g * below, below + g * A(0.39894228040143267794) * std::exp(A(-0.5) * g * g)};
  }
  if (kind == Activation::relu_squared) {
    const A positive = g > A(0) ? g : A(0);
    return {positive * positive, A(2) * positive};
  }
  const A exponential = std::exp(-g) + A(1), sigmoid = A(1) / exponential;
  return {g / exponential, sigmoid * (A(1) + g * (A(1) - sigmoid))};
}

// g' = min(g, limit), u' = u within the limits: f = g' s, s = sigmoid(1.702 g'), act = f (u' + 1).
template <class A>
struct Clamped {
  A g, u, f, slope;

  __device__ __forceinline__ Clamped(A gate, A up, A limit)
      : g(gate < limit ? gate : limit), u(up < limit ? (up > -limit ? up : -limit) : limit) {
    const A sigmoid = A(1) / (std::exp(A(-1.702) * g) + A(1));
    f = g * sigmoid;
    slope = sigmoid * (A(1) + A(1.702) * g * (A(1) - sigmoid));
  }
};

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    activate_kernel(ActivationRule rule, std::int64_t count, std::int64_t inner, const T* gate_up, T* act) {
  using A = accumulator_t<T>;
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const std::int64_t gate_at = rule.gated ? at / inner * 2 * inner + at % inner : at;
  const Pack<T, kPack> gate = load_pack<kPack>(gate_up + gate_at),
                       up = load_pack<kPack>(gate_up + gate_at + (rule.gated ? inner : 0));
  Pack<T, kPack> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const A g = widened(gate.x[i]), u = widened(up.x[i]);
    if (rule.kind == Activation::clamped) {
      const Clamped<A> of(g, u, static_cast<A>(rule.limit));
      out.x[i] = narrowed<T>(of.f * (of.u + A(1)));
    } else {
      const A f = rounded<T>(activated(rule.kind, g).value);
      out.x[i] = narrowed<T>(rule.gated ? f * u : f);
    }
  }
  store_pack(act + at, out);
}

// Reads all it needs at a place before it writes there: the buffers may be the same.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    activate_backward_kernel(ActivationRule rule, std::int64_t count, std::int64_t inner, const T* gate_up,
                             const T* grad_act, T* grad_gate_up, T* act) {
  using A = accumulator_t<T>;
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const std::int64_t gate_at = rule.gated ? at / inner * 2 * inner + at % inner : at;
  const Pack<T, kPack> gate = load_pack<kPack>(gate_up + gate_at),
                       up = load_pack<kPack>(gate_up + gate_at + (rule.gated ? inner : 0)),
                       grad = load_pack<kPack>(grad_act + at);
  Pack<T, kPack> grad_gate, grad_up, out;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const A g = widened(gate.x[i]), u = widened(up.x[i]), d = widened(grad.x[i]);
    if (rule.kind == Activation::clamped) {
      const A limit = static_cast<A>(rule.limit);
      const Clamped<A> of(g, u, limit);
      grad_gate.x[i] = narrowed<T>(g <= limit ? d * (of.u + A(1)) * of.slope : A(0));
      grad_up.x[i] = narrowed<T>(u <= limit && u >= -limit ? d * of.f : A(0));
      out.x[i] = narrowed<T>(of.f * (of.u + A(1)));
      continue;
    }
    const Slope<A> of = activated(rule.kind, g);
    const A f = rounded<T>(of.value);
    grad_gate.x[i] = narrowed<T>(rule.gated ? d * u * of.slope : d * of.slope);
    grad_up.x[i] = narrowed<T>(d * f);
    out.x[i] = narrowed<T>(rule.gated ? f * u : f);
  }
  store_pack(grad_gate_up + gate_at, grad_gate);
  if (rule.gated) store_pack(grad_gate_up + gate_at + inner, grad_up);
  store_pack(act + at, out);
}

}  // namespace

template <class T>
void activate(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up, T* act) {
  with_pack<T>(inner % kPackOf<T> == 0 && aligned_16(gate_up, act), [&]<int kPack>() {
    launch(activate_kernel<T, kPack>, {ceil_div(rows * inner, kPack * kThreads)}, kThreads, 0, rule, rows * inner,
           inner, gate_up, act);
  });
}

template <class T>
void activate_backward(const ActivationRule& rule, std::int64_t rows, std::int64_t inner, const T* gate_up,
                       const T* grad_act, T* grad_gate_up, T* act) {
  with_pack<T>(inner % kPackOf<T> == 0 && aligned_16(gate_up, grad_act, grad_gate_up, act), [&]<int kPack>() {
    launch(activate_backward_kernel<T, kPack>, {ceil_div(rows * inner, kPack * kThreads)}, kThreads, 0, rule,
           rows * inner, inner, gate_up, grad_act, grad_gate_up, act);
  });
}

#define ESPALIER_INSTANTIATE(T)                                                            \
  template void activate(const ActivationRule&, std::int64_t, std::int64_t, const T*, T*); \
  template void activate_backward(const ActivationRule&, std::int64_t, std::int64_t, const T*, const T*, T*, T*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
