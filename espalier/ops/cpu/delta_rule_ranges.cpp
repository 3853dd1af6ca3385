#include "espalier/ops/cpu/delta_rule_ranges.h"

#include "espalier/ops/cpu/row_vectors.h"
#include "espalier/ops/cpu/small_products.h"

namespace espalier::ESPALIER_SIMD {
namespace {

// y += a x.
template <class A>
ESPALIER_SIMD_INLINE void add_scaled(std::int64_t width, A a, const A* x, A* y) {
  for_lanes<A>(width, [&](std::int64_t i, int count) {
    store_some(y + i, fma(load_some(x + i, count), a, load_some(y + i, count)), count);
  });
}
// y = a x.
template <class A>
ESPALIER_SIMD_INLINE void scale(std::int64_t width, A a, const A* x, A* y) {
  for_lanes<A>(width, [&](std::int64_t i, int count) { store_some(y + i, load_some(x + i, count) * a, count); });
}

// Columns j ... of all rows, `vectors` vectors wide: columns of a state do not meet. `strip` holds the state's part,
// rows [vectors] following each other. A row's product with the state before it is summed while that state is written.
template <class A, int vectors, bool reads>
void forward_strip(const HeadRows<A>& h, std::int64_t j, int count, A* state, A* o, A* strip) {
  constexpr std::int64_t kWidth = vectors * kLanes<A>;
  const std::int64_t dk = h.key_dim, dv = h.value_dim;
  Vector<A> seen[vectors] = {};
  for (std::int64_t i = 0; i < dk; ++i)
    for (int v = 0; v < vectors; ++v) {
      const Vector<A> s = load_some(state + i * dv + j + v * kLanes<A>, count);
      store(strip + i * kWidth + v * kLanes<A>, s);
      if (reads) seen[v] = fma(s, broadcast(h.k[i]), seen[v]);
    }
  for (std::int64_t row = 0; row < h.rows; ++row) {
    const A *const k = h.k + row * dk, *const q = h.q + row * dk, *const next_k = row + 1 < h.rows ? k + dk : k;
    const Vector<A> decay = broadcast(h.decay[row]);
    Vector<A> update[vectors], out[vectors] = {};
    for (int v = 0; v < vectors; ++v) {
      const Vector<A> value = load_some(h.v + row * dv + j + v * kLanes<A>, count);
      update[v] = (reads ? fma(-seen[v], decay, value) : value) * h.beta[row];
      seen[v] = Vector<A>{};
    }
    for (std::int64_t i = 0; i < dk; ++i) {
      const Vector<A> ki = broadcast(k[i]), qi = broadcast(q[i]), after = broadcast(next_k[i]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        A* const at = strip + i * kWidth + v * kLanes<A>;
        const Vector<A> next = fma(update[v], ki, load(at) * decay);
        store(at, next);
        out[v] = fma(next, qi, out[v]);
        if (reads) seen[v] = fma(next, after, seen[v]);
      }
    }
    for (int v = 0; v < vectors && o != nullptr; ++v) store_some(o + row * dv + j + v * kLanes<A>, out[v], count);
  }
  for (std::int64_t i = 0; i < dk; ++i)
    for (int v = 0; v < vectors; ++v)
      store_some(state + i * dv + j + v * kLanes<A>, load(strip + i * kWidth + v * kLanes<A>), count);
}

template <class A, bool reads>
void forward_rows(const HeadRows<A>& h, A* state, A* o, A* room) {
  constexpr int kVectors = kVectorRegisters == 32 ? 4 : 2;
  static_assert(kVectors * ESPALIER_SIMD_BYTES <= kStateStripBytes);
  std::int64_t j = 0;
  for (; j + kVectors * kLanes<A> <= h.value_dim; j += kVectors * kLanes<A>)
    forward_strip<A, kVectors, reads>(h, j, kLanes<A>, state, o, room);
  for (; j < h.value_dim; j += kLanes<A>) {
    const std::int64_t rest = h.value_dim - j;
    forward_strip<A, 1, reads>(h, j, rest < kLanes<A> ? static_cast<int>(rest) : kLanes<A>, state, o, room);
  }
}

template <class A>
void forward(const HeadRows<A>& h, A* state, A* o, A* room) {
  h.reads ? forward_rows<A, true>(h, state, o, room) : forward_rows<A, false>(h, state, o, room);
}

template <class A>
void products(const HeadRows<A>& h, A* keys, A* queries, A* room) {
  constexpr std::int64_t C = kStateBlockRows;
  const std::int64_t n = h.rows, dk = h.key_dim;
  transpose(n, dk, h.k, dk, room, C);
  small_product<A>(n, n, dk, {h.k, dk, 1}, Triangle::none, room, C, 0, 1, keys, C, true);
  small_product<A>(n, n, dk, {h.q, dk, 1}, Triangle::none, room, C, 0, 1, queries, C, true);
}

// x_i = e^(x_i).
template <class A>
ESPALIER_SIMD_INLINE void exponentials(std::int64_t width, A* x) {
  for_lanes<A>(width, [&](std::int64_t i, int count) { store_some(x + i, exp(load_some(x + i, count)), count); });
}

// The matrices and factors of a block besides states.
template <class A>
struct Block {
  static constexpr std::int64_t C = kStateBlockRows;
  A *decays, *system, *seen;   // D, N, P [n, C]
  A from_start[C], to_end[C];  // e^G, w

  Block(const HeadRows<A>& h, const A* keys, const A* queries, A* room)
      : decays(room), system(room + C * C), seen(room + 2 * C * C) {
    const std::int64_t n = h.rows;
    double sum = 0, since[C];  // of log gamma: from the first row on; behind each row
    for (std::int64_t i = 0; i < n; ++i) {
      const auto log_decay = static_cast<double>(h.log_decay[i]);
      for (std::int64_t j = 0; j < i; ++j) since[j] += log_decay;
      since[i] = 0, sum += log_decay;
      from_start[i] = static_cast<A>(sum);
      A* const of_row = decays + i * C;
      for (std::int64_t j = 0; j <= i; ++j) of_row[j] = static_cast<A>(since[j]);
      exponentials(i + 1, of_row);
      for (std::int64_t j = i + 1; j < n; ++j) of_row[j] = 0;
      times(n, of_row, queries + i * C, i + 1, seen + i * C);
      times(n, of_row, keys + i * C, h.reads ? i : 0, system + i * C);
    }
    for (std::int64_t i = 0; i < n; ++i) to_end[i] = static_cast<A>(since[i]);
    exponentials(n, from_start);
    exponentials(n, to_end);
  }
  // to_j = x_j y_j for j < count, 0 for those up to n.
  static void times(std::int64_t n, const A* x, const A* y, std::int64_t count, A* to) {
    for_lanes<A>(count, [&](std::int64_t j, int lanes) {
      store_some(to + j, load_some(x + j, lanes) * load_some(y + j, lanes), lanes);
    });
    for (std::int64_t j = count; j < n; ++j) to[j] = 0;
  }
};

// Rows of (I + N B) E = right, which E holds at first; U = B E.
template <class A>
void solve(const HeadRows<A>& h, const A* system, A* errors, A* updates) {
  constexpr std::int64_t C = kStateBlockRows, R = detail::kTileRows;
  const std::int64_t n = h.rows, dv = h.value_dim;
  for (std::int64_t first = 0; first < n; first += R) {
    const std::int64_t end = first + R < n ? first + R : n;
    if (h.reads)
      small_product<A>(end - first, dv, first, {system + first * C, C, 1}, Triangle::none, updates, dv, 1, -1,
                       errors + first * dv, dv);
    for (std::int64_t i = first; i < end; ++i) {
      for (std::int64_t j = first; h.reads && j < i; ++j)
        add_scaled(dv, -system[i * C + j], updates + j * dv, errors + i * dv);
      scale(dv, h.beta[i], errors + i * dv, updates + i * dv);
    }
  }
}
// Rows of (I + B N)^T dA = dU, which dA holds at first; dV = B dA.
template <class A>
void solve_transposed(const HeadRows<A>& h, const A* system, A* grad, A* grad_v) {
  constexpr std::int64_t C = kStateBlockRows, R = detail::kTileRows;
  const std::int64_t n = h.rows, dv = h.value_dim;
  for (std::int64_t first = (n - 1) / R * R; first >= 0; first -= R) {
    const std::int64_t end = first + R < n ? first + R : n;
    if (h.reads)
      small_product<A>(end - first, dv, n - end, {system + end * C + first, 1, C}, Triangle::none, grad_v + end * dv,
                       dv, 1, -1, grad + first * dv, dv);
    for (std::int64_t i = end; i-- > first;) {
      for (std::int64_t j = i + 1; h.reads && j < end; ++j)
        add_scaled(dv, -system[j * C + i], grad_v + j * dv, grad + i * dv);
      scale(dv, h.beta[i], grad + i * dv, grad_v + i * dv);
    }
  }
}

// The sum over rows j before row i of x_j q_j + y_j k_j, each term taken from its row too.
template <class A>
double from_rows_before(std::int64_t i, const A* x, const A* q, const A* y, const A* k, double* of_rows) {
  A terms[kStateBlockRows] = {};
  for_lanes<A>(i, [&](std::int64_t j, int count) {
    const Vector<A> of_keys = load_some(y + j, count) * load_some(k + j, count);
    store_some(terms + j, fma(load_some(x + j, count), load_some(q + j, count), of_keys), count);
  });
  for (std::int64_t j = 0; j < i; ++j) of_rows[j] -= static_cast<double>(terms[j]);
  double sums[4] = {};
  for (std::int64_t j = 0; j < i; j += 4)
    for (int part = 0; part < 4; ++part) sums[part] += static_cast<double>(terms[j + part]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class A>
void backward(const HeadRows<A>& h, const A* keys, const A* queries, const A* start, const A* grad_o, A* grad,
              const HeadGradients<A>& to, A* room) {
  constexpr std::int64_t C = kStateBlockRows;
  const std::int64_t n = h.rows, dk = h.key_dim, dv = h.value_dim, last = n - 1;
  const Block<A> block(h, keys, queries, room);
  A* const errors = room + 3 * C * C;
  A *const updates = errors + C * dv, *const rows = updates + C * dv, *const updates_t = rows + C * dv;
  A *const start_t = updates_t + C * dv, *const grad_t = start_t + dk * dv, *const written = grad_t + dk * dv;
  const LeftFactor<A> k{h.k, dk, 1}, k_t{h.k, 1, dk}, q_t{h.q, 1, dk};

  if (h.reads) small_product<A>(n, dv, dk, k, Triangle::none, start, dv, 0, 1, errors, dv);
  for (std::int64_t i = 0; i < n; ++i)
    for_lanes<A>(dv, [&](std::int64_t j, int count) {
      A* const at = errors + i * dv + j;
      const Vector<A> value = load_some(h.v + i * dv + j, count);
      store_some(at, h.reads ? fma(-load_some(at, count), block.from_start[i], value) : value, count);
    });
  solve(h, block.system, errors, updates);

  small_product<A>(n, dv, dk, k, Triangle::none, grad, dv, 0, 1, rows, dv);
  double of_decay[C];  // differences of what comes to log gamma
  double of_end = static_cast<double>(block.from_start[last] * dot(dk * dv, start, grad));
  for (std::int64_t i = 0; i < n; ++i) {
    scale(dv, block.to_end[i], rows + i * dv, rows + i * dv);
    const auto written_here = static_cast<double>(dot(dv, updates + i * dv, rows + i * dv));
    of_decay[i] = -written_here, of_end += written_here;
  }
  small_product<A>(n, dv, n, {block.seen, 1, C}, Triangle::upper, grad_o, dv, 1, 1, rows, dv);
  solve_transposed(h, block.system, rows, to.v);
  for (std::int64_t i = 0; i < n; ++i) to.beta[i] = dot(dv, rows + i * dv, errors + i * dv);

  // X and Y, in the place of P and N.
  A *const of_queries = block.seen, *const of_keys = block.system;
  transpose(n, dv, updates, dv, updates_t, C);
  small_product<A>(n, n, dv, {grad_o, dv, 1}, Triangle::none, updates_t, C, 0, 1, of_queries, C, true);
  if (h.reads) small_product<A>(n, n, dv, {to.v, dv, 1}, Triangle::none, updates_t, C, 0, -1, of_keys, C, true);
  for (std::int64_t i = 0; i < n; ++i) {
    Block<A>::times(n, block.decays + i * C, of_queries + i * C, i + 1, of_queries + i * C);
    Block<A>::times(n, block.decays + i * C, of_keys + i * C, h.reads ? i : 0, of_keys + i * C);
    of_decay[i] += from_rows_before(i, of_queries + i * C, queries + i * C, of_keys + i * C, keys + i * C, of_decay);
  }
  transpose(dk, dv, start, dv, start_t, dk);
  transpose(dk, dv, grad, dv, grad_t, dk);
  for (std::int64_t i = 0; i < n; ++i) scale(dv, block.from_start[i], grad_o + i * dv, rows + i * dv);
  small_product<A>(n, dk, dv, {rows, dv, 1}, Triangle::none, start_t, dk, 0, 1, to.q, dk);
  for (std::int64_t i = 0; i < n; ++i) of_decay[i] += static_cast<double>(dot(dk, h.q + i * dk, to.q + i * dk));
  small_product<A>(n, dk, n, {of_queries, C, 1}, Triangle::lower, h.k, dk, 1, 1, to.q, dk);
  small_product<A>(dk, dv, n, q_t, Triangle::none, rows, dv, block.from_start[last], 1, grad, dv);
  if (h.reads) {
    for (std::int64_t i = 0; i < n; ++i) scale(dv, block.from_start[i], to.v + i * dv, rows + i * dv);
    small_product<A>(n, dk, dv, {rows, dv, 1}, Triangle::none, start_t, dk, 0, -1, to.k, dk);
    for (std::int64_t i = 0; i < n; ++i) of_decay[i] += static_cast<double>(dot(dk, h.k + i * dk, to.k + i * dk));
    small_product<A>(n, dk, n, {of_keys, C, 1}, Triangle::lower, h.k, dk, 1, 1, to.k, dk);
    small_product<A>(dk, dv, n, k_t, Triangle::none, rows, dv, 1, -1, grad, dv);
  }
  for (std::int64_t i = 0; i < n; ++i) scale(dv, block.to_end[i], updates + i * dv, updates + i * dv);
  small_product<A>(n, dk, dv, {updates, dv, 1}, Triangle::none, grad_t, dk, 0, 1, written, dk);
  if (h.reads) small_product<A>(n, dk, n, {of_keys, 1, C}, Triangle::upper, h.k, dk, 1, 1, written, dk);
  small_product<A>(n, dk, n, {of_queries, 1, C}, Triangle::upper, h.q, dk, 1, 1, written, dk);

  for (std::int64_t i = n; i-- > 0;) {
    of_end += of_decay[i];
    to.log_decay[i] = static_cast<A>(of_end);
    if (h.reads)
      add_scaled(dk, A(1), written + i * dk, to.k + i * dk);
    else
      scale(dk, A(1), written + i * dk, to.k + i * dk);
  }
}

}  // namespace

template <class A>
DeltaRuleRanges<A> delta_rule_ranges() {
  return {forward<A>, products<A>, backward<A>};
}
template DeltaRuleRanges<float> delta_rule_ranges<float>();
template DeltaRuleRanges<double> delta_rule_ranges<double>();

}  // namespace espalier::ESPALIER_SIMD
