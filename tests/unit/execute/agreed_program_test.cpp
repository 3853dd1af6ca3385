// Ranks whose plans differ agree on one order: each knows what it runs, what it joins, and they meet at every step.
#include "espalier/execute/agreed_program.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/support/in_process.h"
#include "tests/support/program_text.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

// Nothing but kinds: 'w' a wave, '(...)' a trunk with what is below it.
std::vector<PlanItem> items_of(const char*& text) {
  std::vector<PlanItem> items;
  for (; *text != '\0' && *text != ')'; ++text) {
    PlanItem item;
    item.set.rows = 1;
    if (*text == '(') {
      item.kind = ItemKind::trunk;
      item.below = items_of(++text);
    }
    items.push_back(std::move(item));
  }
  return items;
}
StepPlan plan_of(const char* text) {
  StepPlan plan;
  plan.items = items_of(text);
  return plan;
}

template <std::size_t ranks>
std::array<std::string, ranks> programs(const Degrees& degrees, const std::array<const char*, ranks>& plans,
                                        bool gradients = true) {
  std::array<std::string, ranks> out;
  run_ranks(degrees, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.world.rank());
    const StepPlan plan = plan_of(plans[rank]);
    out[rank] = text_of_program(agreed_program(mesh, plan, gradients));
  });
  return out;
}

using Two = std::array<std::string, 2>;
using Plans = std::array<const char*, 2>;

TEST(AgreedProgram, ARankThatMeetsNobodyRunsItsOwnPlan) {
  EXPECT_EQ(programs({.dp = 2}, Plans{"(w)", ""}), (Two{"A B0 b0 C", ""}));
}

TEST(AgreedProgram, RanksOfShardedWeightsMeetAtEveryStep) {
  EXPECT_EQ(programs({.dp = 2, .full = true}, Plans{"(w)", ""}), (Two{"A B0 b0 C", "(A) (B0) (b0) (C)"}));
  EXPECT_EQ(programs({.dp = 2, .full = true}, Plans{"(ww)", "w"}), (Two{"A B0 b0 B0 b0 C", "(A) B0 b0 (B0) (b0) (C)"}));
  EXPECT_EQ(programs({.dp = 2, .full = true}, Plans{"", ""}), (Two{"", ""}));
}

TEST(AgreedProgram, StagesHaveWavesInFlightAndTheSameOrder) {
  EXPECT_EQ(programs({.pp = 2}, Plans{"(ww)", "(ww)"}), (Two{"A B0 B1 b0 b1 C", "A B0 b0 B0 b0 C"}));
  EXPECT_EQ(programs({.pp = 2}, Plans{"(ww)", "(ww)"}, false), (Two{"A B0 b0 B0 b0 C", "A B0 b0 B0 b0 C"}));
}

TEST(AgreedProgram, OfAStepIsTheSameForEveryRankButForWhoseItIs) {
  const Case c = nested_trunks();
  std::array<std::string, 2> texts;
  run_ranks({.dp = 2, .full = true}, [&](const Mesh& mesh) {
    const SmallStep step(c, mesh);
    std::string text = text_of_program(agreed_program(mesh, step.plan, true));
    std::erase_if(text, [](char letter) { return letter == '(' || letter == ')'; });
    texts[static_cast<std::size_t>(mesh.world.rank())] = text;
  });
  EXPECT_FALSE(texts[0].empty());
  EXPECT_EQ(texts[0], texts[1]);
}

}  // namespace
}  // namespace espalier::testing
