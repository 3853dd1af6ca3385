// Choices of a batch: what shared tokens are given, and what counts as a difference.
#include "espalier/model/chosen_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace espalier::moe {
namespace {

ModelShape two_expert_layers() {
  ModelShape shape;
  shape.experts = 8, shape.experts_per_token = 2;
  shape.layer.resize(3);
  shape.layer[0].mlp = shape.layer[2].mlp = MlpKind::experts;
  return shape;
}

Rollout rollout(std::vector<std::int32_t> prompt, std::vector<std::int32_t> response) {
  Rollout out;
  out.prompt_ids = std::move(prompt), out.response_ids = std::move(response);
  out.loss_mask.assign(out.response_ids.size(), 1);
  return out;
}

// Three responses to one prompt; two of them begin with the same token.
std::vector<Rollout> batch() { return {rollout({1, 2}, {3}), rollout({1, 2}, {4, 5}), rollout({1, 2}, {3, 6})}; }

using Token = std::array<std::uint16_t, 4>;  // [layers, k]
constexpr std::uint16_t kFree = RecordedExperts::kFree;

void set(ChosenExperts& chosen, std::int32_t rollout, std::int32_t depth, const Token& experts) {
  std::ranges::copy(experts, chosen.at(rollout, depth));
}
Token get(const ChosenExperts& chosen, std::int32_t rollout, std::int32_t depth) {
  Token out;
  std::copy_n(chosen.at(rollout, depth), out.size(), out.begin());
  return out;
}

TEST(ChosenExperts, NothingIsKnownAtFirst) {
  const ChosenExperts chosen(two_expert_layers(), batch());
  EXPECT_EQ(get(chosen, 1, 3), (Token{kFree, kFree, kFree, kFree}));
  EXPECT_EQ(chosen.difference(chosen, {}).choices, 0);
  EXPECT_EQ(chosen.difference(chosen, {}).share(), 0);
}

TEST(ChosenExperts, ASharedTokenTakesTheFirstKnownChoiceOfEachLayer) {
  const std::vector<Rollout> rollouts = batch();
  ChosenExperts chosen(two_expert_layers(), rollouts);
  set(chosen, 0, 1, {0, 1, kFree, kFree});
  set(chosen, 1, 1, {0, 2, 4, 5});
  set(chosen, 2, 1, {0, 1, 4, 6});
  set(chosen, 0, 2, {1, 2, 3, 4});  // shared with rollout 2 alone
  set(chosen, 1, 2, {5, 6, 5, 6});
  EXPECT_EQ(chosen.unite(build_prefix_trees(rollouts, ShareMode::whole_trees)), 2);
  for (const std::int32_t i : {0, 1, 2}) EXPECT_EQ(get(chosen, i, 1), (Token{0, 1, 4, 5})) << i;
  EXPECT_EQ(get(chosen, 2, 2), (Token{1, 2, 3, 4}));
  EXPECT_EQ(get(chosen, 1, 2), (Token{5, 6, 5, 6}));
  EXPECT_EQ(get(chosen, 0, 0), (Token{kFree, kFree, kFree, kFree}));
  EXPECT_EQ(chosen.unite(build_prefix_trees(rollouts, ShareMode::whole_trees)), 0);
}

TEST(ChosenExperts, RolloutsAreReversedAndTheirTokensAreNot) {
  ChosenExperts chosen(two_expert_layers(), batch());
  set(chosen, 0, 2, {1, 2, 3, 4});
  set(chosen, 1, 3, {0, 1, 0, 1});
  const ChosenExperts reversed = chosen.reversed();
  EXPECT_EQ(get(reversed, 2, 2), (Token{1, 2, 3, 4}));
  EXPECT_EQ(get(reversed, 1, 3), (Token{0, 1, 0, 1}));
}

TEST(ChosenExperts, ADifferenceCountsChoicesThatBothMadeFreely) {
  std::vector<Rollout> rollouts = batch();
  ChosenExperts a(two_expert_layers(), rollouts), b = a;
  set(a, 0, 0, {0, 1, 2, 3}), set(b, 0, 0, {0, 1, 2, 4});                  // one of two
  set(a, 1, 3, {0, 1, kFree, kFree}), set(b, 1, 3, {0, 1, 2, 4});          // one known to both
  set(a, 2, 1, {0, 1, 2, 3}), set(b, 2, 1, {kFree, kFree, kFree, kFree});  // none
  EXPECT_EQ(a.difference(b, rollouts).choices, 3);
  EXPECT_EQ(a.difference(b, rollouts).differing, 1);
  EXPECT_DOUBLE_EQ(a.difference(b, rollouts).share(), 1.0 / 3);
  rollouts[0].recorded_experts = {1, 2, 2, {0, 1, 2, 3}};
  EXPECT_EQ(a.difference(b, rollouts).choices, 1);
  EXPECT_EQ(a.difference(b, rollouts).differing, 0);
  EXPECT_EQ(a.difference(b, {}).differing, 1);
}

}  // namespace
}  // namespace espalier::moe
