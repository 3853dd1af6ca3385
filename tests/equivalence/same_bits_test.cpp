// Where sums have a defined order (base/defined_sums.h), every plan of a step gives the log-probs of the dense plan to
// the last bit.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/attention/attention.h"
#include "tests/equivalence/fixture.h"
#include "tests/with_products.h"

namespace espalier::testing {
namespace {

class SameBits : public ::testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { omp_set_num_threads(threads_); }

 private:
  const WithProducts own_{true};
  int threads_ = omp_get_max_threads();
};

// Every schedule, every state, and budgets below, at and above the rows there are, on one thread and on two.
void expect_every_plan(const std::string& family, DType dtype) {
  Case c = ragged(family);
  c.seed = 41;
  c.rollouts.policy = PolicyAge::none;
  omp_set_num_threads(1);
  const Outcome dense = run_case(with(c, {"dense", "dense", 0, "auto"}), dtype);
  int threads = 1;
  for (const Plan& plan :
       {Plan{"dense", "dense", 7, "auto"}, Plan{"packed", "packed", 512, "auto"},
        Plan{"packed, small waves", "packed", 7, "auto"}, Plan{"keep", "phased", 1, "keep"},
        Plan{"keep, one wave", "phased", 512, "keep"}, Plan{"recompute", "phased", 7, "recompute"},
        Plan{"offload", "phased", 7, "offload"}, Plan{"waves recompute", "phased", 20, "keep", "recompute"}}) {
    threads = 3 - threads;
    SCOPED_TRACE(plan.name + ", " + family + ", " + name_of(dtype) + ", " + std::to_string(threads) + " threads");
    omp_set_num_threads(threads);
    expect_same_bits(run_case(with(c, plan), dtype), dense);
  }
  SCOPED_TRACE("path offloaded, " + family + ", " + name_of(dtype));
  Case offloaded = with(c, {"keep", "phased", 7, "keep"});
  offloaded.options.path_state = "offload";
  expect_same_bits(run_case(offloaded, dtype), dense);
}

TEST_P(SameBits, InEveryPlanFloat32) { expect_every_plan(GetParam(), DType::float32); }
TEST_P(SameBits, InEveryPlanFloat64) { expect_every_plan(GetParam(), DType::float64); }
TEST_P(SameBits, InEveryPlanBfloat16) { expect_every_plan(GetParam(), DType::bfloat16); }

// A record has the log-probs that it has among others when it stands alone, and in any order of the records.
TEST_P(SameBits, InEveryOrderOfRecords) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case c = ragged(GetParam());
    c.rollouts.policy = PolicyAge::none;
    const Outcome all = run_case(c, dtype);
    c.edit = [](std::vector<Rollout>& rollouts, const ModelState&) { std::reverse(rollouts.begin(), rollouts.end()); };
    Outcome reversed = run_case(c, dtype);
    std::reverse(reversed.report.series.begin(), reversed.report.series.end());
    expect_same_bits(reversed, all);
    for (std::size_t i = 0; i < std::min<std::size_t>(all.report.series.size(), 2); ++i) {
      c.edit = [i](std::vector<Rollout>& rollouts, const ModelState&) { rollouts = {rollouts[i]}; };
      const Outcome alone = run_case(c, dtype);
      Outcome same;
      same.report.series = {all.report.series[i]};
      expect_same_bits(alone, same);
    }
  }
}

// Sets with fused products: all but the baseline.
TEST_P(SameBits, UnderEveryInstructionSet) {
  const InstructionSet before = instruction_set();
  if (!processor_has(InstructionSet::avx512)) GTEST_SKIP() << "one set with fused products on this processor";
  for (const DType dtype : {DType::float32, DType::float64, DType::bfloat16}) {
    SCOPED_TRACE(name_of(dtype));
    Case c = ragged(GetParam());
    c.rollouts.policy = PolicyAge::none;
    force_instruction_set(InstructionSet::avx512);
    const Outcome wide = run_case(c, dtype);
    force_instruction_set(InstructionSet::avx2);
    expect_same_bits(run_case(c, dtype), wide);
    force_instruction_set(before);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SameBits, ::testing::Values("llama-bias", "qwen3", "qwen3-moe"),
                         [](const auto& info) { return name_of_family(info.param); });

class SameBitsOfTable : public ::testing::TestWithParam<std::string> {
 private:
  const WithProducts own_{true};
};

TEST_P(SameBitsOfTable, InPlansThatDifferMost) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Case c = ragged(GetParam());
    c.rollouts.policy = PolicyAge::none;
    const Outcome dense = run_case(with(c, {"dense", "dense", 0, "auto"}), dtype);
    for (const Plan& plan : {Plan{"packed, small waves", "packed", 7, "auto"}, Plan{"keep", "phased", 1, "keep"},
                             Plan{"recompute", "phased", 20, "recompute"}}) {
      SCOPED_TRACE(plan.name + ", " + name_of(dtype));
      expect_same_bits(run_case(with(c, plan), dtype), dense);
    }
  }
}

// One plan gives each weight's gradient the same bits on any number of threads; attention shares the smallest problems.
TEST_P(SameBitsOfTable, OfGradientsOnAnyNumberOfThreads) {
  const int before = omp_get_max_threads();
  attention::set_least_shared_work(0);
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const Case c = with(ragged(GetParam()), {"keep", "phased", 20, "keep"});
    omp_set_num_threads(1);
    const Outcome alone = run_case(c, dtype);
    for (const int threads : {2, 3}) {
      omp_set_num_threads(threads);
      const Outcome shared = run_case(c, dtype);
      EXPECT_TRUE(shared.gradient.equal(alone.gradient)) << name_of(dtype) << ", " << threads << " threads";
      EXPECT_EQ(shared.loss, alone.loss);
    }
  }
  attention::set_least_shared_work(attention::kLeastSharedWork);
  omp_set_num_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Models, SameBitsOfTable, ::testing::ValuesIn(families_of_table()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace espalier::testing
