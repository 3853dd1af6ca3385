// Collectives that go on beside what a rank computes: when they began, from the events of --profile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/parallel/layouts.h"

namespace espalier::testing {
namespace {

using Events = std::vector<CollectiveEvent>;

Case profiled(const std::string& family) {
  Case c = with(ragged(family), {"phased", "phased", 7, "keep"});
  c.options.profile = true;
  return c;
}

Events events_of(const Outcome& rank, const auto& keep) {
  Events out;
  for (const auto& event : rank.report.profile->collectives.events)
    if (keep(*event)) out.push_back(*event);
  return out;
}

Events named(const Outcome& rank, const std::string& call) {
  return events_of(rank, [&](const CollectiveEvent& event) { return event.call == call && !event.of.empty(); });
}

// Layers compute between two moments where heads are divided: their sums over tp begin there.
std::size_t computed_between(const Outcome& rank, double begin, double end) {
  return events_of(rank,
                   [&](const CollectiveEvent& event) {
                     return event.axis == "tp" && event.started > begin && event.started < end;
                   })
      .size();
}

std::vector<std::string> order_of(const Events& events) {
  std::vector<std::string> names;
  for (const CollectiveEvent& event : events) names.push_back(event.of);
  return names;
}

// Three layers: the last one's gradient travels while two are computed, the first one's when the embedding's is left.
TEST(Overlap, GradientsAreSummedWhileTheLayersBelowCompute) {
  const auto ranks = run_layout(profiled("qwen3"), {.tp = 2, .dp = 2}).ranks;
  const std::vector<std::string> order = {"gradient of final norm", "gradient of layer 2", "gradient of layer 1",
                                          "gradient of layer 0", "gradient of embedding"};
  for (const Outcome& rank : ranks) {
    const StepTraffic& traffic = rank.report.profile->collectives;
    const Events sums = named(rank, "sum");
    ASSERT_EQ(order_of(sums), order);
    ASSERT_GT(traffic.last_backward_ended, traffic.last_backward_began);
    const double ended = traffic.last_backward_ended;
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_GT(sums[i].started, traffic.last_backward_began) << "nothing is summed that grows";
      EXPECT_LT(sums[i].started, ended) << sums[i].of;
      EXPECT_GT(computed_between(rank, sums[i].started, ended), 0u) << sums[i].of;
    }
    EXPECT_GT(sums.back().started, ended);
    for (const CollectiveEvent& sum : sums) EXPECT_GT(sum.wanted, ended) << "nobody waits before";
  }
}

// Ranks without trees begin all sums, in the same order, when they have nothing else to do.
TEST(Overlap, ARankWithoutTreesTakesPart) {
  const auto ranks = run_layout(profiled("qwen3"), {.dp = 7}).ranks;
  for (const Outcome& rank : ranks) EXPECT_EQ(order_of(named(rank, "sum")), order_of(named(ranks.front(), "sum")));
  EXPECT_TRUE(std::ranges::any_of(
      ranks, [](const Outcome& rank) { return rank.report.profile->collectives.last_backward_ended == 0; }));
}

// Under --shard full a layer comes while the one before it computes, and its gradient goes while the next one does.
TEST(Overlap, UnitsComeAndGoWhileOthersCompute) {
  for (const Outcome& rank : run_layout(profiled("qwen3"), {.tp = 2, .dp = 2, .full = true}).ranks) {
    const auto of_layers = [&](const std::string& call) {
      return events_of(rank, [&](const CollectiveEvent& event) {
        return event.call == call && event.of.find("layer") != std::string::npos;
      });
    };
    const Events gathers = of_layers("gather"), sums = of_layers("sum and scatter");
    std::size_t beside = 0, left = 0;
    for (std::size_t i = 0; i + 1 < gathers.size(); ++i) {
      const CollectiveEvent &used = gathers[i], &next = gathers[i + 1];
      if (std::abs(used.of.back() - next.of.back()) != 1) continue;  // another pass begins
      const std::size_t computed = computed_between(rank, used.wanted, next.wanted);
      EXPECT_EQ(computed_between(rank, next.started, next.wanted), computed) << next.of << " comes beside " << used.of;
      beside += computed;
    }
    EXPECT_GT(beside, 0u);
    for (const CollectiveEvent& sum : sums) left += computed_between(rank, sum.started, sum.wanted);
    EXPECT_GT(left, 0u);
  }
}

// A layer of a sharded path comes while the one before it computes, and what was added to its gradients goes while the
// next one does. Chains: waves of one trunk run on one of the ranks, or on several.
TEST(Overlap, AShardedPathComesAndGoesWhileOtherLayersCompute) {
  Case c = profiled("qwen3");
  c.options.path_state = "divide";
  for (const Outcome& rank : run_layout(c, {.tp = 2, .cp = 2}).ranks) {
    const Events keys = events_of(rank, [](const CollectiveEvent& event) {
      return event.call == "gather" && event.of.starts_with("path's keys");
    });
    std::size_t beside = 0, left = 0;
    for (const CollectiveEvent& event : keys) beside += computed_between(rank, event.started, event.wanted);
    for (const CollectiveEvent& event : named(rank, "sum and scatter"))
      left += computed_between(rank, event.started, event.wanted);
    EXPECT_GT(beside, 0u);
    EXPECT_GT(left, 0u);
  }
}

}  // namespace
}  // namespace espalier::testing
