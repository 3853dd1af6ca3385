// One step against torch autograd on a plain forward: plan, gradient, loss, log-probs and entropies or values.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/equivalence/fixture.h"

namespace espalier::testing {

void expect_as_autograd(const Case& c, const OracleResult& expected);
void expect_all_plans(const Case& c, const std::vector<std::int64_t>& budgets);

// The same rollouts for a critic: with values, and with returns in every second record.
Case as_critic(Case c);

}  // namespace espalier::testing
