// What each rank has of a model: with the parts of all ranks put together every element of every parameter is there.
#include "espalier/shape/local_shape.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

ModelShape with_odd_sizes() {
  ModelShape shape = testing::llama_3_8b();
  shape.layers = 3, shape.expert_layer = {0, 0, 0};
  shape.vocabulary = 50, shape.inner = 43, shape.hidden = 16, shape.heads = 8, shape.kv_heads = 2, shape.head_dim = 4;
  shape.qkv_bias = shape.output_bias = shape.mlp_bias = shape.qk_norm = shape.attention.sinks = true;
  return shape;
}

ModelShape with_experts() {
  ModelShape shape = testing::qwen3_30b_a3b();
  shape.layers = 2, shape.expert_layer = {0, 1};
  shape.hidden = 16, shape.heads = 8, shape.kv_heads = 2, shape.head_dim = 4, shape.inner = 40, shape.vocabulary = 51;
  shape.experts = 8, shape.expert_inner = 11;
  return shape;
}

// A parameter of layer 0.
ParameterShape parameter_of(const std::string& name, std::vector<Side> sides, bool of_heads = false) {
  ParameterShape parameter;
  parameter.name = name, parameter.sides = std::move(sides), parameter.layer = 0, parameter.of_heads = of_heads;
  return parameter;
}

TEST(LocalShape, OfOneRankIsTheWhole) {
  for (const ModelShape& shape : {with_odd_sizes(), with_experts(), testing::qwen3_30b_a3b()}) {
    const LocalShape local(shape);
    EXPECT_EQ(local.parameters(), shape.parameters());
    EXPECT_EQ(local.own().heads, shape.heads);
    EXPECT_EQ(local.vocabulary(), (LocalShape::Range{0, shape.vocabulary}));
    for_each_parameter(shape, [&](const ParameterShape& parameter) {
      const Shard shard = *local.shard(parameter);
      EXPECT_EQ(shard.dim, -1) << parameter.name;
      EXPECT_TRUE(shard.counted && !shard.partial_gradient && !shard.padded()) << parameter.name;
    });
  }
}

TEST(LocalShape, AStageHasTheWindowsOfItsLayers) {
  ModelShape shape = with_odd_sizes();
  shape.window = 7, shape.window_layer = {1, 0, 1};
  std::string windows;
  for (std::int64_t pp = 0; pp < 2; ++pp) {
    const LocalShape local(shape, {.pp = 2}, {.pp = pp});
    for (std::int64_t layer = 0; layer < local.own().layers; ++layer)
      windows += std::to_string(local.own().window_of(layer));
  }
  EXPECT_EQ(windows, "707");
}

// Counts, for every index of the divided dimension, the ranks that hold it and those that count it in a norm.
TEST(LocalShape, RanksTogetherHoldEveryElementAndCountItOnce) {
  const std::vector<Degrees> layouts = {
      {.tp = 2}, {.tp = 4}, {.tp = 8}, {.pp = 2, .dp = 2}, {.tp = 2, .cp = 2, .dp = 2}};
  const std::vector<Degrees> of_experts = {{.dp = 4, .ep = 2}, {.tp = 2, .ep = 2}, {.tp = 2, .dp = 2, .ep = 4}};
  for (const bool experts : {false, true})
    for (const Degrees& degrees : experts ? of_experts : layouts) {
      const ModelShape shape = experts ? with_experts() : with_odd_sizes();
      for_each_parameter(shape, [&](const ParameterShape& parameter) {
        std::map<std::int64_t, int> held, counted;
        std::int64_t extent = 0;
        for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank) {
          const auto shard = LocalShape(shape, degrees, place_of(rank, degrees)).shard(parameter);
          if (!shard) continue;
          EXPECT_GE(shard->local, shard->end - shard->begin);
          extent = shard->whole;
          for (std::int64_t i = shard->begin; i < shard->end; ++i) ++held[i], counted[i] += shard->counted;
        }
        ASSERT_EQ(held.size(), static_cast<std::size_t>(extent)) << parameter.name << ", " << text_of_degrees(degrees);
        for (const auto& [index, times] : counted) ASSERT_EQ(times, 1) << parameter.name << " at " << index;
      });
    }
}

// Fewer key/value heads than ranks: neighbours share one, and each has a part of its gradient.
TEST(LocalShape, KeyValueHeadsFewerThanRanksAreHeldByNeighbours) {
  const ModelShape shape = with_odd_sizes();  // 2 of them
  const Degrees degrees{.tp = 8};
  const LayerParameters layer = layer_parameters(shape, false);
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    const LocalShape local(shape, degrees, place_of(rank, degrees));
    EXPECT_EQ(local.own().heads, 1);
    EXPECT_EQ(local.own().kv_heads, 1);
    const Shard key = *local.shard(parameter_of("k", {layer.key.out, layer.key.in}));
    EXPECT_EQ(key.begin, rank < 4 ? 0 : 4);
    EXPECT_EQ(key.copies, 4);
    EXPECT_TRUE(key.partial_gradient);
    EXPECT_EQ(key.counted, rank % 4 == 0);
    const Shard query = *local.shard(parameter_of("q", {layer.query.out, layer.query.in}));
    EXPECT_EQ(query.begin, 4 * rank);
    EXPECT_FALSE(query.partial_gradient);
    EXPECT_TRUE(local.shard(parameter_of("q_norm", {{4}}, true))->partial_gradient);
    EXPECT_FALSE(local.shard(parameter_of("norm", {{16}}))->partial_gradient);
  }
}

TEST(LocalShape, SizesThatRanksDoNotDivideArePaddedOnTheLastOne) {
  const Degrees degrees{.tp = 4};
  const LocalShape first(with_odd_sizes(), degrees, place_of(0, degrees)),
      last(with_odd_sizes(), degrees, place_of(3, degrees));
  EXPECT_EQ(first.own().vocabulary, 13);
  EXPECT_EQ(last.own().vocabulary, 13);
  EXPECT_EQ(last.vocabulary(), (LocalShape::Range{39, 50}));
  EXPECT_EQ(last.own().inner, 11);
  const Side inner = layer_parameters(with_odd_sizes(), false).gate.out;
  EXPECT_TRUE(last.shard(parameter_of("gate", {inner, {16}}))->padded());
  EXPECT_EQ(first.parameters(), last.parameters());  // equal on all ranks, so that collectives can be
}

TEST(LocalShape, WhatCannotBeDividedIsRefused) {
  const auto refused = [](const ModelShape& shape, const Degrees& degrees) {
    EXPECT_THROW(LocalShape(shape, degrees, Place{}), OptionError) << text_of_degrees(degrees);
  };
  refused(with_odd_sizes(), {.tp = 3});
  refused(with_odd_sizes(), {.dp = 2, .ep = 2});
  refused(with_odd_sizes(), {.pp = 4});
  refused(with_experts(), {.dp = 3, .ep = 3});
  refused(with_experts(), {.tp = 4, .ep = 2});
  ModelShape few = with_odd_sizes();
  few.vocabulary = 5;
  refused(few, {.tp = 4});  // 2, 2, 1 and nothing
  few = with_odd_sizes();
  few.kv_heads = 8, few.heads = 24;
  refused(few, {.tp = 12});
}

TEST(LocalShape, StatesAreDividedByKeyHeadsAndByDepth) {
  ModelShape shape = with_odd_sizes();
  shape.delta_rule = {2, 4, 6, 5, 4};
  shape.mixer_of_layer = {Mixer::delta_rule, Mixer::attention, Mixer::delta_rule};
  EXPECT_THROW(LocalShape(shape, {.cp = 2}, Place{}), OptionError);
  EXPECT_THROW(LocalShape(shape, {.tp = 4}, Place{}), OptionError);
  EXPECT_EQ(LocalShape(shape, {.dp = 2}, Place{}).own().states_in(0, 3), 2);
  const ModelShape last = LocalShape(shape, {.pp = 2}, {.pp = 1}).own();
  EXPECT_EQ(last.states_in(0, last.layers), 1);
  const LocalShape second(shape, {.tp = 2}, {.tp = 1});
  EXPECT_EQ(second.own().delta_rule.state(), shape.delta_rule.state() / 2);
  // Of 12 channels of queries, 12 of keys and 20 of values the second half each.
  for_each_parameter(shape, [&](const ParameterShape& parameter) {
    if (!parameter.name.ends_with("conv1d.weight")) return;
    std::vector<std::int64_t> ends;
    for (const Shard::Range& range : second.shard(parameter)->ranges())
      ends.insert(ends.end(), {range.begin, range.end});
    EXPECT_EQ(ends, (std::vector<std::int64_t>{6, 12, 18, 24, 34, 44}));
  });
  // Mamba-2's z and x of 20, B and C of 12, a step for each of 4 heads.
  shape.delta_rule.mamba = true;
  const LocalShape half(shape, {.tp = 2}, {.tp = 1});
  for_each_parameter(shape, [&](const ParameterShape& parameter) {
    if (!parameter.name.ends_with("in_proj.weight")) return;
    std::vector<std::int64_t> ends;
    for (const Shard::Range& range : half.shard(parameter)->ranges()) ends.insert(ends.end(), {range.begin, range.end});
    EXPECT_EQ(ends, (std::vector<std::int64_t>{10, 20, 30, 40, 46, 52, 58, 64, 66, 68}));
  });
}

// A row's projections, the recurrence of its value heads, the output; attention in the layer between.
TEST(LocalShape, ParametersOfTheDeltaRuleAreCounted) {
  ModelShape shape = with_odd_sizes();
  shape.delta_rule = {2, 4, 6, 5, 4};
  shape.mixer_of_layer = {Mixer::delta_rule, Mixer::attention, Mixer::attention};
  std::int64_t total = 0, of_layer = 0;
  for_each_parameter(shape, [&](const ParameterShape& p) {
    std::int64_t count = 1;
    for (const Side& side : p.sides) count *= side.size;
    total += count, of_layer += p.layer == 0 && p.name.find("linear_attn") != p.name.npos ? count : 0;
  });
  EXPECT_EQ(shape.parameters(), total);
  const std::int64_t C = 2 * 2 * 6 + 4 * 5, V = 4 * 5, M = shape.hidden;
  EXPECT_EQ(of_layer, (C + V + 4 + 4) * M + C * 4 + 4 + 4 + 5 + M * V);
}

}  // namespace
}  // namespace espalier
