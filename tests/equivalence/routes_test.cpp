// Recorded experts are chosen again: own choices change nothing, other choices give what a dense run with them gives,
// and a prefix ends where records differ.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

using Edit = std::function<void(std::vector<Rollout>&, const ModelState&)>;

Case case_of(const std::string& family, const Edit& edit) {
  Case c;
  c.family = family;
  c.rollouts.groups = 3;
  c.rollouts.group_size = {2, 4};
  c.rollouts.prompt_length = {2, 14};
  c.rollouts.response_length = {1, 8};
  c.rollouts.shared_start = 0.4, c.rollouts.equal_response = 0.2, c.rollouts.empty_response = 0.1;
  c.rollouts.nested_prompt = 0.3, c.rollouts.continues = 0.3;
  c.rollouts.policy = PolicyAge::near_old;
  c.edit = edit;
  return c;
}

// Engines do not run the last token: every second record ends before it.
void record_own_choices(std::vector<Rollout>& rollouts, const ModelState& model) {
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    RecordedExperts& routes = rollouts[i].recorded_experts;
    routes = routes_of(model.shape, model.table, on_host(model.weights), rollouts[i]);
    if (i % 2 == 1) routes.ids.resize(static_cast<std::size_t>(--routes.tokens * routes.layers * routes.chosen));
  }
}

// k experts drawn from the seed, ascending.
std::vector<std::uint16_t> drawn_experts(Random& random, const ModelShape& shape) {
  std::vector<std::uint16_t> out;
  std::int64_t left = shape.experts_per_token;
  for (std::int64_t e = 0; e < shape.experts; ++e)
    if (random.integer(0, shape.experts - 1 - e) < left) out.push_back(static_cast<std::uint16_t>(e)), --left;
  return out;
}

// The same experts for the same depth, but from some depth on other ones in every third rollout. Some tokens, and some
// rollouts, have no record.
void record_other_choices(std::vector<Rollout>& rollouts, const ModelState& model) {
  const ModelShape& shape = model.shape;
  const std::int64_t layers = shape.expert_layers();
  Random choice(static_cast<std::uint64_t>(rollouts.size()), 7);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    Rollout& rollout = rollouts[i];
    if (choice.chance(0.15)) continue;
    const std::int64_t parts = i % 3 == 2 ? choice.integer(0, rollout.prompt_length()) : rollout.length();
    rollout.recorded_experts = {
        rollout.length(), static_cast<std::int32_t>(layers), static_cast<std::int32_t>(shape.experts_per_token), {}};
    for (std::int64_t depth = 0; depth < rollout.length(); ++depth) {
      Random here(static_cast<std::uint64_t>(depth), depth < parts ? 1 : 2 + i);
      const bool free = here.chance(0.1);
      for (std::int64_t layer = 0; layer < layers; ++layer) {
        std::vector<std::uint16_t> experts = drawn_experts(here, shape);
        if (free) experts.assign(experts.size(), RecordedExperts::kFree);
        rollout.recorded_experts.ids.insert(rollout.recorded_experts.ids.end(), experts.begin(), experts.end());
      }
    }
  }
}

void expect_equal_with_routes(const Case& c, const Outcome& run, const OracleResult& expected) {
  const Worst worst = worst_parameter(c, run.gradient, expected.gradient);
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
  EXPECT_NEAR(run.loss, expected.loss, kFloat64 * std::max(1.0, std::abs(expected.loss)));
  for (std::size_t i = 0; i < expected.logprobs.size(); ++i)
    for (std::size_t t = 0; t < expected.logprobs[i].size(); ++t)  // sums of O(10) terms of size O(10)
      ASSERT_NEAR(run.report.series[i].logprob[t], expected.logprobs[i][t], 1e-11)
          << "rollout " << i << ", token " << t;
}

TEST(Routes, ReplayingOwnChoicesChangesNothing) {
  for (const char* family : {"qwen3-moe", "qwen3-moe-sparse", "qwen3-moe-128"}) {
    Case free = case_of(family, {}), again = free;
    for (free.seed = again.seed = 61; free.seed <= 62; ++free.seed, ++again.seed) {
      std::vector<RecordedExperts> own;  // as all plans find them; the oracle takes long
      again.edit = [&own](std::vector<Rollout>& rollouts, const ModelState& model) {
        if (own.empty()) {
          record_own_choices(rollouts, model);
          for (const Rollout& rollout : rollouts) own.push_back(rollout.recorded_experts);
        }
        for (std::size_t i = 0; i < rollouts.size(); ++i) rollouts[i].recorded_experts = own[i];
      };
      const OracleResult expected = run_oracle(free);
      for (const Plan& plan : all_plans({0, 7})) {
        SCOPED_TRACE(text_of(family, ", ", plan.name, ", seed ", free.seed));
        expect_equal_with_routes(again, run_case(with(again, plan)), expected);
      }
    }
  }
}

TEST(Routes, OtherChoicesGiveWhatADenseRunWithThemGives) {
  for (const char* family : {"qwen3-moe", "qwen3-moe-plain", "qwen3-moe-sparse"})
    for (const char* scope : {"rollout", "minibatch"}) {
      Case c = case_of(family, record_other_choices);
      c.options.router_aux_loss_coef = 0.5, c.options.router_aux_loss_scope = scope;
      for (c.seed = 71; c.seed <= 73; ++c.seed) {
        const OracleResult expected = run_oracle(c);
        Case free = c;
        free.edit = {};
        EXPECT_GT((expected.gradient - run_oracle(free).gradient).norm().item<double>(), 1e-3);
        for (const Plan& plan : all_plans({0, 7})) {
          SCOPED_TRACE(text_of(family, ", ", scope, ", ", plan.name, ", seed ", c.seed));
          const Outcome run = run_case(with(c, plan));
          expect_equal_with_routes(c, run, expected);
          EXPECT_EQ(run.report.router.load, expected.load);
        }
      }
    }
}

TEST(Routes, ACriticChoosesOnItsOwn) {
  Case c = case_of("qwen3-moe", record_other_choices);
  c.critic = c.rollouts.values = true;
  const OracleResult expected = run_oracle(c);  // which knows no records for critics
  for (const Plan& plan : all_plans({0, 7})) {
    SCOPED_TRACE(plan.name);
    expect_equal_with_routes(c, run_case(with(c, plan)), expected);
  }
}

// Six responses to a prompt of 20 tokens; in one rollout the record of token 12 differs.
TEST(Routes, APrefixEndsWhereRecordsDiffer) {
  const auto rows_of = [](const Edit& edit) {
    Case c;
    c.family = "qwen3-moe";
    c.rollouts.groups = 1, c.rollouts.group_size = {6, 6};
    c.rollouts.prompt_length = {20, 20}, c.rollouts.response_length = {5, 5};
    c.rollouts.vocabulary = 50;
    c.options.schedule = "packed", c.seed = 3;
    c.edit = edit;
    return run_case(c).report.plan.physical_rows();
  };
  const std::int64_t shared = rows_of({});
  EXPECT_EQ(rows_of(record_own_choices), shared);
  EXPECT_EQ(rows_of([](std::vector<Rollout>& rollouts, const ModelState& model) {
              record_own_choices(rollouts, model);
              RecordedExperts& routes = rollouts[3].recorded_experts;
              std::uint16_t* experts = routes.ids.data() + (12 * routes.layers + 1) * routes.chosen;
              const bool both = experts[0] == 0 && experts[1] == 1;
              experts[0] = 0, experts[1] = both ? 2 : 1;
            }),
            shared + 8);
}

}  // namespace
}  // namespace espalier::testing
