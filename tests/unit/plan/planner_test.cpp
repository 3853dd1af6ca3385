// Plans over generated workloads: what must hold whatever the schedule, the budget and the sharing.
#include "espalier/plan/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <set>

#include "espalier/base/error.h"
#include "espalier/forecast/memory_model.h"
#include "tests/support/layers.h"
#include "tests/support/make_rollouts.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

constexpr Schedule kSchedules[] = {Schedule::automatic, Schedule::dense, Schedule::packed, Schedule::phased};
constexpr ShareMode kShares[] = {ShareMode::whole_trees, ShareMode::prompts, ShareMode::off};

PlanOptions with(Schedule schedule, std::int64_t budget, SavedState state = SavedState::automatic) {
  PlanOptions options;
  options.schedule = schedule;
  options.token_budget = budget;
  options.trunk_state = state;
  return options;
}

template <class Visit>
void walk(const std::vector<PlanItem>& items, std::vector<const PlanItem*>& open, Visit visit) {
  for (const PlanItem& item : items) {
    visit(item, open);
    open.push_back(&item);
    walk(item.below, open, visit);
    open.pop_back();
  }
}

// For every rollout, depth by depth: rebuilds from the rows alone what the row sees, by the mask rule on row numbers,
// and compares with the rollout's own tokens. Shares no arithmetic with validate().
void expect_rows_see_their_rollout(const StepPlan& plan, const std::vector<Rollout>& batch) {
  std::map<std::pair<std::int32_t, std::int32_t>, int> held;  // (rollout, depth) -> rows that hold it
  std::vector<const PlanItem*> open;
  walk(plan.items, open, [&](const PlanItem& item, const std::vector<const PlanItem*>& above) {
    std::vector<std::int32_t> path;  // tokens
    for (const PlanItem* trunk : above)
      for (const RowSegment& s : trunk->set.segments)
        for (std::int32_t d = s.begin; d < s.end; ++d) path.push_back(batch[s.rollout].token_at(d));
    struct Row {
      std::int32_t token, end;
    };
    std::vector<Row> rows;
    for (const RowSegment& s : item.set.segments)
      for (std::int32_t d = s.begin; d < s.end; ++d) rows.push_back({batch[s.rollout].token_at(d), s.subtree_end});
    ASSERT_EQ(rows.size(), static_cast<std::size_t>(item.set.rows));
    std::int64_t pairs = 0;
    for (const RowSegment& s : item.set.segments)
      for (std::int32_t d = s.begin; d < s.end; ++d) {
        const std::int32_t i = s.row + d - s.begin;
        std::vector<std::int32_t> sees = path;
        for (std::int32_t j = 0; j <= i; ++j)
          if (i < rows[j].end) sees.push_back(rows[j].token);
        pairs += static_cast<std::int64_t>(sees.size());
        ASSERT_EQ(sees.size(), static_cast<std::size_t>(d + 1));
        for (std::int32_t r = s.first; r < s.last; ++r) {
          const std::int32_t rollout = item.set.rollouts[r];
          ++held[{rollout, d}];
          for (std::int32_t at = 0; at <= d; ++at) ASSERT_EQ(sees[at], batch[rollout].token_at(at));
        }
      }
    EXPECT_EQ(pairs, item.set.pairs);
  });
  for (std::size_t r = 0; r < batch.size(); ++r)
    for (std::int32_t d = 0; d < batch[r].length(); ++d)
      ASSERT_EQ((held[{static_cast<std::int32_t>(r), d}]), 1) << "rollout " << r << " depth " << d;
}

class DrawnBatches : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(DrawnBatches, HaveValidPlansOnly) {
  constexpr std::uint64_t kSeeds = 8;  // of each parameter
  const std::int64_t budgets[] = {0, 1, 2, 3, 7, 16, 64, 1000};
  for (std::uint64_t seed = GetParam() * kSeeds; seed < (GetParam() + 1) * kSeeds; ++seed) {
    const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(seed), seed);
    for (ShareMode share : kShares) {
      const std::vector<PrefixTree> trees = build_prefix_trees(batch, share);
      for (Schedule schedule : kSchedules)
        for (std::int64_t budget : budgets)
          for (SavedState state : {SavedState::keep, SavedState::recompute}) {
            SCOPED_TRACE(text_of("seed ", seed, " share ", static_cast<int>(share), " ", name_of(schedule), " budget ",
                                 budget, " ", name_of(state)));
            const StepPlan plan =
                make_plan(batch, trees, testing::tiny_shape(), with(schedule, budget, state), testing::test_profile());
            ASSERT_NO_THROW(validate(plan, batch));
            if (budget > 0) {
              ASSERT_LE(plan.max_rows, std::max<std::int64_t>(budget, 2));
            }
          }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DrawnBatches, ::testing::Range(std::uint64_t{0}, std::uint64_t{8}));

// validate() counts the pairs of every set anew, those within windows too.
TEST(Planner, EveryPlanOfAModelWithAWindowIsValidAndCheaper) {
  ModelShape windowed = testing::tiny_shape();
  testing::change_attention(windowed, [](AttentionShape& a, std::size_t layer) { a.window = layer == 1 ? 0 : 5; });
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(seed), seed);
    const std::vector<PrefixTree> trees = build_prefix_trees(batch, ShareMode::whole_trees);
    for (Schedule schedule : {Schedule::dense, Schedule::packed, Schedule::phased})
      for (std::int64_t budget : {0, 1, 3, 16}) {
        SCOPED_TRACE(text_of("seed ", seed, " ", name_of(schedule), " budget ", budget));
        const auto planned_for = [&](const ModelShape& shape) {
          return make_plan(batch, trees, shape, with(schedule, budget, SavedState::keep), testing::test_profile());
        };
        const StepPlan plan = planned_for(windowed), full = planned_for(testing::tiny_shape());
        ASSERT_NO_THROW(validate(plan, batch));
        ASSERT_NO_THROW(validate(full, batch));
        EXPECT_LE(plan.chosen.flops, full.chosen.flops);
        StepPlan wrong = plan;
        wrong.window = 4;
        if (plan.max_path_rows + plan.max_rows > 40) {
          EXPECT_THROW(validate(wrong, batch), InternalError);
        }
      }
  }
}

TEST(Planner, EveryRowSeesExactlyItsRollout) {
  for (std::uint64_t seed = 100; seed < 130; ++seed) {
    const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(seed, 12), seed);
    for (Schedule schedule : kSchedules)
      for (std::int64_t budget : {1, 4, 9, 40, 1000}) {
        SCOPED_TRACE(text_of("seed ", seed, " ", name_of(schedule), " budget ", budget));
        expect_rows_see_their_rollout(planned(batch, with(schedule, budget)), batch);
      }
  }
}

TEST(Planner, AllLogprobsGivesMaskedTokensEdgesToo) {
  std::vector<Rollout> batch = group_of(5, 6, 3);
  batch[0].loss_mask.assign(6, 0);
  batch[1].loss_mask = {1, 0, 0, 1, 0, 0};
  PlanOptions options = with(Schedule::phased, 7);
  const auto edges_in = [&](const StepPlan& plan) {
    std::int64_t edges = 0;
    std::set<std::int32_t> finished;
    std::vector<const PlanItem*> open;
    walk(plan.items, open, [&](const PlanItem& item, const std::vector<const PlanItem*>&) {
      edges += static_cast<std::int64_t>(edges_of(item.set, batch, plan.all_logprobs).size());
      finished.insert(item.finished.begin(), item.finished.end());
    });
    return std::pair(edges, finished);
  };
  EXPECT_EQ(edges_in(planned(batch, options)), std::pair(std::int64_t{8}, std::set<std::int32_t>({1, 2})));
  options.all_logprobs = true;
  EXPECT_EQ(edges_in(planned(batch, options)), std::pair(std::int64_t{18}, std::set<std::int32_t>({0, 1, 2})));
}

TEST(Planner, PhasedRunsThePromptOnceAndRepeatsItsLastToken) {
  const std::vector<Rollout> batch = group_of(100, 20, 6);
  const StepPlan plan = planned(batch, with(Schedule::phased, 101));
  validate(plan, batch);
  ASSERT_EQ(plan.items.size(), 1u);
  EXPECT_EQ(plan.items[0].kind, ItemKind::trunk);
  EXPECT_EQ(plan.items[0].set.rows, 99);
  EXPECT_EQ(plan.items[0].set.outputs, 0);
  ASSERT_EQ(plan.items[0].below.size(), 2u);  // (101 - 1) / 20 = 5 responses at most; two waves of three
  for (const PlanItem& wave : plan.items[0].below) {
    EXPECT_EQ(wave.set.rows, 61);
    EXPECT_EQ(wave.path_rows, 99);
    EXPECT_EQ(wave.set.segments[0].multiplicity, 3);
    EXPECT_EQ(wave.set.outputs, 1 + 3 * 19);
  }
  EXPECT_EQ(plan.physical_rows(), 99 + 2 + 120);
  EXPECT_EQ(plan.logical_rows, 720);
}

TEST(Planner, PhasedMakesATrunkOfAShortPromptToo) {
  const std::vector<Rollout> batch = group_of(3, 20, 6);
  const StepPlan plan = planned(batch, with(Schedule::phased, 1000));
  validate(plan, batch);
  EXPECT_EQ(plan.trunks, 1);
  EXPECT_EQ(plan.trunk_rows, 2);
  EXPECT_EQ(plan.waves, 1);
}

TEST(Planner, PhasedFindsThePromptsBelowACommonHeader) {
  for (std::int32_t header : {1, 4}) {
    std::vector<Rollout> batch;
    for (std::int32_t g = 0; g < 3; ++g)
      for (Rollout rollout : group_of(50, 20, 6, 100000 * g)) {
        for (std::int32_t i = 0; i < header; ++i) rollout.prompt_ids[i] = 7 + i;
        batch.push_back(rollout);
      }
    const StepPlan plan = planned(batch, with(Schedule::phased, 1000));
    validate(plan, batch);
    EXPECT_EQ(plan.trees.size(), 1u);
    EXPECT_EQ(plan.trunks, header == 1 ? 3 : 4);
    EXPECT_EQ(plan.waves, 3);
  }
}

TEST(Planner, PackedRepeatsThePromptInEveryWave) {
  const std::vector<Rollout> batch = group_of(100, 20, 6);
  const StepPlan plan = planned(batch, with(Schedule::packed, 160));
  EXPECT_EQ(plan.trunks, 0);
  EXPECT_EQ(plan.waves, 2);
  EXPECT_EQ(plan.physical_rows(), 2 * 100 + 120);
  EXPECT_EQ(planned(batch, with(Schedule::packed, 220)).physical_rows(), 220);
}

TEST(Planner, DenseSharesNothing) {
  const std::vector<Rollout> batch = group_of(100, 20, 6);
  const StepPlan plan = planned(batch, with(Schedule::dense, 240));
  EXPECT_EQ(plan.waves, 3);
  EXPECT_EQ(plan.physical_rows(), plan.logical_rows);
}

TEST(Planner, APromptOfOneTokenNeedsNoTrunk) {
  const std::vector<Rollout> batch = group_of(1, 20, 4);
  const StepPlan plan = planned(batch, with(Schedule::phased, 41));
  validate(plan, batch);
  EXPECT_EQ(plan.trunks, 0);
  EXPECT_EQ(plan.waves, 2);
}

TEST(Planner, ALongResponseIsAChainOfTrunks) {
  const std::vector<Rollout> batch = group_of(10, 95, 1);
  const StepPlan plan = planned(batch, with(Schedule::phased, 30));
  validate(plan, batch);
  EXPECT_EQ(plan.trunks, 3);
  EXPECT_EQ(plan.waves, 1);
  EXPECT_EQ(plan.physical_rows(), 105);  // a chain repeats nothing
  EXPECT_EQ(plan.items[0].below[0].below[0].below[0].finished, std::vector<std::int32_t>{0});
}

TEST(Planner, ARolloutThatEndsAtTheForkIsCountedInTheFirstItemBelow) {
  std::vector<Rollout> batch = group_of(10, 8, 4);
  batch[2].response_ids.clear();
  batch[2].loss_mask.clear();
  const StepPlan plan = planned(batch, with(Schedule::phased, 9));
  validate(plan, batch);
  const std::vector<PlanItem>* below = &plan.items[0].below;  // the prompt itself is a chain at this budget
  while (below->front().kind == ItemKind::trunk) below = &below->front().below;
  ASSERT_EQ(below->size(), 3u);
  EXPECT_EQ((*below)[0].set.segments[0].multiplicity, 2);
  EXPECT_EQ((*below)[1].set.segments[0].multiplicity, 1);
}

// The whole batch under one first token: every group must still be planned on its own.
TEST(Planner, ACommonFirstTokenDoesNotHideTheGroups) {
  std::vector<Rollout> batch;
  for (std::int32_t g = 0; g < 6; ++g)
    for (Rollout rollout : group_of(900, 100, 8, 100000 * g)) {
      rollout.prompt_ids[0] = 7;
      batch.push_back(rollout);
    }
  const StepPlan plan = planned(batch, with(Schedule::automatic, 1024));
  validate(plan, batch);
  EXPECT_EQ(plan.trees.size(), 1u);
  EXPECT_EQ(plan.trunks, 6);
  EXPECT_LT(plan.chosen.flops, 1.1 * plan.dense.flops / plan.ceiling);
}

TEST(Planner, NestsTrunksWhereTurnsBranch) {
  std::vector<Rollout> batch;
  for (std::int32_t turn = 0; turn < 3; ++turn)
    for (Rollout rollout : group_of(1500, 300, 8, 0)) {
      // Tokens 1000..1499 of the prompt differ among three branches.
      for (std::int32_t i = 1000; i < 1500; ++i) rollout.prompt_ids[i] += 100000 * (turn + 1);
      batch.push_back(rollout);
    }
  const StepPlan plan = planned(batch, with(Schedule::automatic, 1000));
  validate(plan, batch);
  EXPECT_EQ(plan.max_path_rows, 1499);
  EXPECT_EQ(plan.trees[0].schedule, Schedule::phased);
  EXPECT_LT(plan.chosen.flops, 1.05 * plan.dense.flops / plan.ceiling);
}

TEST(Planner, AutoIsNeverAboveTheOthersInModelledTime) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(seed, 40), seed);
    for (std::int64_t budget : {std::int64_t{0}, std::int64_t{8 + static_cast<std::int64_t>(seed) % 60}}) {
      SCOPED_TRACE(text_of("seed ", seed, " budget ", budget));
      const StepPlan plan = planned(batch, with(Schedule::automatic, budget));
      ASSERT_LE(plan.chosen.seconds, plan.dense.seconds);
      ASSERT_LE(plan.chosen.seconds, plan.packed.seconds);
      ASSERT_LE(plan.chosen.seconds, plan.phased.seconds);
      ASSERT_GE(plan.ceiling, 1 - 1e-12);
    }
  }
}

TEST(Planner, CostsOfTheItemsAddUpToTheStep) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(seed), seed);
    for (Schedule schedule : kSchedules) {
      const StepPlan plan = planned(batch, with(schedule, 20));
      double flops = 0, seconds = 0;
      std::vector<const PlanItem*> open;
      walk(plan.items, open, [&](const PlanItem& item, const std::vector<const PlanItem*>&) {
        flops += item.flops, seconds += item.seconds;
      });
      EXPECT_NEAR(flops / plan.chosen.flops, 1, 1e-12);  // the same numbers added in the same order
      EXPECT_NEAR(seconds / plan.chosen.seconds, 1, 1e-12);
    }
  }
}

// Dense FLOPs depend on the rollouts alone: against a count rollout by rollout.
TEST(Planner, DenseFlopsAreThoseOfTheRolloutsOneByOne) {
  const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(3), 3);
  const ModelShape shape = testing::tiny_shape();
  double expected = 0;
  for (const Rollout& rollout : batch) {
    Work work;
    for (std::int32_t d = 0; d < rollout.length(); ++d) {
      work.rows += 1, work.pairs += d + 1;
      const std::int32_t t = d + 1 - rollout.prompt_length();
      if (t >= 0 && t < rollout.response_length() && rollout.loss_mask[t])
        work.outputs += 1, work.output_pairs += d + 1;
    }
    expected += step_flops(shape, work, {}, SavedState::keep).total();
  }
  EXPECT_NEAR(planned(batch, with(Schedule::dense, 1000)).chosen.flops / expected, 1, 1e-12);
}

TEST(Planner, StaysWithinTheMemoryBudget) {
  const std::vector<Rollout> batch = group_of(1500, 120, 12);
  const StepPlan free = planned(batch, with(Schedule::automatic, 0));
  PlanOptions options;
  options.memory_budget = free.chosen.bytes.peak();
  EXPECT_EQ(planned(batch, options).chosen.seconds, free.chosen.seconds);
  std::int64_t last = free.chosen.bytes.peak();
  int fitted = 0;
  const std::int64_t constant = ActivationBytes(testing::tiny_shape(), DType::float32).constant();
  for (int part = 95; part > 0; part -= 5) {
    options.memory_budget = constant + (free.chosen.bytes.peak() - constant) * part / 100;
    try {
      const StepPlan plan = planned(batch, options);
      validate(plan, batch);
      EXPECT_LE(plan.chosen.bytes.peak(), options.memory_budget);
      EXPECT_TRUE(plan.chosen.fits);
      last = plan.chosen.bytes.peak();
      ++fitted;
    } catch (const MemoryBudgetError& error) {
      EXPECT_NE(std::string(error.what()).find("at least"), std::string::npos);
      break;
    }
  }
  EXPECT_GE(fitted, 5);
  EXPECT_LT(last, constant + (free.chosen.bytes.peak() - constant) / 2);  // recompute and smaller waves help
}

TEST(Planner, KeepsWhatFitsWhenSomethingDoesNot) {
  std::vector<Rollout> batch = group_of(3000, 100, 8);
  for (const Rollout& other : group_of(600, 100, 8, 100000)) batch.push_back(other);
  PlanOptions options = with(Schedule::phased, 700);
  options.trunk_state = SavedState::keep;
  const std::int64_t keep = planned(batch, options).chosen.bytes.peak();
  options.trunk_state = SavedState::recompute;
  const std::int64_t recompute = planned(batch, options).chosen.bytes.peak();
  ASSERT_LT(recompute, keep);
  options.trunk_state = SavedState::automatic;
  options.memory_budget = (keep + recompute) / 2;
  const StepPlan plan = planned(batch, options);
  validate(plan, batch);
  std::set<std::string> states;
  for (const PlanItem& item : plan.items) states.insert(name_of(item.state));
  EXPECT_EQ(states.size(), 2u);  // the long tree is recomputed, the short one kept
}

TEST(Planner, SaysHowMuchIsNeeded) {
  const std::vector<Rollout> batch = group_of(50, 10, 4);
  PlanOptions options;
  options.memory_budget = 1 << 20;
  try {
    planned(batch, options);
    FAIL() << "a megabyte cannot hold the process";
  } catch (const MemoryBudgetError& error) {
    EXPECT_NE(std::string(error.what()).find("weights, gradients and optimizer state are"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("the process itself takes"), std::string::npos);
    EXPECT_EQ(error.exit_code(), 5);
  }
}

TEST(Planner, OptionsOfAPlanAreReadFromTheOptions) {
  Options options;
  options.trunk_state = "recompute";
  options.schedule = "phased";
  options.memory_budget = "2GiB";
  options.token_budget = 77;
  options.dtype = "bfloat16";
  const PlanOptions out = plan_options_of(options);
  EXPECT_EQ(out.trunk_state, SavedState::recompute);
  EXPECT_EQ(out.schedule, Schedule::phased);
  EXPECT_EQ(out.memory_budget, std::int64_t{2} << 30);
  EXPECT_EQ(out.token_budget, 77);
  EXPECT_EQ(out.dtype, DType::bfloat16);
}

TEST(Planner, RefusesABudgetThatCutsAPathIntoThousandsOfTrunks) {
  const std::vector<Rollout> batch = group_of(20000, 10, 2);
  EXPECT_THROW(planned(batch, with(Schedule::phased, 1)), OptionError);
}

TEST(Planner, SmallTreesShareWaves) {
  std::vector<Rollout> batch;
  for (std::int32_t g = 0; g < 10; ++g)
    for (const Rollout& rollout : group_of(40, 10, 2, 10000 * g)) batch.push_back(rollout);
  const StepPlan plan = planned(batch, with(Schedule::automatic, 300));
  validate(plan, batch);
  EXPECT_EQ(plan.waves, 2);  // ten trees of 60 rows
  EXPECT_EQ(plan.trunks, 0);
  for (const TreePlan& tree : plan.trees) EXPECT_EQ(tree.schedule, Schedule::packed);
}

TEST(Planner, IsAPureFunction) {
  const std::vector<Rollout> batch = testing::make_rollouts(testing::any_options(11), 11);
  EXPECT_EQ(explain(planned(batch, with(Schedule::automatic, 20))),
            explain(planned(batch, with(Schedule::automatic, 20))));
}

TEST(Planner, AnEmptyBatchIsAnEmptyPlan) {
  const std::vector<Rollout> batch;
  const StepPlan plan = planned(batch, {});
  validate(plan, batch);
  EXPECT_EQ(plan.items.size(), 0u);
  EXPECT_EQ(plan.ceiling, 1);
}

// 100,000 rollouts of 4k tokens must be planned in 2 s; a tenth of them here, in a debug build too.
TEST(Planner, IsFastOnManyRollouts) {
  std::vector<Rollout> batch(10000);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    Rollout& rollout = batch[i];
    rollout.prompt_ids.assign(1024, static_cast<std::int32_t>(i / 16));
    rollout.response_ids.assign(3072, static_cast<std::int32_t>(20000 + i));
    rollout.loss_mask.assign(3072, 1);
  }
  const std::vector<PrefixTree> trees = build_prefix_trees(batch, ShareMode::whole_trees);
  const std::clock_t start = std::clock();  // of the process: other programs do not count
  const StepPlan plan = make_plan(batch, trees, testing::llama_3_8b(), {}, testing::test_profile());
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_LT(seconds, 2);
  EXPECT_EQ(plan.logical_rows, 10000 * 4096);
}

}  // namespace
}  // namespace espalier
