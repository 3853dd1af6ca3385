// The delta rule with a decay for each key channel, of one head on one thread (ops/delta_rule.h); compiled once for
// each instruction set. Row by row in both directions: with decays of channels the products of a block of rows are no
// longer products of matrices.
//
// Row t, with G = diag(gamma_t), S the state before it and S' the state after it:
//   e = v - (G S)^T k   u = beta e   S' = G S + k u^T   o = S'^T q
// Backward, where D = dS' + q do^T, with dS' from the rows behind it:
//   du = D^T k   dbeta = du . e   dv = beta du   dq = S' do   dk = D u - G S dv
//   d log gamma_i = gamma_i S_i . (D_i - k_i dv)   dS = G (D - k dv^T)
//
// Shapes: n rows, dk and dv channels; a state is [dk, dv], HeadRows::decay [n, dk]. A is float or double.
#pragma once

#include "espalier/base/compiled_sets.h"
#include "espalier/ops/cpu/delta_rule_ranges.h"

namespace espalier {

// Rows whose states the backward holds at once.
inline constexpr std::int64_t kChannelBlockRows = 16;

// Numbers of type A that `backward` needs as scratch; `forward` needs forward_room.
constexpr std::int64_t channel_backward_room(std::int64_t key_dim, std::int64_t value_dim) {
  return (kChannelBlockRows + kStateBlockRows / kChannelBlockRows + 1) * key_dim * value_dim +
         2 * (kChannelBlockRows + 1) * value_dim;
}

template <class A>
struct ChannelDecayRanges {
  // log gamma = rate softplus(x) and gamma, of one row. Overwrites both [dk].
  void (*decays)(std::int64_t key_dim, const A* x, A rate, A* log_decay, A* decay);
  // As DeltaRuleRanges::forward.
  void (*forward)(const HeadRows<A>& head, A* state, A* o, A* room);
  // As DeltaRuleRanges::backward, with log_decay [n, dk].
  void (*backward)(const HeadRows<A>& head, const A* start, const A* grad_o, A* grad, const HeadGradients<A>& gradients,
                   A* room);
};

#define ESPALIER_CHANNEL_DECAY_RANGES(set)      \
  namespace set {                               \
  template <class A>                            \
  ChannelDecayRanges<A> channel_decay_ranges(); \
  }
ESPALIER_EACH_SET(ESPALIER_CHANNEL_DECAY_RANGES)
#undef ESPALIER_CHANNEL_DECAY_RANGES

}  // namespace espalier
