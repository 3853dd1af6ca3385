// Trees dealt to ranks.
#include "espalier/plan/dealing.h"

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
  shape.layers = 2, shape.hidden = 256, shape.inner = 512, shape.heads = 4, shape.kv_heads = 4, shape.head_dim = 64;
  shape.vocabulary = 1000;
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

}  // namespace
}  // namespace espalier
