#include "tests/parallel/layouts.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>

namespace espalier::testing {
namespace {

const bool kOneThread = (at::set_num_threads(1), true);  // of one process, too: the cases are small

void expect_same_series(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  // A log-prob is a sum of O(M) rounded terms of size O(10): 1e-11 is 1e4 units in the last place of 10.
  for (std::size_t t = 0; t < got.size(); ++t) ASSERT_NEAR(got[t], expected[t], 1e-11) << "token " << t;
}

// The whole gradient of a rank's parameters, of which several may keep a part each.
at::Tensor whole_gradient(const std::vector<Outcome>& ranks, const ParameterTable& table, const Degrees& degrees,
                          std::size_t rank) {
  if (!table.sharded()) return ranks[rank].gradient;
  at::Tensor out = at::full({table.size()}, NAN, at::kDouble);
  for (const Parameter& p : table.parameters()) {
    const Axis axis = table.unit_of(p)->experts ? Axis::expert_replicas : Axis::replicas;
    std::int64_t nth = 0;
    for (const int holder : ranks_along(axis, static_cast<std::int64_t>(rank), degrees)) {
      const Kept kept = table.kept(p, nth++);
      out.narrow(0, p.offset + kept.first, kept.count)
          .copy_(ranks[static_cast<std::size_t>(holder)].gradient.narrow(0, kept.place, kept.count));
    }
  }
  return out;
}

}  // namespace

WholeOutcome run_layout(const Case& c, const Degrees& degrees, DType dtype) {
  const ParameterTable whole(shape_of(c), Parameters::trained);
  WholeOutcome out;
  out.ranks.resize(static_cast<std::size_t>(degrees.ranks()));
  std::vector<ParameterTable> tables;
  for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank)
    tables.emplace_back(LocalShape(shape_of(c), degrees, place_of(rank, degrees)), Parameters::trained);
  run_ranks(degrees, [&](const Mesh& mesh) {
    out.ranks[static_cast<std::size_t>(mesh.world.rank())] = run_case(c, dtype, mesh);
  });
  std::vector<at::Tensor> gradients;
  for (std::size_t rank = 0; rank < out.ranks.size(); ++rank)
    gradients.push_back(whole_gradient(out.ranks, tables[rank], degrees, rank));
  out.gradient = at::full({whole.size()}, NAN, at::kDouble);
  for (const bool counted : {true, false})
    for (std::size_t rank = 0; rank < out.ranks.size(); ++rank)
      for (const Parameter& p : tables[rank].parameters()) {
        const at::Tensor local = parameter_in(gradients[rank], p), own = without_padding(local, p.shard);
        const at::Tensor all = parameter_in(out.gradient, whole.at(p.name));
        if (counted && p.shard.counted) put_part(all, p.shard, own);
        EXPECT_TRUE(counted || at::equal(part_of(all, p.shard), own)) << p.name << " on rank " << rank;
        EXPECT_TRUE(local.count_nonzero().equal(own.count_nonzero())) << "padding of " << p.name << " on rank " << rank;
      }
  return out;
}

void expect_as_one_process(const Case& c, const Degrees& degrees, const Outcome& one) {
  const WholeOutcome run = run_layout(c, degrees);
  const Worst worst = worst_parameter(c, run.gradient, one.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  for (const Outcome& rank : run.ranks) {
    EXPECT_NEAR(rank.loss, one.loss, kFloat64 * std::max(1.0, std::abs(one.loss)));
    EXPECT_EQ(rank.report.trunk_rows, run.ranks.front().report.trunk_rows);
    // Ranks of dp may cut a tree that is too heavy for one of them, sharded weights want larger waves: trunks differ.
    const bool same_plan = c.options.schedule != "auto" && degrees.dp == 1 && !degrees.full;
    EXPECT_TRUE(!same_plan || rank.report.trunk_rows == one.report.trunk_rows);
    ASSERT_EQ(rank.report.series.size(), one.report.series.size());
    for (std::size_t i = 0; i < one.report.series.size(); ++i) {
      expect_same_series(rank.report.series[i].logprob, one.report.series[i].logprob);
      expect_same_series(rank.report.series[i].entropy, one.report.series[i].entropy);
    }
    for (std::size_t i = 0; i < one.critic.values.size(); ++i)
      expect_same_series(rank.critic.values[i], one.critic.values[i]);
  }
}

void expect_all_plans(const Case& c, const std::vector<std::int64_t>& budgets, const std::vector<Degrees>& layouts) {
  for (const Plan& plan : all_plans(budgets)) {
    const Case planned = with(c, plan);
    const Outcome one = run_case(planned);
    for (const Degrees& degrees : layouts) {
      SCOPED_TRACE(text_of(text_of_degrees(degrees), ", ", plan.name, ", ", c.family, c.critic ? ", critic" : "",
                           ", seed ", c.seed));
      expect_as_one_process(planned, degrees, one);
    }
  }
}

Case eleven_waves() {
  Case c = with(ragged("qwen3"), {"", "phased", 7, "keep"});
  c.rollouts.groups = 2, c.rollouts.group_size = {11, 11};
  c.rollouts.prompt_length = {8, 14}, c.rollouts.response_length = {6, 6};
  c.rollouts.shared_start = c.rollouts.empty_response = c.rollouts.equal_response = 0;
  c.rollouts.nested_prompt = c.rollouts.continues = c.rollouts.late_difference = 0;
  c.options.path_state = "divide";
  return c;
}

Case as_critic(Case c) {
  c.critic = c.rollouts.values = true;
  c.options.gamma = 0.9, c.options.lam = 0.8;
  return c;
}

}  // namespace espalier::testing
