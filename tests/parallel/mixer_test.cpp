// A layer's state at a fork belongs to its mixer alone: with another recurrence in place of the gated delta rule,
// here a sum of the rows so far, trunks, waves, chains, stored states, plans and ranks give the gradient of autograd
// without knowing it.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/device/device.h"
#include "espalier/ops/cpu/operations.h"
#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

using at::Tensor;

// o_t = S_t = S_{t-1} + v_t + q_t[0] k_t[0]; S has V of the state's N numbers, the others are left alone.
Tensor sum_of_rows(const Tensor& q_TK, const Tensor& k_TK, const Tensor& v_TV) {
  return (v_TV + q_TK.slice(1, 0, 1) * k_TK.slice(1, 0, 1)).cumsum(0);
}

struct Columns {
  Tensor q, k, v;
};
Columns columns_of(const RecurrenceShape& shape, const Tensor& projected_TW, const StateRun& run) {
  const RecurrenceShape::Columns at = shape.columns(0);
  const Tensor rows = projected_TW.slice(0, run.begin, run.end);
  return {rows.narrow(1, at.q, shape.key_dim), rows.narrow(1, at.k, shape.key_dim),
          rows.narrow(1, at.v, shape.value_width())};
}
Tensor sum_in(const RecurrenceShape& shape, const Tensor& state_N) { return state_N.narrow(0, 0, shape.value_width()); }

void running_sum(const DeltaRuleProblem& problem, const Tensor& o_TV) {
  for (const StateRun& run : problem.runs) {
    const Columns x = columns_of(problem.shape, problem.projected_TW, run);
    Tensor out = sum_of_rows(x.q, x.k, x.v);
    if (run.start_N.defined()) out = out + sum_in(problem.shape, run.start_N);
    if (run.end_N.defined()) sum_in(problem.shape, run.end_N).copy_(out[-1]);
    if (o_TV.defined()) o_TV.slice(0, run.begin, run.end).copy_(out);
  }
}

void add_running_sum_backward(const DeltaRuleProblem& problem, const Tensor& grad_o_TV,
                              const DeltaRuleGradients& gradients) {
  for (auto run = problem.runs.rbegin(); run != problem.runs.rend(); ++run) {
    // dL/dS_t is the sum over the rows from t on, and of what came to the state that the run left.
    Tensor grad = grad_o_TV.slice(0, run->begin, run->end).flip(0).cumsum(0).flip(0);
    if (run->grad_end_N.defined()) grad = grad + sum_in(problem.shape, run->grad_end_N);
    if (run->grad_start_N.defined()) sum_in(problem.shape, run->grad_start_N).add_(grad[0]);
    const Columns x = columns_of(problem.shape, problem.projected_TW, *run);
    const Columns out = columns_of(problem.shape, gradients.projected_TW, *run);
    const RecurrenceShape::Columns at = problem.shape.columns(0);
    const Tensor rows = gradients.projected_TW.slice(0, run->begin, run->end);
    rows.narrow(1, 0, problem.shape.channels()).zero_();
    rows.slice(1, at.b).zero_();
    out.v.copy_(grad);
    const Tensor both = grad.sum(1, true);
    out.q.slice(1, 0, 1).copy_(both * x.k.slice(1, 0, 1));
    out.k.slice(1, 0, 1).copy_(both * x.q.slice(1, 0, 1));
  }
}

class Mixers : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    static const Operations operations = [] {
      Operations changed = cpu::operations();
      changed.delta_rule = running_sum;
      changed.add_delta_rule_backward = add_running_sum_backward;
      return changed;
    }();
    static const std::unique_ptr<Device> device = cpu::device_with(operations);
    bind_device(*device);
    replace_delta_rule(sum_of_rows);
  }
};

Case of_running_sums(std::uint64_t seed) {
  Case c;
  c.family = "qwen3-next-plain";
  c.rollouts = ragged_rollouts();
  c.seed = seed;
  return c;
}

TEST_F(Mixers, EveryPlanOfAnotherRecurrenceEqualsAutograd) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const Case c = of_running_sums(seed);
    const OracleResult expected = run_oracle(c);
    std::int64_t trunks = 0, stored = 0;
    for (const Plan& plan : all_plans({0, 1, 2, 7, 20})) {
      SCOPED_TRACE(text_of(plan.name, ", seed ", seed));
      const Outcome run = run_case(with(c, plan));
      const Worst worst = worst_parameter(c, run.gradient, expected.gradient);
      EXPECT_LE(worst.error, kFloat64) << worst.parameter;
      EXPECT_NEAR(run.loss, expected.loss, kFloat64 * std::max(1.0, std::abs(expected.loss)));
      for (const PlanItem& item : run.report.plan.items) trunks += item.kind == ItemKind::trunk;
      stored += run.report.plan.chosen.stored_bytes > 0;
    }
    EXPECT_GT(trunks, 0);
    EXPECT_GT(stored, 0);
  }
}

TEST_F(Mixers, RanksGiveTheGradientOfAnotherRecurrence) {
  const Case c = of_running_sums(4);
  const OracleResult expected = run_oracle(c);
  for (const Degrees& degrees : {Degrees{.dp = 2}, Degrees{.dp = 3, .full = true}, Degrees{.pp = 2}}) {
    SCOPED_TRACE(text_of_degrees(degrees));
    for (const Plan& plan : all_plans({2})) {
      SCOPED_TRACE(plan.name);
      const Worst worst = worst_parameter(c, run_layout(with(c, plan), degrees).gradient, expected.gradient);
      EXPECT_LE(worst.error, kFloat64) << worst.parameter;
    }
  }
}

// The delta rule's own operations do not give this oracle's gradient: the cases above ran the other recurrence.
TEST_F(Mixers, TheRecurrenceIsNotTheDeltaRule) {
  const Case c = of_running_sums(5);
  const OracleResult sums = run_oracle(c);
  replace_delta_rule(nullptr);
  const OracleResult rule = run_oracle(c);
  replace_delta_rule(sum_of_rows);
  EXPECT_GT(worst_parameter(c, rule.gradient, sums.gradient).error, 1e-3);
}

}  // namespace
}  // namespace espalier::testing
