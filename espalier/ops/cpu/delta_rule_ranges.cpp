// One value head, row by row; every pass over a state goes along its dv channels.
#include "espalier/ops/cpu/delta_rule_ranges.h"
#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// y += a x.
template <class A>
ESPALIER_SIMD_INLINE void add_scaled(std::int64_t width, A a, const A* x, A* y) {
  for_lanes<A>(width, [&](std::int64_t i, int count) {
    store_some(y + i, load_some(y + i, count) + load_some(x + i, count) * a, count);
  });
}

template <class A>
ESPALIER_SIMD_INLINE A dot(std::int64_t width, const A* x, const A* y) {
  return sum_over<A>(width,
                     [&](std::int64_t i, int count) { return load_some(x + i, count) * load_some(y + i, count); });
}

template <class A>
ESPALIER_SIMD_INLINE void fill(std::int64_t width, A* x) {
  for_lanes<A>(width, [&](std::int64_t i, int count) { store_some(x + i, Vector<A>{}, count); });
}

// error = v - gamma S^T k.
template <class A>
ESPALIER_SIMD_INLINE void error_of(const HeadRows<A>& h, std::int64_t row, const A* state, A* error) {
  const A *const k = h.k + row * h.key_dim, *const v = h.v + row * h.value_dim;
  const A decay = h.decay[row];
  for_lanes<A>(h.value_dim, [&](std::int64_t j, int count) {
    Vector<A> seen{};
    for (std::int64_t i = 0; i < h.key_dim; ++i) seen += load_some(state + i * h.value_dim + j, count) * k[i];
    store_some(error + j, load_some(v + j, count) - seen * decay, count);
  });
}

template <class A>
void forward(const HeadRows<A>& h, std::int64_t begin, std::int64_t end, A* state, A* o) {
  for (std::int64_t row = begin; row < end; ++row) {
    const A *const k = h.k + row * h.key_dim, *const q = h.q + row * h.key_dim, *const v = h.v + row * h.value_dim;
    const A decay = h.decay[row], beta = h.beta[row];
    for_lanes<A>(h.value_dim, [&](std::int64_t j, int count) {
      Vector<A> seen{}, out{};
      for (std::int64_t i = 0; i < h.key_dim; ++i) seen += load_some(state + i * h.value_dim + j, count) * k[i];
      const Vector<A> update = (load_some(v + j, count) - seen * decay) * beta;
      for (std::int64_t i = 0; i < h.key_dim; ++i) {
        A* const at = state + i * h.value_dim + j;
        const Vector<A> next = load_some(at, count) * decay + update * k[i];
        store_some(at, next, count);
        out += next * q[i];
      }
      if (o != nullptr) store_some(o + row * h.value_dim + j, out, count);
    });
  }
}

template <class A>
void backward(const HeadRows<A>& h, std::int64_t row, const A* before, const A* after, const A* grad_o, A* grad,
              A* grad_q, A* grad_k, A* grad_v, A* grad_log_decay, A* grad_beta, A* room) {
  const std::int64_t dk = h.key_dim, dv = h.value_dim;
  const A *const k = h.k + row * dk, *const q = h.q + row * dk;
  const A decay = h.decay[row], beta = h.beta[row];
  A *const error = room, *const grad_update = room + dv, *const grad_error = room + 2 * dv;
  error_of(h, row, before, error);
  fill(dv, grad_update);
  for (std::int64_t i = 0; i < dk; ++i) {
    A* const g = grad + i * dv;
    grad_q[i] = dot(dv, after + i * dv, grad_o);
    add_scaled(dv, q[i], grad_o, g);
    add_scaled(dv, k[i], g, grad_update);
  }
  *grad_beta = dot(dv, grad_update, error);
  for_lanes<A>(dv, [&](std::int64_t j, int count) {
    store_some(grad_error + j, load_some(grad_update + j, count) * beta, count);
    store_some(grad_v + j, load_some(grad_update + j, count) * beta, count);
  });
  A of_decay = 0;  // sum of what comes to gamma S_before, times it
  for (std::int64_t i = 0; i < dk; ++i) {
    A* const g = grad + i * dv;
    const A* const s = before + i * dv;
    grad_k[i] = beta * dot(dv, g, error) - decay * dot(dv, s, grad_error);
    add_scaled(dv, -k[i], grad_error, g);
    of_decay += decay * dot(dv, g, s);
    for_lanes<A>(dv, [&](std::int64_t j, int count) { store_some(g + j, load_some(g + j, count) * decay, count); });
  }
  *grad_log_decay = of_decay;
}

}  // namespace

template <class A>
DeltaRuleRanges<A> delta_rule_ranges() {
  return {forward<A>, backward<A>};
}
template DeltaRuleRanges<float> delta_rule_ranges<float>();
template DeltaRuleRanges<double> delta_rule_ranges<double>();

}  // namespace espalier::ESPALIER_SIMD
