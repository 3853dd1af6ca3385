// One gradient of a case computed by several ranks, threads of this process, and put together whole.
#pragma once

#include <string>
#include <vector>

#include "tests/equivalence/fixture.h"
#include "tests/support/in_process.h"

namespace espalier::testing {

struct WholeOutcome {
  std::vector<Outcome> ranks;  // as each of them saw it
  at::Tensor gradient;         // flat, float64, in the table of one rank
};

// Every rank makes the whole model from the case's seed, keeps its part and computes the gradient as one process does.
// Required on the way: ranks that hold the same part of a parameter have the same gradient of it, bit for bit, and
// padding has none.
WholeOutcome run_layout(const Case& c, const Degrees& degrees, DType dtype = DType::float64);

// Expects the gradient, loss and log-probs (values) of one process under the layout; `one` in float64.
void expect_as_one_process(const Case& c, const Degrees& degrees, const Outcome& one);

// Expects the same of every plan of these budgets, each with one process first.
void expect_all_plans(const Case& c, const std::vector<std::int64_t>& budgets, const std::vector<Degrees>& layouts);

// Below each prompt eleven waves of one response, for ranks of cp that divide the path: to divide such waves, too,
// costs more than to deal one to each of eleven ranks. A twelfth has none of its own.
Case eleven_waves();

// The same rollouts for a critic.
Case as_critic(Case c);

}  // namespace espalier::testing
