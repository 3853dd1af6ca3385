// The part of a model that each rank has: the parts of all ranks together have every element of every parameter.
#include "espalier/shape/local_shape.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/mixers/mamba2/shape.h"
#include "tests/support/layers.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

ModelShape with_odd_sizes() {
  ModelShape shape = testing::llama_3_8b();
  shape.vocabulary = 50, shape.hidden = 16, shape.mlp_bias = true;
  AttentionShape attention{.heads = 8, .kv_heads = 2, .head_dim = 4};
  attention.qkv_bias = attention.output_bias = attention.qk_norm = attention.sinks = true;
  shape.layer = attention_layers(3, attention, 43);
  return shape;
}

ModelShape with_experts() {
  ModelShape shape = testing::qwen3_30b_a3b();
  shape.hidden = 16, shape.vocabulary = 51;
  shape.layer = attention_layers(2, {.heads = 8, .kv_heads = 2, .head_dim = 4, .qk_norm = true}, 40);
  shape.layer[1].mlp = MlpKind::experts;
  shape.experts = 8, shape.expert_inner = 11;
  return shape;
}

// 2 key heads of 6 channels, 4 value heads of 5.
RecurrenceShape four_heads() {
  RecurrenceShape states;
  states.key_heads = 2, states.value_heads = 4, states.key_dim = 6, states.value_dim = 5, states.kernel = 4;
  return states;
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
    EXPECT_EQ(testing::attention_of(local.own()).heads, testing::attention_of(shape).heads);
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
  testing::change_attention(shape, [](AttentionShape& a, std::size_t layer) { a.window = layer == 1 ? 0 : 7; });
  std::string windows;
  for (std::int64_t pp = 0; pp < 2; ++pp) {
    const LocalShape local(shape, {.pp = 2}, {.pp = pp});
    for (const LayerShape& layer : local.own().layer) windows += std::to_string(layer.mixer->window());
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
  const PartParameters mixer = layer_parameters(shape, shape.at(0)).mixer;
  const ProjectionShape &query_weight = mixer.products()[Attention::query].parts[0],
                        &key_weight = mixer.products()[Attention::key_value].parts[0];
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    const LocalShape local(shape, degrees, place_of(rank, degrees));
    EXPECT_EQ(testing::attention_of(local.own()).heads, 1);
    EXPECT_EQ(testing::attention_of(local.own()).kv_heads, 1);
    const Shard key = *local.shard(parameter_of("k", {key_weight.out, key_weight.in}));
    EXPECT_EQ(key.begin, rank < 4 ? 0 : 4);
    EXPECT_EQ(key.copies, 4);
    EXPECT_TRUE(key.partial_gradient);
    EXPECT_EQ(key.counted, rank % 4 == 0);
    const Shard query = *local.shard(parameter_of("q", {query_weight.out, query_weight.in}));
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
  EXPECT_EQ(last.own().at(0).inner, 11);
  const Side inner = layer_parameters(with_odd_sizes(), with_odd_sizes().at(0))
                         .mlp.products()[DenseProductNumbers::gate_up]
                         .parts[0]
                         .out;
  EXPECT_TRUE(last.shard(parameter_of("gate", {inner, {16}}))->padded());
  EXPECT_EQ(first.parameters(), last.parameters());  // equal on all ranks, so that collectives can be
}

TEST(LocalShape, WhatCannotBeShardedIsRefused) {
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
  few.layer = attention_layers(3, {.heads = 24, .kv_heads = 8, .head_dim = 4}, 43);
  refused(few, {.tp = 12});
}

TEST(LocalShape, StatesAreShardedByKeyHeadsAndByDepth) {
  ModelShape shape = with_odd_sizes();
  testing::set_delta_rule(shape, four_heads(), {1, 0, 1});
  EXPECT_THROW(LocalShape(shape, {.tp = 4}, Place{}), OptionError);
  const std::int64_t state = four_heads().state();
  EXPECT_EQ(LocalShape(shape, {.dp = 2}, Place{}).own().states(), 2 * state);
  const ModelShape last = LocalShape(shape, {.pp = 2}, {.pp = 1}).own();
  EXPECT_EQ(last.states(), state);
  const LocalShape second(shape, {.tp = 2}, {.tp = 1});
  EXPECT_EQ(second.own().states(), 2 * state / 2);
  // The second half each of 12 channels of queries, 12 of keys and 20 of values.
  for_each_parameter(shape, [&](const ParameterShape& parameter) {
    if (!parameter.name.ends_with("conv1d.weight")) return;
    std::vector<std::int64_t> ends;
    for (const Shard::Range& range : second.shard(parameter)->ranges())
      ends.insert(ends.end(), {range.begin, range.end});
    EXPECT_EQ(ends, (std::vector<std::int64_t>{6, 12, 18, 24, 34, 44}));
  });
  // Mamba-2's z and x of 20, B and C of 12, a step for each of 4 heads.
  RecurrenceShape mamba = four_heads();
  mamba.mamba = true;
  for (LayerShape& layer : shape.layer)
    if (layer.mixer->state() > 0) layer.mixer = std::make_shared<const Mamba2>(mamba);
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
  testing::set_delta_rule(shape, four_heads(), {1});
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
