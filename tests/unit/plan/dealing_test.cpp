// Trees dealt to ranks.
#include "espalier/plan/dealing.h"
#include "espalier/mixers/attention/shape.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

using Ranks = std::vector<std::int64_t>;

TEST(Dealing, TheHeaviestGoesToWhoeverHasLeast) {
  EXPECT_EQ(deal_by_weight(std::vector<double>{1, 5, 3, 2}, 2), (Ranks{0, 0, 1, 1}));
  EXPECT_EQ(deal_by_weight(std::vector<double>{1, 1, 1}, 5), (Ranks{0, 1, 2})) << "some ranks have none";
  EXPECT_EQ(deal_by_weight(std::vector<double>{}, 3), Ranks{});
}

// Four responses of 10 tokens: after a prompt of 1000 they cost about 1040 rows, not 4040.
TEST(Dealing, ASharedPromptIsChargedOnce) {
  std::vector<Rollout> batch;
  for (const int prompt : {1000, 1})
    for (int i = 0; i < 4; ++i) {
      Rollout rollout;
      rollout.prompt_ids.assign(static_cast<std::size_t>(prompt), 7);
      rollout.prompt_ids.front() = prompt;
      rollout.response_ids.assign(10, 20 + i);
      rollout.loss_mask.assign(10, 1);
      batch.push_back(rollout);
    }
  ModelShape shape;
  shape.hidden = 256, shape.vocabulary = 1000;
  shape.layer = attention_layers(2, {.heads = 4, .kv_heads = 4, .head_dim = 64}, 512);
  const std::vector<PrefixTree> trees = build_prefix_trees(batch, ShareMode::whole_trees);
  ASSERT_EQ(trees.size(), 2u);
  MachineProfile machine = default_profile(DeviceType::cpu, DType::float32, 2);
  machine.seconds_per_call = 0;
  PlanOptions shared, dense;
  dense.schedule = Schedule::dense;
  const double once = seconds_of_trees(batch, trees, shape, shared, machine)[0];
  const double four_times = seconds_of_trees(batch, trees, shape, dense, machine)[0];
  EXPECT_GT(four_times, 2.5 * once);
}

std::vector<Rollout> group(int prompt, int responses) {
  std::vector<Rollout> batch;
  for (int i = 0; i < responses; ++i) {
    Rollout rollout;
    rollout.prompt_ids.assign(20, prompt);
    rollout.response_ids.assign(200, 20 + i);
    rollout.loss_mask.assign(200, 1);
    batch.push_back(rollout);
  }
  return batch;
}

std::vector<std::vector<PrefixTree>> dealt(const std::vector<Rollout>& batch, std::int64_t ranks) {
  ModelShape shape;
  shape.hidden = 256, shape.vocabulary = 1000;
  shape.layer = attention_layers(2, {.heads = 4, .kv_heads = 4, .head_dim = 64}, 512);
  MachineProfile machine = default_profile(DeviceType::cpu, DType::float32, 2);
  machine.seconds_per_call = 0, machine.bytes_per_second = 1e15;  // all cost is that of rows
  return deal_trees(build_prefix_trees(batch, ShareMode::whole_trees), ranks, batch, shape, {}, machine).by_rank;
}

TEST(Dealing, ATreeHeavierThanAFairShareIsCutAndNoRolloutIsLost) {
  std::vector<Rollout> batch = group(1, 30);
  for (const Rollout& rollout : group(2, 2)) batch.push_back(rollout);
  const auto ranks = dealt(batch, 4);
  std::vector<int> seen(batch.size());
  for (const std::vector<PrefixTree>& trees : ranks) {
    EXPECT_FALSE(trees.empty());
    for (const PrefixTree& tree : trees)
      for (const std::int32_t rollout : tree.leaf_order) ++seen[static_cast<std::size_t>(rollout)];
  }
  EXPECT_EQ(seen, std::vector<int>(batch.size(), 1));
}

// Every cut computes the prompt once more.
TEST(Dealing, ATreeIsCutIntoAsManyPartsAsThereAreRanks) {
  for (const std::int64_t ranks : {2, 4, 8})
    for (const std::vector<PrefixTree>& trees : dealt(group(1, 32), ranks)) {
      ASSERT_EQ(trees.size(), 1u) << ranks;
      EXPECT_EQ(trees.front().leaf_order.size(), static_cast<std::size_t>(32 / ranks));
    }
}

// Where ranks have equally many of them.
TEST(Dealing, EqualTreesStayWhole) {
  std::vector<Rollout> batch;
  for (int prompt = 1; prompt <= 6; ++prompt)
    for (const Rollout& rollout : group(prompt, 4)) batch.push_back(rollout);
  for (const std::int64_t ranks : {2, 3, 6}) {
    std::size_t trees = 0;
    for (const auto& of_rank : dealt(batch, ranks)) trees += of_rank.size();
    EXPECT_EQ(trees, 6u) << ranks;
  }
}

}  // namespace
}  // namespace espalier
