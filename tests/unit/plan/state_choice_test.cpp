// States that a plan takes when memory is short: never a dearer mixture than a uniform one that fits, each trunk by
// itself.
#include "espalier/plan/state_choice.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <set>

#include "espalier/base/error.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/latent_attention/shape.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using testing::group_of;
using testing::planned;

ModelShape deep_shape() {
  ModelShape shape = testing::tiny_shape();
  shape.hidden = 256, shape.max_positions = 1 << 16;
  shape.layer = attention_layers(12, {.heads = 4, .kv_heads = 1, .head_dim = 16, .qk_norm = true}, 768);
  return shape;
}

PlanOptions phased(std::int64_t rows, SavedState state) {
  PlanOptions options;
  options.schedule = Schedule::phased, options.token_budget = rows, options.trunk_state = state;
  options.spill_room = std::numeric_limits<std::int64_t>::max();
  options.must_fit = false;
  return options;
}

void collect(const std::vector<PlanItem>& items, std::set<std::string>& trunks) {
  for (const PlanItem& item : items) {
    if (item.kind == ItemKind::trunk) trunks.insert(name_of(item.state));
    collect(item.below, trunks);
  }
}

TEST(StateChoice, TakesNeverMoreTimeThanAUniformStateThatFits) {
  const ModelShape shape = deep_shape();
  const std::vector<Rollout> batch = group_of(6000, 100, 4);
  const std::int64_t constant = ActivationBytes(shape, DType::float32).constant();
  for (const bool stores : {false, true}) {
    const auto plan_of = [&](SavedState state, std::int64_t budget) {
      PlanOptions options = phased(8192, state);
      options.memory_budget = budget;
      if (!stores) options.spill_room = 0;
      return planned(batch, options, ShareMode::whole_trees, shape);
    };
    std::map<SavedState, PlanCost> uniform;
    for (const SavedState state : {SavedState::keep, SavedState::recompute, SavedState::offload})
      if (stores || state != SavedState::offload) uniform[state] = plan_of(state, 0).chosen;
    const std::int64_t keep = uniform[SavedState::keep].bytes.peak();
    std::set<std::string> states;
    double before = 0;
    for (const int part : {100, 90, 75, 60, 45}) {
      SCOPED_TRACE(text_of(part, " % of what is kept", stores ? ", offloaded" : ""));
      const std::int64_t budget = constant + (keep - constant) * part / 100;
      const StepPlan plan = plan_of(SavedState::automatic, budget);
      ASSERT_TRUE(plan.chosen.fits);
      EXPECT_LE(plan.chosen.bytes.peak(), budget);
      EXPECT_GE(plan.chosen.seconds, before * 0.999) << "less memory, less time";
      before = plan.chosen.seconds;
      for (const auto& [state, cost] : uniform)
        if (cost.bytes.peak() <= budget) {
          EXPECT_LE(plan.chosen.seconds, cost.seconds * (1 + 1e-12)) << name_of(state);
        }
      collect(plan.items, states);
    }
    EXPECT_TRUE(states.contains("kept"));
    EXPECT_GE(states.size(), 2u);
    if (!stores) {
      EXPECT_TRUE(states.contains("kept, gate and up recomputed")) << "one product again for half of the bytes";
    }
  }
}

TEST(StateChoice, TrunksOfAChainTakeStatesOfTheirOwn) {
  const ModelShape shape = deep_shape();
  const std::vector<Rollout> batch = group_of(8000, 60, 2);
  PlanOptions options = phased(1000, SavedState::automatic);
  const std::int64_t most = planned(batch, options, ShareMode::whole_trees, shape).chosen.bytes.peak();
  const std::int64_t constant = ActivationBytes(shape, DType::float32).constant();
  std::size_t kinds = 0;
  for (int part = 90; part >= 60; part -= 10) {
    options.memory_budget = constant + (most - constant) * part / 100;
    const StepPlan plan = planned(batch, options, ShareMode::whole_trees, shape);
    ASSERT_TRUE(plan.chosen.fits);
    std::set<std::string> states;
    collect(plan.items, states);
    kinds = std::max(kinds, states.size());
    EXPECT_GE(plan.tried.size(), 2u);
  }
  EXPECT_GE(kinds, 2u) << "some trunks are kept, others not";
}

TEST(StateChoice, StoresNothingAwayWithoutRoom) {
  const ModelShape shape = deep_shape();
  const std::vector<Rollout> batch = group_of(6000, 100, 4);
  PlanOptions options = phased(8192, SavedState::automatic);
  options.spill_room = 0;
  options.memory_budget = 1;
  const StepPlan plan = planned(batch, options, ShareMode::whole_trees, shape);
  EXPECT_EQ(plan.chosen.stored_bytes, 0);
}

ModelShape wide_path_shape() {
  ModelShape shape = deep_shape();
  shape.layer = attention_layers(12, {.heads = 8, .kv_heads = 8, .head_dim = 32, .qk_norm = true}, 768);
  return shape;
}

// A chain whose path is the largest thing: it sleeps where nothing else helps, and no more layers of it than must.
TEST(StateChoice, ThePathSleepsWhereItDoesNotFit) {
  const ModelShape shape = wide_path_shape();
  const std::vector<Rollout> batch = group_of(8000, 60, 2);
  PlanOptions options = phased(500, SavedState::automatic);
  options.memory_budget = 1;
  options.path_state = PathState::keep;
  const std::int64_t awake = planned(batch, options, ShareMode::whole_trees, shape).chosen.bytes.peak();
  options.path_state = PathState::automatic;
  const std::int64_t asleep = planned(batch, options, ShareMode::whole_trees, shape).chosen.bytes.peak();
  const std::int64_t constant = ActivationBytes(shape, DType::float32).constant();
  EXPECT_LT(asleep - constant, (awake - constant) / 3);
  double before = 0;
  std::int32_t layers_before = PathPlan::kEveryLayer;
  for (const int part : {110, 90, 70, 50, 30, 0}) {
    SCOPED_TRACE(text_of(part, " % of the way up"));
    options.memory_budget = asleep + (awake - asleep) * part / 100;
    const StepPlan plan = planned(batch, options, ShareMode::whole_trees, shape);
    ASSERT_TRUE(plan.chosen.fits);
    EXPECT_LE(plan.chosen.bytes.peak(), options.memory_budget);
    EXPECT_GE(plan.chosen.seconds, before * 0.999) << "less memory, less time";
    before = plan.chosen.seconds;
    EXPECT_EQ(plan.chosen.path_stored_bytes > 0, plan.path.layers_awake != PathPlan::kEveryLayer);
    if (part < 100) {
      EXPECT_GT(plan.chosen.path_stored_bytes, 0);
      EXPECT_LE(plan.path.layers_awake, layers_before);
      layers_before = plan.path.layers_awake;
      EXPECT_NE(explain(plan).find("of keys, values and their gradients are offloaded"), std::string::npos);
      EXPECT_NE(explain(plan).find("; path offloaded"), std::string::npos) << "what was tried";
    }
    options.path_state = PathState::keep;
    const StepPlan kept = planned(batch, options, ShareMode::whole_trees, shape);
    EXPECT_EQ(kept.path.layers_awake, PathPlan::kEveryLayer);
    if (kept.chosen.fits) {
      EXPECT_LE(plan.chosen.seconds, kept.chosen.seconds);
    } else {
      EXPECT_NE(kept.remedy.find("--path-state auto"), std::string::npos) << kept.remedy;
    }
    options.path_state = PathState::automatic;
  }
  EXPECT_LT(layers_before, 3);
}

// Nothing is stored unasked where there is no room, or where trunks must not be stored.
TEST(StateChoice, ThePathSleepsOnlyWhereStoringIsAllowed) {
  const ModelShape shape = wide_path_shape();
  const std::vector<Rollout> batch = group_of(8000, 60, 2);
  const auto stored = [&](SavedState trunks, std::int64_t room, PathState path) {
    PlanOptions options = phased(500, trunks);
    options.memory_budget = 1, options.spill_room = room, options.path_state = path;
    return planned(batch, options, ShareMode::whole_trees, shape).chosen.path_stored_bytes;
  };
  constexpr std::int64_t kRoom = std::numeric_limits<std::int64_t>::max();
  EXPECT_GT(stored(SavedState::automatic, kRoom, PathState::automatic), 0);
  EXPECT_GT(stored(SavedState::offload, kRoom, PathState::automatic), 0);
  EXPECT_EQ(stored(SavedState::keep, kRoom, PathState::automatic), 0);
  EXPECT_EQ(stored(SavedState::recompute, kRoom, PathState::automatic), 0);
  EXPECT_EQ(stored(SavedState::automatic, 0, PathState::automatic), 0);
  EXPECT_EQ(stored(SavedState::automatic, 1 << 20, PathState::automatic), 0);
  EXPECT_GT(stored(SavedState::keep, 0, PathState::offload), 0) << "asked for";
}

// No store, and a budget that nothing fits.
PlanOptions without_room() {
  PlanOptions options = phased(500, SavedState::automatic);
  options.spill_room = 0, options.memory_budget = 1;
  return options;
}
StepPlan planned_with(PathState state, const std::vector<Rollout>& batch, PlanOptions options, const auto& shape) {
  options.path_state = state;
  return planned(batch, options, ShareMode::whole_trees, shape);
}

// 8 heads of 32 plain, 8 rotated and 32 value channels behind latents of this width.
void set_latents(ModelShape& shape, std::int64_t key_value) {
  const auto mixer = std::make_shared<const LatentAttention>(
      LatentShape{.heads = 8, .key_value = key_value, .plain = 32, .rotary = 8, .value = 32});
  for (LayerShape& layer : shape.layer) layer.mixer = mixer;
}

// A path that does not fit is carried as latents where the model has latent attention; one that fits is not, and other
// models are refused.
TEST(StateChoice, ThePathIsCarriedAsLatents) {
  ModelShape shape = wide_path_shape();
  set_latents(shape, 24);
  const std::vector<Rollout> batch = group_of(8000, 60, 2);
  PlanOptions options = without_room();
  const auto plan_with = [&](PathState state) { return planned_with(state, batch, options, shape); };
  const StepPlan kept = plan_with(PathState::keep), least = plan_with(PathState::automatic);
  EXPECT_EQ(least.path.state(), PathState::latents);
  // 12 layers have 24 + 8 numbers a row in place of 8 (40 + 32); and there is the room of one layer with its blocks.
  const ActivationBytes bytes(shape, DType::float32, options.kind);
  const std::int64_t whole = bytes.path({8000, 0}).backward,
                     carried = bytes.path({8000, 0}, {.latents = true}).backward;
  EXPECT_NEAR(static_cast<double>(carried) / static_cast<double>(whole), 1.0 / 12 + 32.0 / 576, 0.02);
  EXPECT_NEAR(static_cast<double>(kept.chosen.bytes.peak() - least.chosen.bytes.peak()),
              static_cast<double>(whole - carried), 0.02 * static_cast<double>(whole));
  EXPECT_GT(least.chosen.seconds, kept.chosen.seconds) << "the products take time";
  options.memory_budget = (kept.chosen.bytes.peak() + least.chosen.bytes.peak()) / 2;
  EXPECT_EQ(plan_with(PathState::automatic).path.state(), PathState::latents);
  EXPECT_NE(explain(plan_with(PathState::automatic)).find("; path as latents"), std::string::npos) << "what was tried";
  options.memory_budget = 0;
  EXPECT_EQ(plan_with(PathState::automatic).path.state(), PathState::keep) << "what fits stays whole";
  for (const PathState state : {PathState::latents, PathState::latents_offload, PathState::latents_divide}) {
    options.path_state = state;
    EXPECT_THROW(planned(batch, options, ShareMode::whole_trees, wide_path_shape()), UnsupportedError);
  }
  EXPECT_EQ(planned(batch, options, ShareMode::whole_trees, shape).path.state(), PathState::latents)
      << "nobody to divide it with";
}

// Where latents do not fit either, their layers are offloaded or sharded over cp; each holds the room of one layer.
TEST(StateChoice, LayersOfLatentsSleepWhereTheyDoNotFit) {
  ModelShape whole = wide_path_shape();
  set_latents(whole, 100);
  const std::vector<Rollout> batch = group_of(8000, 60, 2);
  for (const auto& [cp, asleep, other] : {std::tuple(1, PathState::latents_offload, PathState::offload),
                                          {4, PathState::latents_divide, PathState::divide}}) {
    SCOPED_TRACE(text_of("cp ", cp));
    const LocalShape shape(whole, {.cp = cp}, {});
    PlanOptions options = without_room();
    const auto plan_with = [&](PathState state) { return planned_with(state, batch, options, shape); };
    const StepPlan awake = plan_with(PathState::latents), least = plan_with(asleep);
    EXPECT_EQ(least.path.state(), asleep);
    EXPECT_EQ(least.path.layers_awake, 0);
    // 11 of 12 layers are not in memory, or 3/4 of all less the rooms for two.
    const ActivationBytes bytes(shape, DType::float32, options.kind);
    const double latents = 8000.0 * 108 * (4 + 4);
    EXPECT_NEAR(
        static_cast<double>(awake.chosen.bytes.peak() - least.chosen.bytes.peak()),
        (cp == 1 ? 11 : 0.75 * 12 - 2) * latents - static_cast<double>(bytes.in_flight(least.chosen.path_stored_bytes)),
        0.05 * 12 * latents);
    options.memory_budget = (awake.chosen.bytes.peak() + least.chosen.bytes.peak()) / 2;
    if (cp == 1) options.spill_room = std::int64_t{1} << 40;
    const StepPlan found = plan_with(PathState::automatic);
    ASSERT_TRUE(found.chosen.fits);
    EXPECT_LE(found.chosen.seconds, plan_with(asleep).chosen.seconds * 1.001);
    EXPECT_NE(explain(found).find(cp == 1 ? "; path as latents, offloaded" : "; path as latents, sharded"),
              std::string::npos)
        << "what was tried";
    EXPECT_TRUE(found.path.state() == asleep || found.path.state() == other);
  }
}

// A path that does not fit is sharded over cp, without a store; where both would do the cheaper one is taken, and a
// path that fits stays whole.
TEST(StateChoice, ThePathIsShardedOverRanksOfCp) {
  const LocalShape shape(wide_path_shape(), {.cp = 4}, {});
  const std::vector<Rollout> batch = group_of(8000, 60, 2);
  PlanOptions options = without_room();
  const auto plan_with = [&](PathState state) { return planned_with(state, batch, options, shape); };
  const std::int64_t whole = plan_with(PathState::keep).chosen.bytes.peak();
  const StepPlan least = plan_with(PathState::automatic);
  EXPECT_EQ(least.path.state(), PathState::divide);
  EXPECT_EQ(least.chosen.path_stored_bytes, 0);
  // 1/4 of 12 layers, and rooms for two: 5 of 12; the rest of a step as it was.
  const std::int64_t path = ActivationBytes(shape, DType::float32, options.kind).path({8000, 0}).backward;
  EXPECT_NEAR(static_cast<double>(whole - least.chosen.bytes.peak()), 7.0 / 12 * static_cast<double>(path),
              0.02 * static_cast<double>(path));
  std::int32_t layers_before = PathPlan::kEveryLayer;
  double before = 0;
  for (const int part : {80, 50, 20, 0}) {
    SCOPED_TRACE(text_of(part, " % of the way up"));
    options.memory_budget = least.chosen.bytes.peak() + (whole - least.chosen.bytes.peak()) * part / 100;
    const StepPlan plan = plan_with(PathState::automatic);
    ASSERT_TRUE(plan.chosen.fits);
    EXPECT_EQ(plan.path.state(), PathState::divide);
    EXPECT_LE(plan.chosen.bytes.peak(), options.memory_budget);
    EXPECT_LE(plan.path.layers_awake, layers_before);
    EXPECT_GE(plan.chosen.seconds, before * 0.999);
    layers_before = plan.path.layers_awake, before = plan.chosen.seconds;
    EXPECT_NE(explain(plan).find("sharded over cp"), std::string::npos);
    EXPECT_NE(explain(plan).find("; path sharded"), std::string::npos) << "what was tried";
  }
  EXPECT_EQ(plan_with(PathState::divide).path.layers_awake, 0) << "asked for";
  options.memory_budget = 0;
  EXPECT_EQ(plan_with(PathState::automatic).path.state(), PathState::keep) << "what fits stays whole";
  options.path_state = PathState::divide;
  EXPECT_EQ(planned(batch, options, ShareMode::whole_trees, shape.whole()).path.state(), PathState::keep)
      << "nobody to divide it with";
}

TEST(StateChoice, WhatDoesNotFitIsToldWhatHoldsItBack) {
  const ModelShape shape = deep_shape();
  const std::vector<Rollout> batch = group_of(6000, 100, 4);
  PlanOptions options = phased(8192, SavedState::keep);
  options.wave_state = SavedState::keep;
  const std::int64_t keep = planned(batch, options, ShareMode::whole_trees, shape).chosen.bytes.peak();
  options.memory_budget = keep - (1 << 20);
  StepPlan plan = planned(batch, options, ShareMode::whole_trees, shape);
  EXPECT_FALSE(plan.chosen.fits);
  EXPECT_EQ(plan.missing_bytes, 1 << 20);
  EXPECT_NE(plan.remedy.find(text_of(keep, " bytes")), std::string::npos) << plan.remedy;
  for (const char* word : {"--schedule auto", "--token-budget 0", "--trunk-state auto", "--wave-state auto", "it fits"})
    EXPECT_NE(plan.remedy.find(word), std::string::npos) << plan.remedy;
  // The least budget that would do is one that does.
  options.memory_budget = ActivationBytes(shape, DType::float32).constant() + (1 << 20);
  plan = planned(batch, options, ShareMode::whole_trees, shape);
  const std::size_t at = plan.remedy.find("with which ");
  ASSERT_NE(at, std::string::npos) << plan.remedy;
  const std::size_t open = plan.remedy.find('(', at);
  PlanOptions free;
  free.memory_budget = std::stoll(plan.remedy.substr(open + 1));
  free.spill_room = options.spill_room;
  EXPECT_TRUE(planned(batch, free, ShareMode::whole_trees, shape).chosen.fits) << plan.remedy;
}

TEST(StateChoice, EveryStateThatAPlanMayChooseIsPossible) {
  for (const ItemState state : kTrunkStates) EXPECT_TRUE(state.possible()) << name_of(state);
  for (const ItemState state : kWaveStates) EXPECT_TRUE(state.possible() && !state.stores()) << name_of(state);
  EXPECT_FALSE(ItemState(kOffload, kKeep, kOffload).possible());
  EXPECT_FALSE(ItemState(kRecompute, kKeep, kKeep).possible());
  EXPECT_FALSE(ItemState(kKeep, kRecompute, kKeep).possible());
}

}  // namespace
}  // namespace espalier
