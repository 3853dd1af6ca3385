// One item by itself: what its forward hands to the head, when its backward may run, and what it holds.
#include "espalier/execute/item_run.h"

#include <gtest/gtest.h>

#include "espalier/base/error.h"
#include "tests/unit/execute/small_step.h"

namespace espalier::testing {
namespace {

using at::Tensor;

// Keeps the normed row of every edge, and gives every row a gradient of its own.
class KeepingHead : public PlainHead {
 public:
  void score(const HeadWork& work) override {
    PlainHead::score(work);
    trains = trains || work.grad_normed_OM.defined();
    for (std::size_t e = 0; e < work.input.edges.size(); ++e) {
      const LossEdge& edge = work.input.edges[e];
      rows[{edge.rollout, edge.position}] = work.normed_OM[work.input.output[e]].clone();
    }
  }

  std::map<EdgePlace, Tensor> rows;
  bool trains = false;
};

class Items : public ::testing::Test {
 protected:
  explicit Items(Case c = nested_trunks()) : step_(std::move(c)) {}

  // Runs one item and all items below it, forward and backward, as the executor does.
  void run(const StepRun& run, OpenPath& path, const PlanItem& item) {
    const ArenaScope scope(step_.arena);
    ItemRun one(run, item, step_.arena);
    EXPECT_EQ(one.rows(), item.set.rows);
    std::int64_t sets_below = 0;
    visit_items(item.below, [&](const PlanItem&) { ++sets_below; });
    if (item.kind == ItemKind::trunk) path.push(item.set.rows, sets_below, one.states());
    const std::int64_t before = step_.arena.in_use();
    one.forward();
    most_kept_ = std::max(most_kept_, step_.arena.in_use() - before);
    for (const PlanItem& below : item.below) this->run(run, path, below);
    if (run.trains()) one.add_backward(Tensor());
    if (item.kind == ItemKind::trunk) path.pop();
  }
  void run_all(Head& head, bool trains) {
    step_.gradients.zero();
    const ArenaScope scope(step_.arena);
    StepPath path(step_.model->decoder, step_.plan, trains, step_.arena, "");
    const StepRun run{step_.model->decoder, step_.rollouts, *path,
                      step_.arena,          &head,          trains ? &step_.gradients : nullptr};
    for (const PlanItem& item : step_.plan.items) this->run(run, *path, item);
  }

  SmallStep step_;
  std::int64_t most_kept_ = 0;  // of the arena, by one item's forward
};

TEST_F(Items, GiveTheHeadTheRowsOfEveryRolloutByItself) {
  KeepingHead head, alone;
  run_all(head, true);
  SmallStep dense(with(nested_trunks(), {"", "dense", 0, "auto"}));
  dense.run(alone, false);
  ASSERT_EQ(head.rows.size(), alone.rows.size());
  for (const auto& [edge, row] : alone.rows)
    EXPECT_TRUE(at::allclose(head.rows.at(edge), row, kFloat64, kFloat64)) << edge.first << ", " << edge.second;
  const Worst worst = worst_parameter(step_.c, step_.gradients.flat(), [&] {
    PlainHead trained;
    dense.run(trained, true);
    return dense.gradients.flat();
  }());
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
}

TEST_F(Items, WithoutGradientsKeepNothingForABackward) {
  KeepingHead with_gradients, without;
  run_all(with_gradients, true);
  EXPECT_TRUE(with_gradients.trains);
  const std::int64_t trained = std::exchange(most_kept_, 0);
  run_all(without, false);
  EXPECT_FALSE(without.trains);
  EXPECT_LT(2 * most_kept_, trained) << "normed rows alone";
  for (const auto& [edge, row] : with_gradients.rows) EXPECT_TRUE(without.rows.at(edge).equal(row));
  EXPECT_EQ(step_.arena.in_use(), 0);
}

TEST_F(Items, ATrunksBackwardBeforeThatOfItsWavesIsRefused) {
  const auto trunk = std::ranges::find(step_.plan.items, ItemKind::trunk, &PlanItem::kind);
  ASSERT_NE(trunk, step_.plan.items.end());
  PlainHead head;
  const ArenaScope scope(step_.arena);
  StepPath path(step_.model->decoder, step_.plan, true, step_.arena, "");
  const StepRun run{step_.model->decoder, step_.rollouts, *path, step_.arena, &head, &step_.gradients};
  ItemRun one(run, *trunk, step_.arena);
  (*path).push(trunk->set.rows, 1, one.states());
  one.forward();
  EXPECT_THROW(one.add_backward(Tensor()), InternalError);
}

TEST_F(Items, AnItemThatIsComputedAgainHasTheSameBits) {
  PlainHead kept, again;
  run_all(kept, true);
  const Tensor gradient = step_.gradients.flat().clone();
  std::function<void(std::vector<PlanItem>&)> recompute = [&](std::vector<PlanItem>& items) {
    for (PlanItem& item : items) item.state = SavedState::recompute, recompute(item.below);
  };
  recompute(step_.plan.items);
  run_all(again, true);
  EXPECT_EQ(again.loss, kept.loss);
  EXPECT_TRUE(step_.gradients.flat().equal(gradient));
}

class SleepingItems : public Items {
 protected:
  SleepingItems()
      : Items([] {
          Case c = nested_trunks();
          c.options.path_state = "offload";
          return c;
        }()) {}
};

// Layers of the path that sleep are announced before each direction reads them.
TEST_F(SleepingItems, HaveTheBitsOfAPathInMemory) {
  ASSERT_GT(step_.plan.trunks, 0);
  PlainHead asleep, awake;
  run_all(asleep, true);
  SmallStep in_memory(nested_trunks());
  in_memory.run(awake, true);
  EXPECT_EQ(asleep.loss, awake.loss);
  EXPECT_TRUE(step_.gradients.flat().equal(in_memory.gradients.flat()));
}

class RecurrentItems : public Items {
 protected:
  RecurrentItems()
      : Items([] {
          Case c = nested_trunks();
          c.family = "qwen3-next";
          return c;
        }()) {}
};

TEST_F(RecurrentItems, ATrunkLeavesAStateAndAWaveDoesNot) {
  const ArenaScope scope(step_.arena);
  StepPath path(step_.model->decoder, step_.plan, true, step_.arena, "");
  PlainHead head;
  const StepRun run{step_.model->decoder, step_.rollouts, *path, step_.arena, &head, &step_.gradients};
  visit_items(step_.plan.items, [&](const PlanItem& item) {
    const ArenaScope of_item(step_.arena);
    const ItemRun one(run, item, step_.arena);
    const bool trunk = item.kind == ItemKind::trunk;
    EXPECT_EQ(one.states().states_N.defined(), trunk);
    EXPECT_EQ(one.states().grad_states_N.defined(), trunk);
    const std::int64_t numbers = step_.model->shape.states_before(step_.model->shape.layers());
    EXPECT_EQ(trunk ? one.states().states_N.numel() : numbers, numbers);
  });
  run_all(head, true);
  PlainHead dense_head;
  SmallStep dense(with(step_.c, {"", "dense", 0, "auto"}));
  dense.run(dense_head, true);
  const Worst worst = worst_parameter(step_.c, step_.gradients.flat(), dense.gradients.flat());
  EXPECT_LE(worst.error, kFloat64) << worst.parameter;
}

}  // namespace
}  // namespace espalier::testing
