// Items that have begun: trunks are a stack, waves lie in regions, and both give back what they took.
#include "espalier/execute/open_items.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

class Open : public ::testing::Test {
 protected:
  Open() {
    visit_items(step_.plan.items, [&](const PlanItem& item) {
      const auto is_trunk = [](const PlanItem& below) { return below.kind == ItemKind::trunk; };
      if (item.kind == ItemKind::trunk && std::ranges::any_of(item.below, is_trunk)) outer_ = &item;
    });
    if (outer_ == nullptr) throw std::runtime_error("a plan without a trunk below a trunk");
    for (const PlanItem& item : outer_->below)
      if (item.kind == ItemKind::trunk) inner_ = &item;
    for (const PlanItem& item : inner_->below)
      if (item.kind == ItemKind::wave) wave_ = &item;
    if (wave_ == nullptr) throw std::runtime_error("a plan without a wave below two trunks");
  }

  SmallStep step_{nested_trunks()};
  ArenaScope scope_{step_.arena};
  StepPath path_{step_.model->decoder, step_.plan, true, step_.arena, ""};
  StepRun run_{step_.model->decoder, step_.rollouts, *path_, step_.arena, nullptr, &step_.gradients};
  const PlanItem *outer_ = nullptr, *inner_ = nullptr, *wave_ = nullptr;
};

TEST_F(Open, TrunksAreAStackOnThePath) {
  const std::int64_t before = step_.arena.in_use(), above = outer_->path_rows;
  (*path_).push(static_cast<std::int32_t>(above), 0);
  {
    OpenItems items(run_, 1);
    const ItemRun* const outer = &items.open_trunk(*outer_, 0);
    const ItemRun* const inner = &items.open_trunk(*inner_, 0);
    EXPECT_EQ(&items.trunk(), inner);
    EXPECT_EQ(&items.trunk(1), outer);
    EXPECT_EQ((*path_).rows(), above + outer_->set.rows + inner_->set.rows);
    items.close_trunk();
    EXPECT_EQ(&items.trunk(), outer);
    EXPECT_EQ((*path_).rows(), above + outer_->set.rows);
    EXPECT_THROW(items.trunk(1), std::out_of_range);
  }  // the outer one is still open, as after an error
  EXPECT_EQ(step_.arena.in_use(), before);
}

TEST_F(Open, OneWaveAtATimeLiesInTheStepsArena) {
  OpenItems items(run_, 1);
  EXPECT_TRUE(items.regions().empty());
  (*path_).push(wave_->path_rows, 0);
  const std::int64_t before = step_.arena.in_use();
  items.begin_wave(*wave_, 0).forward();
  EXPECT_GT(step_.arena.in_use(), before);
  EXPECT_THROW(items.begin_wave(*wave_, 0), InternalError) << "a region used twice";
  items.end_wave(0);
  EXPECT_EQ(step_.arena.in_use(), before);
  EXPECT_NO_THROW(items.begin_wave(*wave_, 0));
}

TEST_F(Open, WavesInFlightHaveArenasOfTheirOwn) {
  OpenItems items(run_, 2);
  ASSERT_EQ(items.regions().size(), 2u);
  (*path_).push(wave_->path_rows, 0);
  const std::int64_t before = step_.arena.in_use();
  items.begin_wave(*wave_, 1).forward();
  const std::int64_t held = items.regions()[1]->in_use();
  EXPECT_GT(held, 0);
  items.begin_wave(*wave_, 0).forward();
  EXPECT_EQ(items.regions()[1]->in_use(), held);
  EXPECT_EQ(step_.arena.in_use(), before);
  items.end_wave(1);
  EXPECT_EQ(items.regions()[1]->in_use(), 0);
  EXPECT_GT(items.regions()[0]->in_use(), 0);
}

}  // namespace
}  // namespace espalier::testing
