// The gated delta rule of one value head on one thread (ops/delta_rule.h); compiled once for each instruction set.
//
// Rows of a block, with G_i the sum of log gamma over rows up to i, D_ij = e^(G_i - G_j) for j <= i, else 0, S and S'
// the states around the block, N = strictly lower D (K K^T), P = D (Q K^T), w_i = e^(G_last - G_i), B = diag(beta):
//   E = (I + N B)^-1 (V - e^G K S)   U = B E   O = e^G Q S + P U   S' = e^(G_last) S + (w K)^T U
//   dU = P^T dO + w K dS'            dA = (I + B N)^-T dU          dV = B dA        dbeta_i = dA_i . E_i
//   X = D (dO U^T)                   Y = -strictly lower D (dV U^T)
//   dQ = e^G dO S^T + X K            dK = dR + dW,   dR = Y K - e^G dV S^T,   dW = Y^T K + X^T Q + w U dS'^T
//   dS = e^(G_last) dS' + (e^G Q)^T dO - (e^G K)^T dV
//   d log gamma_i = e^(G_last) <S, dS'> + sum_(t >= i) e^(G_t) (q_t . S dO_t - k_t . S dV_t)
//                   + sum_(s < i) w_s U_s . (K dS')_s + sum_(t >= i > s) (X_ts q_t . k_s + Y_ts k_t . k_s)
// Rows that do not read the state first (Mamba-2) have E = V, N = Y = 0 and dR = 0. The forward goes row by row
// instead, so that a row's bits do not depend on the block boundaries; the order of the backward's sums depends on
// the plan anyway. G_i - G_j is summed in double from row j on. So is d log gamma, with exactly the added terms
// subtracted again; otherwise large terms of distant rows would leave rounding errors in rows whose state is fully
// decayed.
//
// Shapes: n rows, dk and dv channels; a state is [dk, dv]. A is float or double.
#pragma once

#include <cstdint>

#include "espalier/base/compiled_sets.h"

namespace espalier {

inline constexpr std::int64_t kStateBlockRows = 64;    // the most rows of a block
inline constexpr std::int64_t kStateStripBytes = 256;  // bytes of a state's rows per pass of the recurrence

template <class A>
struct HeadRows {
  std::int64_t rows, key_dim, value_dim;
  const A *q, *k, *v;                 // [n, dk], [n, dk], [n, dv]; q and k normalised, q scaled
  const A *decay, *log_decay, *beta;  // [n]; gamma, its logarithm, beta. Decays of channels: [n, dk]
  bool reads = true;                  // reads the state before writing it
};

template <class A>
struct HeadGradients {
  A *q, *k, *v;         // [n, dk], [n, dk], [n, dv]
  A *log_decay, *beta;  // [n]; decays of channels: [n, dk]
};

// Numbers of type A that the functions below need as scratch.
constexpr std::int64_t forward_room(std::int64_t key_dim, std::int64_t number_bytes) {
  return key_dim * (kStateStripBytes / number_bytes);
}
constexpr std::int64_t backward_room(std::int64_t key_dim, std::int64_t value_dim) {
  return kStateBlockRows * (3 * kStateBlockRows + 4 * value_dim + key_dim) + 2 * key_dim * value_dim;
}

template <class A>
struct DeltaRuleRanges {
  // Overwrites `state` with the state after the rows, and o [n, dv] if it is not null.
  void (*forward)(const HeadRows<A>& head, A* state, A* o, A* room);
  // At and below the diagonal: the products k k^T and q k^T [n, kStateBlockRows] of value heads that share q and k.
  // room: [dk, kStateBlockRows].
  void (*products)(const HeadRows<A>& head, A* keys, A* queries, A* room);
  // The backward of at most kStateBlockRows rows that begin with state `start`: `grad` holds the gradient of the state
  // after them and is overwritten with the gradient of `start`. Overwrites the gradients of the rows.
  void (*backward)(const HeadRows<A>& head, const A* keys, const A* queries, const A* start, const A* grad_o, A* grad,
                   const HeadGradients<A>& gradients, A* room);
};

#define ESPALIER_DELTA_RULE_RANGES(set)   \
  namespace set {                         \
  template <class A>                      \
  DeltaRuleRanges<A> delta_rule_ranges(); \
  }
ESPALIER_EACH_SET(ESPALIER_DELTA_RULE_RANGES)
#undef ESPALIER_DELTA_RULE_RANGES

}  // namespace espalier
