// Pictures of plans of every kind, against what is counted from the rollouts and the plan's own totals.
#include "espalier/report/plan_picture.h"

#include <gtest/gtest.h>

#include <functional>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

PlanOptions with(Schedule schedule, std::int64_t budget = 0) {
  PlanOptions options;
  options.schedule = schedule;
  options.token_budget = budget;
  return options;
}

PlanPicture picture_of(const std::vector<Rollout>& batch, const PlanOptions& options) {
  return read_picture(plan_picture(planned(batch, options), batch), "here");
}

std::int64_t rows_of(const PlanPicture& picture, const std::string& phase) {
  std::int64_t rows = 0;
  for (const PictureEntry& entry : picture.schedule) rows += entry.phase == phase ? entry.rows : 0;
  return rows;
}

// A prompt of 30 tokens that a second group continues by 10 more.
std::vector<Rollout> nested() {
  std::vector<Rollout> batch = group_of(30, 5, 3);
  for (Rollout& rollout : group_of(40, 6, 3)) {
    for (std::int32_t& token : rollout.response_ids) token += 50000;
    batch.push_back(std::move(rollout));
  }
  return batch;
}

TEST(PlanPicture, TheTreeOfAGroupIsItsPromptAndItsResponses) {
  const PlanPicture picture = picture_of(group_of(40, 12, 4), with(Schedule::phased));
  ASSERT_EQ(picture.trees.size(), 1u);
  EXPECT_EQ(picture.trees[0].rollouts, 4);
  EXPECT_EQ(picture.trees[0].logical, 4 * 52);
  EXPECT_EQ(picture.trees[0].physical, 40 + 4 * 12);
  ASSERT_EQ(picture.nodes.size(), 5u);
  EXPECT_EQ(picture.nodes[0].parent, -1);
  EXPECT_EQ(picture.nodes[0].tokens, 40);
  EXPECT_EQ(picture.nodes[0].prompt_tokens, 40);
  EXPECT_EQ(picture.nodes[0].rollouts, 4);
  for (int i = 1; i <= 4; ++i) {
    EXPECT_EQ(picture.nodes[i].parent, 0);
    EXPECT_EQ(picture.nodes[i].begin, 40);
    EXPECT_EQ(picture.nodes[i].tokens, 12);
    EXPECT_EQ(picture.nodes[i].prompt_tokens, 0);
    EXPECT_EQ(picture.nodes[i].rollouts, 1);
  }
}

TEST(PlanPicture, EverySchedulesEntriesHoldItsRows) {
  for (const std::vector<Rollout>& batch : {group_of(40, 12, 4), nested()})
    for (const Schedule schedule : {Schedule::dense, Schedule::packed, Schedule::phased, Schedule::automatic})
      for (const std::int64_t budget : {0, 30}) {
        const StepPlan plan = planned(batch, with(schedule, budget));
        const PlanPicture picture = read_picture(plan_picture(plan, batch), "here");
        EXPECT_EQ(picture.entry_count, static_cast<std::int64_t>(picture.schedule.size()));
        EXPECT_EQ(rows_of(picture, "A"), plan.trunk_rows);
        EXPECT_EQ(rows_of(picture, "C"), plan.trunk_rows);
        EXPECT_EQ(rows_of(picture, "B"), plan.wave_rows);
        EXPECT_EQ(picture.logical, plan.logical_rows);
        EXPECT_EQ(picture.physical, plan.physical_rows());
        double seconds = 0;
        std::int64_t level = 0;
        for (const PictureEntry& entry : picture.schedule) {
          if (entry.phase == "C") --level;
          EXPECT_EQ(entry.level, level) << "trunks close in the order in which they opened, backwards";
          if (entry.phase == "A") ++level;
          EXPECT_EQ(entry.tree, 0);
          EXPECT_EQ(entry.trees, 1);
          seconds += entry.seconds;
        }
        EXPECT_EQ(level, 0);
        // The same sum in another order: at most as many roundings as entries.
        EXPECT_NEAR(seconds, picture.seconds, picture.seconds * 1e-13 * static_cast<double>(picture.entry_count + 1));
      }
}

TEST(PlanPicture, NestedPromptsAreNodesInsideNodes) {
  const PlanPicture picture = picture_of(nested(), with(Schedule::phased, 16));
  ASSERT_EQ(picture.trees.size(), 1u);
  std::int64_t deepest = 0;
  bool inner = false;
  for (const PictureEntry& entry : picture.schedule) deepest = std::max(deepest, entry.level);
  for (const PictureNode& node : picture.nodes)
    inner = inner || (node.parent == 0 && node.begin == 30 && node.tokens == 10 && node.prompt_tokens == 10);
  EXPECT_TRUE(inner);
  EXPECT_GE(deepest, 2);
}

TEST(PlanPicture, AWaveOfSeveralTreesSaysSo) {
  std::vector<Rollout> batch = group_of(10, 4, 1);
  for (Rollout& rollout : group_of(10, 4, 1, 100000)) batch.push_back(std::move(rollout));
  const PlanPicture picture = picture_of(batch, with(Schedule::dense));
  ASSERT_EQ(picture.schedule.size(), 1u);
  EXPECT_EQ(picture.schedule[0].trees, 2);
  EXPECT_EQ(picture.tree_count, 2);
}

TEST(PlanPicture, LargeStepsAreCutAndCounted) {
  std::vector<Rollout> batch;
  for (int g = 0; g < 120; ++g)
    for (Rollout& rollout : group_of(20, 3, 4, 100000 * g)) batch.push_back(std::move(rollout));
  const PlanPicture picture = picture_of(batch, with(Schedule::phased, 20));
  EXPECT_EQ(picture.tree_count, 120);
  EXPECT_EQ(picture.nodes.size(), 200u);
  EXPECT_EQ(picture.trees.size(), 40u);
  EXPECT_EQ(picture.schedule.size(), 300u);
  EXPECT_GT(picture.entry_count, 300);
  // One tree that is larger than all the room there is.
  const PlanPicture wide = picture_of(group_of(20, 3, 400), with(Schedule::phased));
  ASSERT_EQ(wide.trees.size(), 1u);
  EXPECT_EQ(wide.trees[0].nodes, 200);
  EXPECT_EQ(wide.trees[0].node_count, 401);
}

TEST(PlanPicture, AnEmptyStepHasAnEmptyPicture) {
  const PlanPicture picture = picture_of({}, with(Schedule::dense));
  EXPECT_TRUE(picture.trees.empty());
  EXPECT_TRUE(picture.schedule.empty());
}

TEST(PlanPicture, WhatItDoesNotWriteIsRefused) {
  const std::vector<Rollout> batch = group_of(40, 12, 4);
  const Json good = plan_picture(planned(batch, with(Schedule::phased)), batch);
  const auto expect_refused = [&](const char* what, const std::function<void(Json&)>& change) {
    Json broken = good;
    change(broken);
    try {
      read_picture(broken, "metrics.jsonl:7");
      ADD_FAILURE() << what;
    } catch (const InputError& error) {
      EXPECT_EQ(error.text().where, "metrics.jsonl:7");
      EXPECT_FALSE(error.text().remedy.empty());
    }
  };
  expect_refused("no object", [](Json& p) { p = nullptr; });
  expect_refused("no nodes", [](Json& p) { p.erase("nodes"); });
  expect_refused("a node that is a number", [](Json& p) { p["nodes"][1] = 3; });
  expect_refused("a parent after its child", [](Json& p) { p["nodes"][1]["parent"] = 1; });
  expect_refused("a second root", [](Json& p) { p["nodes"][1]["parent"] = -1; });
  expect_refused("more nodes than there are", [](Json& p) { p["trees"][0]["nodes"] = 6; });
  expect_refused("a tree of nothing", [](Json& p) { p["trees"][0]["nodes"] = 0; });
  expect_refused("a negative length", [](Json& p) { p["nodes"][1]["tokens"] = -1; });
  expect_refused("a huge length", [](Json& p) { p["nodes"][1]["tokens"] = std::int64_t{1} << 60; });
  expect_refused("a fraction", [](Json& p) { p["nodes"][1]["tokens"] = 1.5; });
  expect_refused("an unknown phase", [](Json& p) { p["schedule"][0]["phase"] = "D"; });
  expect_refused("a phase that is markup", [](Json& p) { p["schedule"][0]["phase"] = "<b>"; });
  expect_refused("negative seconds", [](Json& p) { p["schedule"][0]["seconds"] = -1; });
  expect_refused("a tower of levels", [](Json& p) { p["schedule"][0]["level"] = 100000; });
  expect_refused("no rows", [](Json& p) { p.erase("rows"); });
}

}  // namespace
}  // namespace espalier
