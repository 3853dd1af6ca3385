// An item's rows as the model and the head read them, against the rollouts that they come from.
#include "espalier/execute/item_input.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "tests/support/in_process.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

std::vector<std::int32_t> numbers(const at::Tensor& tensor) {
  const at::Tensor host = on_host(tensor).to(at::kInt).contiguous();
  return {host.data_ptr<std::int32_t>(), host.data_ptr<std::int32_t>() + host.numel()};
}

Case two_temperatures() {
  Case c = nested_trunks();
  c.rollouts.temperature_low = 0.5, c.rollouts.temperature_high = 1.5, c.rollouts.mask_gap = 0.3;
  return c;
}

ItemInput input_of(const SmallStep& step, const PlanItem& item, const Group& cp = mesh_of_one().cp) {
  return {item, step.rollouts, step.model->decoder.local(), false, nullptr, {}, step.model->decoder.device(), cp};
}

TEST(ItemInput, RowsAreTheTokensOfTheirRollouts) {
  for (const Plan& plan : all_plans({0, 2, 7})) {
    SCOPED_TRACE(plan.name);
    const SmallStep step(with(two_temperatures(), plan));
    visit_items(step.plan.items, [&](const PlanItem& item) {
      const ItemInput input = input_of(step, item);
      ASSERT_EQ(input.model.rows(), item.set.rows);
      for (const RowSegment& segment : item.set.segments)
        for (std::int32_t depth = segment.begin; depth < segment.end; ++depth) {
          const auto row = static_cast<std::size_t>(segment.row + depth - segment.begin);
          for (std::int32_t r = segment.first; r < segment.last; ++r)  // all rollouts that share the row
            EXPECT_EQ(input.model.id[row], step.rollouts[item.set.rollouts[r]].token_at(depth));
          EXPECT_EQ(input.model.position[row], depth);
          EXPECT_EQ(numbers(input.subtree_end_S)[row], segment.subtree_end);
        }
      EXPECT_EQ(numbers(input.model.id_T), input.model.id) << "on the device";
      EXPECT_EQ(numbers(input.model.position_T), input.model.position);
    });
  }
}

TEST(ItemInput, AnEdgeLeavesTheRowBeforeItsToken) {
  std::int64_t shared = 0;
  for (const Case& c : {nested_trunks(), two_temperatures()}) {
    const SmallStep step(c);
    visit_items(step.plan.items, [&](const PlanItem& item) {
      const ItemInput input = input_of(step, item);
      std::set<std::pair<std::int32_t, double>> outputs;
      const at::Tensor temperature_O = on_host(input.head_edges.temperature_D);
      ASSERT_EQ(input.output.size(), input.edges.size());
      for (std::size_t e = 0; e < input.edges.size(); ++e) {
        const LossEdge& edge = input.edges[e];
        const Rollout& rollout = step.rollouts[edge.rollout];
        const std::int32_t depth = rollout.prompt_length() + edge.position;
        EXPECT_EQ(input.model.position[edge.row], depth - 1);
        EXPECT_EQ(edge.target, rollout.token_at(depth));
        EXPECT_EQ(rollout.loss_mask[edge.position], 1);
        const std::int32_t output = input.output[e];
        EXPECT_EQ(input.model.output_row[output], edge.row);
        EXPECT_EQ(input.model.output_position[output], depth - 1);
        EXPECT_EQ(temperature_O[output].item<double>(), rollout.temperature);
        outputs.insert({edge.row, rollout.temperature});
      }
      EXPECT_EQ(std::ssize(outputs), input.model.outputs()) << "one for each row and temperature";
      EXPECT_EQ(input.model.outputs(), item.set.outputs) << "as planned";
      shared += std::ssize(input.edges) - std::ssize(outputs);
    });
  }
  EXPECT_GT(shared, 0) << "rollouts of one temperature share an output";
}

TEST(ItemInput, ACriticsRowIsOneOutputAtAnyTemperature) {
  SmallStep step(two_temperatures());
  Case c = two_temperatures();
  c.critic = c.rollouts.values = true;
  const SmallStep critic(c);
  std::int64_t of_policy = 0, of_critic = 0;
  visit_items(step.plan.items, [&](const PlanItem& item) { of_policy += input_of(step, item).model.outputs(); });
  visit_items(critic.plan.items, [&](const PlanItem& item) {
    const ItemInput input = input_of(critic, item);
    const std::set<std::int32_t> rows(input.model.output_row.begin(), input.model.output_row.end());
    EXPECT_EQ(std::ssize(rows), input.model.outputs());
    of_critic += input.model.outputs();
  });
  EXPECT_GT(of_policy, of_critic) << "rows of several temperatures";
}

// Ranks of cp have the rows of a sharded set between them, each with its edges.
TEST(ItemInput, SharesOfRanksMakeTheSet) {
  const Case c = two_temperatures();
  const SmallStep whole(c);
  for (const std::int64_t ranks : {2, 3}) {
    std::vector<const PlanItem*> items;
    visit_items(whole.plan.items, [&](const PlanItem& item) { items.push_back(&item); });
    using Edge = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;  // row, target, rollout, position
    std::vector<std::vector<std::int32_t>> ids(items.size());
    std::vector<std::multiset<Edge>> edges(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) ids[i].assign(static_cast<std::size_t>(items[i]->set.rows), -1);
    run_ranks({.cp = ranks}, [&](const Mesh& mesh) {
      for (int turn = 0; turn < mesh.cp.size(); ++turn) {
        mesh.cp.wait_for_all();
        if (turn != mesh.cp.rank()) continue;
        for (std::size_t i = 0; i < items.size(); ++i) {
          const ItemInput input = input_of(whole, *items[i], mesh.cp);
          ASSERT_TRUE(input.shares.has_value());
          const std::vector<std::int32_t> own = numbers(input.sharded.own_T);
          ASSERT_EQ(std::ssize(own), input.model.rows());
          for (std::size_t row = 0; row < own.size(); ++row) {
            EXPECT_EQ(ids[i][own[row]], -1) << "a row of two ranks";
            ids[i][own[row]] = input.model.id[row];
          }
          for (const LossEdge& edge : input.edges)
            edges[i].insert({own[edge.row], edge.target, edge.rollout, edge.position});
          EXPECT_EQ(std::ssize(input.set_edges), std::ssize(input_of(whole, *items[i]).edges));
          EXPECT_EQ(numbers(input.subtree_end_S).size(), ids[i].size()) << "of the whole set";
        }
      }
    });
    for (std::size_t i = 0; i < items.size(); ++i) {
      const ItemInput all = input_of(whole, *items[i]);
      EXPECT_EQ(ids[i], all.model.id);
      std::multiset<Edge> expected;
      for (const LossEdge& edge : all.edges) expected.insert({edge.row, edge.target, edge.rollout, edge.position});
      EXPECT_EQ(edges[i], expected);
    }
  }
}

}  // namespace
}  // namespace espalier::testing
