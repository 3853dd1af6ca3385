// Every trunk and every wave in a state of its own, drawn at random: the bits of a run that keeps everything, and the
// bytes that were predicted.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "espalier/base/error.h"
#include "espalier/base/random.h"
#include "espalier/data/training_data.h"
#include "espalier/device/scalar_type.h"
#include "espalier/execute/language_head.h"
#include "espalier/execute/stage.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/state/planning.h"
#include "espalier/step/step_path.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

Case drawn_for_mixed_states(std::uint64_t seed) {
  Case c;
  c.seed = seed;
  c.rollouts = ragged_rollouts();
  c.rollouts.rewards = true, c.rollouts.token_advantages = false;
  c.rollouts.temperature_low = seed % 3 == 1 ? 0.7 : 1;  // a row has an output for each of its temperatures
  const char* families[] = {"qwen3",          "llama-windows",    "llama-bias", "qwen2",     "qwen3-moe",
                            "qwen3-moe-late", "qwen3-moe-sparse", "qwen3-next", "DeepseekV2"};
  c.family = families[seed % std::size(families)];
  c.options.schedule = seed % 4 == 0 ? "auto" : "phased";
  c.options.token_budget = static_cast<std::int64_t>(2 + seed % 11);
  if (seed % 3 == 0) c.options.policy_loss = "gspo";
  if (c.family != "qwen3" && c.family.starts_with("qwen3-moe") && seed % 2 == 0) c.options.router_aux_loss_coef = 0.1;
  return c;
}

void draw_states(std::vector<PlanItem>& items, Random& draw, std::set<std::string>& seen) {
  for (PlanItem& item : items) {
    const auto one_of = [&](const auto& states) {
      item.state = states[static_cast<std::size_t>(draw.integer(0, static_cast<std::int64_t>(std::size(states)) - 1))];
    };
    item.kind == ItemKind::trunk ? one_of(kTrunkStates) : one_of(kWaveStates);
    seen.insert(name_of(item.state));
    draw_states(item.below, draw, seen);
  }
}

// Any number of the path's layers stays in memory, maybe all of them.
void draw_path(StepPlan& plan, Random& draw, std::int64_t layers) {
  plan.path.layers_awake = static_cast<std::int32_t>(draw.integer(0, layers));
}

// Says when what was offloaded is asked for.
class WatchingHead : public Head {
 public:
  WatchingHead(Head& head, const SpillQueue* queue) : head_(head), queue_(queue) {}

  bool needs_whole_rollout() const override { return head_.needs_whole_rollout(); }
  void score(const HeadWork& work) override {
    if (queue_ != nullptr && work.item.kind == ItemKind::wave) asked_by_wave.push_back(queue_->asked());
    head_.score(work);
  }
  void finish_rollouts(const PlanItem& item) override { head_.finish_rollouts(item); }
  void add_backward(const HeadWork& work) override { head_.add_backward(work); }

  std::vector<std::int64_t> asked_by_wave;

 private:
  Head& head_;
  const SpillQueue* queue_;
};

struct EditedRun {
  at::Tensor gradient;
  double loss = 0;
  PhasePeaks taken, predicted;
  // Bytes of the one layer of a sleeping path that is in use: it is predicted for the whole of a pass, and not there
  // yet where the peak comes before its first turn, as in a head that runs before the layers' backward.
  std::int64_t in_use = 0;
  std::int64_t stored = 0;
  std::vector<std::int64_t> asked_by_wave;
};

// One gradient of the case's plan after `edit` changed states of its items.
EditedRun run_edited(const Case& c, const std::function<void(StepPlan&)>& edit) {
  const auto model = tiny_model(c.family, DType::float64, c.seed);
  Options options = c.options;
  options.dtype = "float64";
  const TrainingData data(make_rollouts(c.rollouts, c.seed), options);
  model->decoder.reserve_positions(data.longest());
  const MiniBatch batch = data.mini_batch(0);
  const Decoder& decoder = model->decoder;
  const StepKind kind = step_kind_of(options, model->shape, batch.rollouts);
  const HeldState held{.optimizer = false};
  StepPlan plan =
      plan_step(model->shape, options, default_profile("cpu", DType::float64, 2), batch.rollouts, true, kind, held);
  edit(plan);

  const ActivationBytes bytes(model->shape, DType::float64, kind, {held, {}});
  PeakWalk peaks(bytes);
  peaks.run(program_of(plan.items, bytes.waves_in_flight()));
  EditedRun run;
  run.predicted = peaks.peaks(0, bytes.path(plan.path_rows(), plan.path));
  if (const PathBytes path = bytes.path(plan.path_rows(), plan.path); path.stored > 0)
    run.in_use =
        path.backward / (plan.path.layers_awake - recurrent_before(decoder.shape(), plan.path.layers_awake) + 1);
  run.stored = peaks.stored();

  Arena arena(std::int64_t{1} << 28, bound_device(), 8);
  GradientSet gradients(model->table, decoder.local(), accumulator_type(scalar_type(model->dtype)), decoder.device());
  gradients.zero();
  Objective objective(batch.rollouts, batch.advantages, options);
  RouterStep routers(*model, batch.rollouts, options);
  routers.count_choices(plan, arena, {});
  std::optional<SpillQueue> queue;
  if (run.stored > 0) {
    queue.emplace(store_of(bound_device(), ""), static_cast<int>(chunks_in_flight(run.stored)));
    queue->reserve(run.stored);
  }
  LanguageHead head(decoder, batch.rollouts, arena, &objective, &gradients);
  WatchingHead watching(head, queue ? &*queue : nullptr);
  StepPath path(decoder, plan, true, arena, "");
  StepRun step{decoder, batch.rollouts, *path, arena, &watching, &gradients, true};
  step.accounting = routers.accounting();
  step.spill = queue ? &*queue : nullptr;
  run.taken = run_stage(step, plan).arena_bytes;
  run.gradient = on_host(gradients.flat()).clone();
  run.loss = objective.parts().loss;
  run.asked_by_wave = watching.asked_by_wave;
  return run;
}

TEST(MixedStates, GiveTheBitsOfKeptStateInTheBytesThatWerePredicted) {
  std::set<std::string> seen;
  int asleep = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Case c = drawn_for_mixed_states(seed);
    SCOPED_TRACE(text_of("seed ", seed, ", ", c.family));
    Random draw(seed);
    const EditedRun kept = run_edited(c, [](StepPlan&) {});
    const EditedRun mixed = run_edited(c, [&](StepPlan& plan) {
      draw_states(plan.items, draw, seen);
      draw_path(plan, draw, shape_of(c).layers());
      asleep += plan.max_path_rows > 0 && plan.path.layers_awake < shape_of(c).layers();
    });
    EXPECT_TRUE(at::equal(mixed.gradient, kept.gradient));
    EXPECT_EQ(mixed.loss, kept.loss);
    for (const auto phase : {&PhasePeaks::a, &PhasePeaks::b, &PhasePeaks::c}) {
      EXPECT_LE(mixed.taken.*phase, mixed.predicted.*phase);
      EXPECT_GE(mixed.taken.*phase, mixed.predicted.*phase - mixed.in_use);
    }
  }
  EXPECT_EQ(seen.size(), std::size(kTrunkStates));
  EXPECT_GT(asleep, 60);
}

// An offloaded trunk is asked for while the last wave below it runs, and not before.
TEST(MixedStates, AreFetchedWhileTheLastWaveRuns) {
  Case c;
  c.rollouts.groups = 1;
  c.rollouts.group_size = {4, 4};
  c.rollouts.prompt_length = {20, 20}, c.rollouts.response_length = {5, 5};
  c.options.share = "prompt", c.options.schedule = "phased", c.options.token_budget = 20;
  c.options.trunk_state = "offload";
  const EditedRun run = run_edited(c, [](StepPlan& plan) { ASSERT_EQ(plan.trunks, 1); });
  ASSERT_GE(run.asked_by_wave.size(), 2u);
  EXPECT_GT(run.asked_by_wave.back(), 0);
  for (std::size_t wave = 0; wave + 1 < run.asked_by_wave.size(); ++wave) EXPECT_EQ(run.asked_by_wave[wave], 0);
}

}  // namespace
}  // namespace espalier::testing
