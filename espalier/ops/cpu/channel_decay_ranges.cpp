#include "espalier/ops/cpu/channel_decay_ranges.h"

#include "espalier/ops/cpu/row_vectors.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// log(1 + e^x), exact for small e^x too: the rounding of 1 + e^x is put back.
template <class V>
ESPALIER_SIMD_INLINE V softplus(V x) {
  const V e = exp(x > 0 ? -x : x), whole = e + 1;
  return (x > 0 ? x : V{}) + (log(whole) + (e - (whole - 1)) / whole);
}

template <class A>
void decays(std::int64_t key_dim, const A* x, A rate, A* log_decay, A* decay) {
  for_lanes<A>(key_dim, [&](std::int64_t i, int count) {
    const Vector<A> logarithm = softplus(load_some(x + i, count)) * rate;
    store_some(log_decay + i, logarithm, count);
    store_some(decay + i, exp(logarithm), count);
  });
}

// Columns j ... of all rows, `vectors` vectors wide: columns of a state do not meet. `strip` holds the state's part,
// rows [vectors] following each other. A row's product with the state before it is summed while that state is written.
template <class A, int vectors>
void forward_strip(const HeadRows<A>& h, std::int64_t j, int count, A* state, A* o, A* strip) {
  constexpr std::int64_t kWidth = vectors * kLanes<A>;
  const std::int64_t dk = h.key_dim, dv = h.value_dim;
  Vector<A> seen[vectors] = {};
  for (std::int64_t i = 0; i < dk; ++i)
    for (int v = 0; v < vectors; ++v) {
      const Vector<A> s = load_some(state + i * dv + j + v * kLanes<A>, count);
      store(strip + i * kWidth + v * kLanes<A>, s);
      seen[v] = fma(s, broadcast(h.k[i] * h.decay[i]), seen[v]);
    }
  for (std::int64_t row = 0; row < h.rows; ++row) {
    const std::int64_t next_row = row + 1 < h.rows ? row + 1 : row;
    const A *const k = h.k + row * dk, *const q = h.q + row * dk, *const decay = h.decay + row * dk,
                   *const next_k = h.k + next_row * dk, *const next_decay = h.decay + next_row * dk;
    Vector<A> update[vectors], out[vectors] = {};
    for (int v = 0; v < vectors; ++v) {
      const Vector<A> value = load_some(h.v + row * dv + j + v * kLanes<A>, count);
      update[v] = (value - seen[v]) * h.beta[row];
      seen[v] = Vector<A>{};
    }
    for (std::int64_t i = 0; i < dk; ++i) {
      const Vector<A> ki = broadcast(k[i]), qi = broadcast(q[i]), after = broadcast(next_k[i] * next_decay[i]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        A* const at = strip + i * kWidth + v * kLanes<A>;
        const Vector<A> next = fma(update[v], ki, load(at) * decay[i]);
        store(at, next);
        out[v] = fma(next, qi, out[v]);
        seen[v] = fma(next, after, seen[v]);
      }
    }
    for (int v = 0; v < vectors && o != nullptr; ++v) store_some(o + row * dv + j + v * kLanes<A>, out[v], count);
  }
  for (std::int64_t i = 0; i < dk; ++i)
    for (int v = 0; v < vectors; ++v)
      store_some(state + i * dv + j + v * kLanes<A>, load(strip + i * kWidth + v * kLanes<A>), count);
}

template <class A>
void forward(const HeadRows<A>& h, A* state, A* o, A* room) {
  constexpr int kVectors = kVectorRegisters == 32 ? 4 : 2;
  static_assert(kVectors * ESPALIER_SIMD_BYTES <= kStateStripBytes);
  std::int64_t j = 0;
  for (; j + kVectors * kLanes<A> <= h.value_dim; j += kVectors * kLanes<A>)
    forward_strip<A, kVectors>(h, j, kLanes<A>, state, o, room);
  for (; j < h.value_dim; j += kLanes<A>) {
    const std::int64_t rest = h.value_dim - j;
    forward_strip<A, 1>(h, j, rest < kLanes<A> ? static_cast<int>(rest) : kLanes<A>, state, o, room);
  }
}

// Rows [first, first + count) of a head.
template <class A>
HeadRows<A> rows_of(const HeadRows<A>& h, std::int64_t first, std::int64_t count) {
  HeadRows<A> out = h;
  out.rows = count;
  out.q += first * h.key_dim, out.k += first * h.key_dim, out.v += first * h.value_dim;
  out.decay += first * h.key_dim, out.log_decay += first * h.key_dim, out.beta += first;
  return out;
}

// One row: `before` is the state before it; the state after it overwrites `after`, and its e and u those.
template <class A>
void step(const HeadRows<A>& h, std::int64_t row, const A* before, A* after, A* errors, A* updates) {
  const std::int64_t dk = h.key_dim, dv = h.value_dim;
  const A *const k = h.k + row * dk, *const decay = h.decay + row * dk;
  for_lanes<A>(dv, [&](std::int64_t j, int count) {
    Vector<A> seen{};
    for (std::int64_t i = 0; i < dk; ++i)
      seen = fma(load_some(before + i * dv + j, count), broadcast(k[i] * decay[i]), seen);
    const Vector<A> error = load_some(h.v + row * dv + j, count) - seen, update = error * h.beta[row];
    store_some(errors + j, error, count);
    store_some(updates + j, update, count);
    for (std::int64_t i = 0; i < dk; ++i)
      store_some(after + i * dv + j, fma(update, broadcast(k[i]), load_some(before + i * dv + j, count) * decay[i]),
                 count);
  });
}

// The gradients of one row; `grad` is dS' and is overwritten with dS. `of_update` and `of_value`: scratch [dv].
template <class A>
void step_back(const HeadRows<A>& h, std::int64_t row, const A* before, const A* errors, const A* updates,
               const A* grad_o, A* grad, const HeadGradients<A>& to, A* of_update) {
  const std::int64_t dk = h.key_dim, dv = h.value_dim;
  const A *const k = h.k + row * dk, *const q = h.q + row * dk, *const decay = h.decay + row * dk;
  A *const of_value = to.v + row * dv, *const to_q = to.q + row * dk, *const to_k = to.k + row * dk;
  const A seen = dot(dv, updates, grad_o);
  for (std::int64_t j = 0; j < dv; ++j) of_update[j] = 0;
  for (std::int64_t i = 0; i < dk; ++i) {
    A* const line = grad + i * dv;
    const A* const state = before + i * dv;
    for_lanes<A>(dv, [&](std::int64_t j, int count) {
      const Vector<A> all = fma(load_some(grad_o + j, count), broadcast(q[i]), load_some(line + j, count));
      store_some(line + j, all, count);
      store_some(of_update + j, fma(all, broadcast(k[i]), load_some(of_update + j, count)), count);
    });
    to_q[i] = fma(decay[i], dot(dv, state, grad_o), k[i] * seen);
    to_k[i] = dot(dv, line, updates);
  }
  to.beta[row] = dot(dv, of_update, errors);
  for_lanes<A>(dv, [&](std::int64_t j, int count) {
    store_some(of_value + j, load_some(of_update + j, count) * h.beta[row], count);
  });
  for (std::int64_t i = 0; i < dk; ++i) {
    A* const line = grad + i * dv;
    const A* const state = before + i * dv;
    for_lanes<A>(dv, [&](std::int64_t j, int count) {
      store_some(line + j, fma(-load_some(of_value + j, count), k[i], load_some(line + j, count)), count);
    });
    to_k[i] = fma(-decay[i], dot(dv, state, of_value), to_k[i]);
    to.log_decay[row * dk + i] = decay[i] * dot(dv, line, state);
    for_lanes<A>(
        dv, [&](std::int64_t j, int count) { store_some(line + j, load_some(line + j, count) * decay[i], count); });
  }
}

// States before each group of rows first, then, from the last group on, those before its rows.
template <class A>
void backward(const HeadRows<A>& h, const A* start, const A* grad_o, A* grad, const HeadGradients<A>& to, A* room) {
  constexpr std::int64_t B = kChannelBlockRows, kGroups = kStateBlockRows / B;
  const std::int64_t dk = h.key_dim, dv = h.value_dim, matrix = dk * dv, groups = (h.rows + B - 1) / B;
  A *const starts = room, *const states = starts + kGroups * matrix, *const errors = states + (B + 1) * matrix,
           *const updates = errors + (B + 1) * dv;
  const auto copy = [&](const A* from, A* into) {
    for_lanes<A>(matrix, [&](std::int64_t i, int count) { store_some(into + i, load_some(from + i, count), count); });
  };
  const auto rows_in = [&](std::int64_t group) { return h.rows - group * B < B ? h.rows - group * B : B; };
  copy(start, starts);
  for (std::int64_t group = 0; group + 1 < groups; ++group) {
    copy(starts + group * matrix, starts + (group + 1) * matrix);
    forward<A>(rows_of(h, group * B, B), starts + (group + 1) * matrix, nullptr, states);
  }
  for (std::int64_t group = groups; group-- > 0;) {
    const std::int64_t first = group * B, rows = rows_in(group);
    copy(starts + group * matrix, states);
    for (std::int64_t r = 0; r < rows; ++r)
      step(h, first + r, states + r * matrix, states + (r + 1) * matrix, errors + r * dv, updates + r * dv);
    for (std::int64_t r = rows; r-- > 0;)
      step_back(h, first + r, states + r * matrix, errors + r * dv, updates + r * dv, grad_o + (first + r) * dv, grad,
                to, errors + B * dv);
  }
}

}  // namespace

template <class A>
ChannelDecayRanges<A> channel_decay_ranges() {
  return {decays<A>, forward<A>, backward<A>};
}
template ChannelDecayRanges<float> channel_decay_ranges<float>();
template ChannelDecayRanges<double> channel_decay_ranges<double>();

}  // namespace espalier::ESPALIER_SIMD
