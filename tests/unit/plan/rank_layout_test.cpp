// A step on every rank of a layout, and the layout that is found for a number of processes.
#include "espalier/plan/rank_layout.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/forecast/communication.h"
#include "espalier/forecast/communicators.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/forecast/planned_machine.h"
#include "espalier/plan/dealing.h"
#include "espalier/plan/layout_search.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;

class Layouts : public ::testing::Test {
 protected:
  Layouts() {
    for (std::int32_t group = 0; group < 16; ++group)
      for (Rollout& rollout : group_of(600, 100, 4, 100000 * group)) batch_.push_back(std::move(rollout));
    trees_ = build_prefix_trees(batch_, ShareMode::whole_trees);
    options_.dtype = DType::bfloat16, options_.setting.device.cuda = true;
    options_.memory_budget = h100_.memory_bytes;
  }

  LayoutProblem problem(const ModelShape& shape, Choice<Sharding> shard = Sharding::none) const {
    return {batch_, trees_, shape, options_, h100_, shard};
  }

  MachineProfile h100_ = planned_machine("h100", DType::bfloat16);
  std::vector<Rollout> batch_;
  std::vector<PrefixTree> trees_;
  PlanOptions options_;
  ModelShape llama_ = testing::llama_3_8b(), moe_ = testing::qwen3_30b_a3b();
};

TEST_F(Layouts, OneRankIsThePlanOfOneProcess) {
  options_.must_fit = false;
  const StepPlan plan = make_plan(batch_, trees_, llama_, options_, h100_);
  const LayoutPlan one = plan_layout(problem(llama_), {});
  EXPECT_EQ(one.seconds, plan.chosen.seconds);
  EXPECT_EQ(one.bytes.peak(), plan.chosen.bytes.peak());
  EXPECT_EQ(one.parameters, llama_.parameters());
  EXPECT_EQ(one.communication_seconds, 0);
  EXPECT_EQ(one.bubble, 0);
}

// tp 8, dp 4: the world, tp, dp, and the sums of gradients over dp have a communicator each; of experts one more,
// of stages two, and one more for states along cp.
TEST_F(Layouts, CommunicatorsOfNcclTakeMemoryOfEachRank) {
  EXPECT_EQ(used_communicators({}, true, true), 0);
  EXPECT_EQ(used_communicators({.dp = 8}, false, true), 2);
  EXPECT_EQ(used_communicators({.tp = 8, .dp = 4}, false, false), 4);
  EXPECT_EQ(used_communicators({.tp = 8, .dp = 4}, true, false), 5);
  EXPECT_EQ(used_communicators({.tp = 8, .pp = 2, .dp = 4}, false, false), 6);
  EXPECT_EQ(used_communicators({.cp = 2, .dp = 4}, false, true),
            used_communicators({.cp = 2, .dp = 4}, false, false) + 1)
      << "gradients of states go back along cp";
  EXPECT_EQ(communicator_bytes({.dp = 8}, llama_), 2 * 24 * ((4 << 20) + 524288 + 4915200));
  options_.schedule = Schedule::dense, options_.memory_budget = 0;
  const LayoutPlan on_gpus = plan_layout(problem(llama_), {.tp = 8, .dp = 4});
  EXPECT_EQ(on_gpus.communicator_bytes, communicator_bytes({.tp = 8, .dp = 4}, llama_));
  EXPECT_NE(explain(on_gpus).find("NCCL holds "), std::string::npos);
  EXPECT_EQ(to_json(on_gpus)["ranks"]["communicator_bytes"], on_gpus.communicator_bytes);
  const auto constant = [&](const Degrees& degrees) {
    return ActivationBytes(LocalShape(llama_, degrees, {}), DType::bfloat16, {}, options_.setting).constant();
  };
  const std::int64_t weights = constant({}) - constant({.dp = 4});
  EXPECT_EQ(-weights, communicator_bytes({.dp = 4}, llama_)) << "the plan of a rank counts them";
  options_.setting.device.cuda = false;
  const LayoutPlan on_cpus = plan_layout(problem(llama_), {.tp = 8, .dp = 4});
  EXPECT_EQ(on_cpus.communicator_bytes, 0);
  EXPECT_EQ(explain(on_cpus).find("NCCL"), std::string::npos);
}

TEST_F(Layouts, WeightsAndRowsAreSharded) {
  options_.schedule = Schedule::phased, options_.memory_budget = 0;
  const LayoutPlan one = plan_layout(problem(llama_), {}), split = plan_layout(problem(llama_), {.tp = 8, .dp = 4});
  EXPECT_NEAR(static_cast<double>(split.parameters), static_cast<double>(llama_.parameters()) / 8, 1e6);  // norms
  EXPECT_LT(split.bytes.peak(), one.bytes.peak() / 4);
  EXPECT_EQ(split.ranks.size(), 4u);
  EXPECT_DOUBLE_EQ(split.balance, 1) << "16 equal trees on 4 ranks";
  EXPECT_EQ(split.trunk_forwards, one.trunk_forwards) << "no prompt on two ranks";
  std::int64_t rows = 0;
  double flops = 0;
  for (const RankCost& rank : split.ranks) rows += rank.rows, flops += 8 * rank.cost.flops;
  EXPECT_EQ(rows, one.ranks.front().rows);
  EXPECT_NEAR(flops / one.ranks.front().cost.flops, 1, 1e-3) << "key/value heads and all are divided by 8";
  EXPECT_GT(split.communication_seconds, 0);
}

TEST_F(Layouts, StagesHaveTheirLayersAndWaitForEachOther) {
  options_.schedule = Schedule::phased, options_.memory_budget = 0;
  const LayoutPlan two = plan_layout(problem(llama_), {.pp = 2}), four = plan_layout(problem(llama_), {.pp = 4});
  EXPECT_EQ(two.ranks.size(), 2u);
  EXPECT_GT(two.bubble, 0);
  EXPECT_GT(four.bubble, two.bubble);
  EXPECT_LT(four.bytes.peak(), two.bytes.peak());
  const TrafficBytes& first = four.ranks.front().traffic.bytes;
  EXPECT_GT(first.a.pp + first.b.pp, 0);
}

// Rows of a set are sharded over cp, weights are not.
TEST_F(Layouts, ContextDividesRows) {
  const LayoutPlan one = plan_layout(problem(llama_), {}), split = plan_layout(problem(llama_), {.cp = 4});
  EXPECT_EQ(split.parameters, one.parameters);
  EXPECT_LT(split.ranks.front().cost.flops, 0.3 * one.ranks.front().cost.flops);
}

// A wave that is dealt whole is held whole; of a divided trunk a rank holds its rows.
TEST_F(Layouts, MemoryUnderContextIsThatOfTheEnginesPlan) {
  options_.schedule = Schedule::phased, options_.memory_budget = 0;
  const LayoutPlan split = plan_layout(problem(llama_), {.cp = 4});
  const StepPlan plan = make_plan(batch_, trees_, LocalShape(llama_, {.cp = 4}, {}), options_, h100_);
  EXPECT_EQ(split.bytes.a, plan.chosen.bytes.a);
  EXPECT_EQ(split.bytes.b, plan.chosen.bytes.b);
  EXPECT_EQ(split.bytes.c, plan.chosen.bytes.c);
}

TEST_F(Layouts, ExpertsAreSpread) {
  const LayoutPlan split = plan_layout(problem(moe_), {.dp = 8, .ep = 8});
  const double experts = 48.0 * 128 * 3 * 768 * 2048, rest = static_cast<double>(moe_.parameters()) - experts;
  EXPECT_NEAR(static_cast<double>(split.parameters), rest + experts / 8, 1);
  const TrafficBytes& bytes = split.ranks.front().traffic.bytes;
  EXPECT_GT(bytes.b.ep, 0);
  EXPECT_EQ(bytes.reduction.dp, static_cast<std::int64_t>(4 * rest)) << "experts are nobody else's";
}

TEST_F(Layouts, AHeavyTreeIsCut) {
  options_.schedule = Schedule::phased, options_.memory_budget = 0;
  batch_ = group_of(600, 400, 32);
  trees_ = build_prefix_trees(batch_, ShareMode::whole_trees);
  const LayoutPlan one = plan_layout(problem(llama_), {.tp = 8}),
                   split = plan_layout(problem(llama_), {.tp = 8, .dp = 4});
  EXPECT_GT(split.trunk_forwards, one.trunk_forwards);
  EXPECT_LT(split.compute_seconds, 0.5 * one.compute_seconds);
  std::int64_t rows = 0, parts = 0;
  for (const RankCost& rank : split.ranks) rows += rank.rows, parts += rank.trees;
  EXPECT_GE(parts, 4);
  // The prompt once more for every part, and the last token of it for each of a few waves.
  EXPECT_LE(rows, one.ranks.front().rows + parts * 610);
}

TEST_F(Layouts, WhatDoesNotDivideIsRefused) {
  EXPECT_THROW(plan_layout(problem(llama_), {.tp = 3}), OptionError);
  EXPECT_THROW(plan_layout(problem(llama_), {.pp = 33}), OptionError);
  EXPECT_THROW(plan_layout(problem(llama_), {.dp = 2, .ep = 2}), OptionError);
}

// In bfloat16: an eighth of 18 bytes a parameter; rooms for two layers, an end and a norm, 6 bytes each element; and a
// place for the sum of the largest part of a unit. 8 divides all of them.
TEST_F(Layouts, ShardedWeightsAreHeldInPartsAndRooms) {
  options_.schedule = Schedule::phased, options_.memory_budget = 0;
  const LayoutPlan whole = plan_layout(problem(llama_), {.dp = 8}),
                   parts = plan_layout(problem(llama_, Sharding::full), {.dp = 8});
  const std::int64_t M = llama_.hidden, end = llama_.vocabulary * M;
  const std::int64_t layer = layer_parameters(llama_, llama_.at(0)).parameters();
  const std::int64_t rooms = 6 * (2 * layer + end + M) + 4 * end / 8;
  for (const auto phase : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c})
    EXPECT_EQ(whole.bytes.*phase - parts.bytes.*phase, 18 * llama_.parameters() * 7 / 8 - rooms);
  EXPECT_GT(parts.ranks.front().traffic.bytes.b.dp, 0);
  EXPECT_EQ(parts.ranks.front().traffic.bytes.reduction.dp, 0);
  const FoundLayout found = find_layout(problem(llama_, Sharding::full), 8);
  for (const TriedLayout& tried : found.tried)
    EXPECT_EQ(tried.degrees.full, tried.degrees.dp * tried.degrees.cp > 1) << text_of_degrees(tried.degrees);
}

// Every wave brings all weights together: over slow links fewer, larger ones are taken, as far as memory goes.
TEST_F(Layouts, ShardedWeightsAreBroughtToFewerAndLargerWaves) {
  batch_.clear();
  for (std::int32_t group = 0; group < 64; ++group)
    for (Rollout& rollout : group_of(600, 400, 16, 100000 * group)) batch_.push_back(std::move(rollout));
  trees_ = build_prefix_trees(batch_, ShareMode::whole_trees);
  const LayoutPlan chosen = plan_layout(problem(llama_, Sharding::full), {.dp = 16});
  ASSERT_TRUE(chosen.fits());
  const auto given = [](const LayoutPlan& layout) {
    const TrafficBytes& bytes = layout.ranks.front().traffic.bytes;
    return bytes.a.dp + bytes.b.dp + bytes.c.dp;
  };
  for (const std::int64_t rows : {2048, 8192, 16384}) {
    options_.token_budget = rows;
    const LayoutPlan smaller = plan_layout(problem(llama_, Sharding::full), {.dp = 16});
    EXPECT_LE(chosen.seconds, smaller.seconds) << rows;
    EXPECT_LT(given(chosen), given(smaller)) << rows;
  }
}

// 8B parameters, 16 bytes each in bfloat16 (weights, gradients, masters, moments) is more than one H100 has.
TEST_F(Layouts, TheFoundLayoutFitsAndNoneThatFitsIsFaster) {
  const FoundLayout found = find_layout(problem(llama_), 8);
  ASSERT_TRUE(found.best.fits()) << found.reason;
  EXPECT_EQ(found.best.degrees.ranks(), 8);
  EXPECT_GT(found.best.degrees.tp * found.best.degrees.pp, 1);
  for (const TriedLayout& tried : found.tried) EXPECT_TRUE(!tried.fits || tried.seconds >= found.tried.front().seconds);
  EXPECT_NE(found.reason.find("of 8 processes"), std::string::npos);
  const FoundLayout narrow = find_layout(problem(llama_), 8, {.tp = true, .cp = false, .pp = false});
  EXPECT_EQ(narrow.best.degrees.cp * narrow.best.degrees.pp, 1);
  EXPECT_THROW(find_layout(problem(llama_), 7, {.cp = false, .pp = false, .dp = false}), OptionError);
}

TEST_F(Layouts, WhereNothingFitsTheSmallestIsShown) {
  options_.memory_budget = std::int64_t{1} << 30;
  const FoundLayout found = find_layout(problem(llama_), 2);
  EXPECT_FALSE(found.best.fits());
  EXPECT_GT(found.best.missing_bytes, 0);
}

}  // namespace
}  // namespace espalier
