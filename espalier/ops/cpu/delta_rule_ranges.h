// The gated delta rule of one value head on one thread (ops/delta_rule.h); compiled once for each instruction set.
//
// Shapes: n rows, dk and dv channels; a state is [dk, dv]. A is float or double.
#pragma once

#include <cstdint>

namespace espalier {

template <class A>
struct HeadRows {
  std::int64_t rows, key_dim, value_dim;
  const A *q, *k, *v;     // [n, dk], [n, dk], [n, dv]; q and k normalised, q scaled
  const A *decay, *beta;  // [n]; gamma and beta
};

template <class A>
struct DeltaRuleRanges {
  // Rows [begin, end): overwrites `state` with the one after them, and o [n, dv] where it is not null.
  void (*forward)(const HeadRows<A>& head, std::int64_t begin, std::int64_t end, A* state, A* o);
  // One row: `before` is the state before it, `after` the one behind it; `grad` holds what came to the latter and is
  // overwritten with what comes to the former. Overwrites grad_q, grad_k [dk], grad_v [dv] and two numbers: the
  // gradient of log gamma, and of beta. `room`: [3 dv].
  void (*backward)(const HeadRows<A>& head, std::int64_t row, const A* before, const A* after, const A* grad_o, A* grad,
                   A* grad_q, A* grad_k, A* grad_v, A* grad_log_decay, A* grad_beta, A* room);
};

#define ESPALIER_DELTA_RULE_RANGES(set)   \
  namespace set {                         \
  template <class A>                      \
  DeltaRuleRanges<A> delta_rule_ranges(); \
  }
ESPALIER_DELTA_RULE_RANGES(baseline)
ESPALIER_DELTA_RULE_RANGES(avx2)
ESPALIER_DELTA_RULE_RANGES(avx512)
#undef ESPALIER_DELTA_RULE_RANGES

}  // namespace espalier
