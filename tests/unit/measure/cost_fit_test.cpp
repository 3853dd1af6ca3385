// When a fit is kept, and what it is.
#include "espalier/measure/cost_fit.h"

#include <gtest/gtest.h>

#include "tests/support/layers.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

MachineProfile measured_machine() {
  MachineProfile machine = default_profile("cpu", DType::float32, 2);
  machine.source = "measured";
  return machine;
}

const CostParts kPredicted = {1, 0.5, 0.2, 0.3};
const CostParts kFactors = {1.1, 0.9, 1.5, 1.25};

CostFit fit_of(int steps, double rate, double noise = 0) {
  CostFit fit;
  for (int i = 0; i < steps; ++i) fit.add(kPredicted * kFactors, kPredicted, rate * (1 + noise * (i % 3 - 1)));
  return fit;
}

// The fit covers all that an item's work counts, pairs in windows too.
TEST(CostFit, PredictsThePlansOwnSeconds) {
  ModelShape windowed = testing::tiny_shape();
  testing::change_attention(windowed, [](AttentionShape& a, std::size_t layer) { a.window = layer == 1 ? 0 : 50; });
  for (const ModelShape& shape : {testing::tiny_shape(), windowed}) {
    const StepPlan plan = testing::planned(testing::group_of(100, 30, 4), {}, ShareMode::whole_trees, shape);
    const CostModel model(shape, testing::test_profile(), DType::float32);
    EXPECT_DOUBLE_EQ(predicted_parts(plan, model).total(), plan.chosen.seconds) << shape.window();
  }
}

TEST(CostFit, FindsTheFactorOfEveryPart) {
  const MachineProfile machine = measured_machine();
  CostFit fit = fit_of(30, machine.matrix_flops_per_second(1024));
  // Three runs that somebody disturbed move no median.
  for (int i = 0; i < 3; ++i)
    fit.add(kPredicted * CostParts{9, 9, 9, 9}, kPredicted, machine.matrix_flops_per_second(1024));
  EXPECT_EQ(fit.why_not(machine), "");
  const CostParts found = fit.factors(machine);
  EXPECT_DOUBLE_EQ(found.products, kFactors.products);
  EXPECT_DOUBLE_EQ(found.attention, kFactors.attention);
  EXPECT_DOUBLE_EQ(found.rows, kFactors.rows);
  EXPECT_DOUBLE_EQ(found.head, kFactors.head);
}

// Other users of the machine slow a step and the product beside it alike: the factors are a quiet machine's.
TEST(CostFit, HoldsAStepToTheRateOfItsMoment) {
  const MachineProfile machine = measured_machine();
  const double rate = machine.matrix_flops_per_second(1024);
  CostFit fit;
  for (int i = 0; i < 30; ++i) {
    const double slower = 1 + 0.1 * (i % 4);
    fit.add(kPredicted * kFactors * CostParts{slower, slower, slower, slower}, kPredicted, rate / slower);
  }
  EXPECT_EQ(fit.why_not(machine), "");
  EXPECT_DOUBLE_EQ(fit.factors(machine).products, kFactors.products);
  EXPECT_DOUBLE_EQ(fit.factors(machine).head, kFactors.head);
}

TEST(CostFit, KeepsNothingFromFewOrShortSteps) {
  const MachineProfile machine = measured_machine();
  EXPECT_NE(fit_of(23, machine.matrix_flops_per_second(1024)).why_not(machine), "");
  CostFit fit;
  for (int i = 0; i < 100; ++i)
    fit.add({0.01, 0.01, 0.01, 0.01}, {0.01, 0.01, 0.01, 0.01}, machine.matrix_flops_per_second(1024));
  EXPECT_EQ(fit.steps(), 0);
  EXPECT_NE(fit.why_not(machine), "");
}

TEST(CostFit, KeepsNothingFromABusyMachine) {
  const MachineProfile machine = measured_machine();
  const double rate = machine.matrix_flops_per_second(1024);
  EXPECT_NE(fit_of(30, 0.6 * rate).why_not(machine), "");
  EXPECT_NE(fit_of(30, rate, 0.2).why_not(machine), "");
  EXPECT_EQ(fit_of(30, rate, 0.03).why_not(machine), "");
}

TEST(CostFit, LeavesAPartAloneThatTheStepsHardlyHave) {
  const MachineProfile machine = measured_machine();
  CostFit fit;
  for (int i = 0; i < 30; ++i) fit.add({1, 0.03, 0.2, 0.3}, {1, 0.01, 0.2, 0.3}, machine.matrix_flops_per_second(1024));
  EXPECT_EQ(fit.why_not(machine), "");
  EXPECT_EQ(fit.factors(machine).attention, 1);
}

TEST(CostFit, MeasuredPartsAreThoseOfTheProfile) {
  StepProfile profile;
  profile.seconds = {{std::string(part::kPlan), 100},
                     {std::string(part::kProducts), 1},
                     {std::string(part::kAttention), 2},
                     {std::string(part::kRows), 3},
                     {std::string(part::kHead), 4},
                     {std::string(part::kOptimizer), 100},
                     {"other", 0.5}};
  const CostParts parts = measured_parts(profile);
  EXPECT_EQ(parts.products, 1);
  EXPECT_EQ(parts.attention, 2);
  EXPECT_EQ(parts.rows, 3.5);
  EXPECT_EQ(parts.head, 4);
}

}  // namespace
}  // namespace espalier
