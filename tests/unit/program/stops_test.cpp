// The stops of every stage of a model, end to end, are one process's stops.
#include "espalier/program/stops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "espalier/shape/trained_parameters.h"
#include "espalier/shape/units.h"
#include "tests/unit/plan/shapes.h"

namespace espalier {
namespace {

using Kind = Stop::Kind;

ModelShape shape_of(std::int64_t layers, bool tied) {
  ModelShape shape = testing::tiny_shape();
  shape.layer = equal_layers(layers, shape.at(0)), shape.tied_head = tied;
  return shape;
}

std::vector<LocalShape> stages_of(const ModelShape& shape, std::int64_t stages) {
  std::vector<LocalShape> out;
  for (std::int64_t stage = 0; stage < stages; ++stage)
    out.emplace_back(shape, Degrees{.pp = stages}, Place{.pp = stage});
  return out;
}

// The stops of a pass over all stages: kinds, and layers by their number in the model.
std::vector<std::pair<Kind, std::int64_t>> course(const ModelShape& shape, std::int64_t stages, Pass pass,
                                                  HeadGradient when) {
  std::vector<LocalShape> all = stages_of(shape, stages);
  if (pass == Pass::backward) std::ranges::reverse(all);
  std::vector<std::pair<Kind, std::int64_t>> out;
  const auto add = [&](const Stop& stop, const LocalShape& local) {
    EXPECT_EQ(stop.pass, pass);
    out.emplace_back(stop.kind, stop.is_layer() ? local.layers().begin + stop.unit : -1);
  };
  for (const LocalShape& local : all) {
    const auto head = head_stop(local, pass, when);
    if (head && pass == Pass::backward) add(*head, local);
    for (const Stop& stop : decoder_stops(local, pass)) add(stop, local);
    if (head && pass == Pass::forward) add(*head, local);
  }
  return out;
}

TEST(Stops, StagesTogetherGoThroughTheModelOnce) {
  for (const std::int64_t layers : {1, 2, 5, 7})
    for (std::int64_t stages = 1; stages <= layers; ++stages)
      for (const HeadGradient when : {HeadGradient::in_forward, HeadGradient::in_backward}) {
        const ModelShape shape = shape_of(layers, false);
        std::vector<std::pair<Kind, std::int64_t>> expected{{Kind::embedding, -1}};
        for (std::int64_t layer = 0; layer < layers; ++layer) expected.emplace_back(Kind::layer, layer);
        expected.emplace_back(Kind::final_norm, -1);
        expected.emplace_back(Kind::head, -1);
        EXPECT_EQ(course(shape, stages, Pass::forward, when), expected) << layers << " layers, " << stages << " stages";
        std::ranges::reverse(expected);
        if (when == HeadGradient::in_forward) expected.erase(expected.begin());
        EXPECT_EQ(course(shape, stages, Pass::backward, when), expected)
            << layers << " layers, " << stages << " stages";
      }
}

TEST(Stops, SayWhatTheyReadAndAddTo) {
  for (const bool tied : {false, true}) {
    const LocalShape local(shape_of(3, tied));
    for (const Stop& stop : decoder_stops(local, Pass::forward)) {
      EXPECT_TRUE(stop.reads_weights);
      EXPECT_FALSE(stop.adds_gradients);
    }
    for (const Stop& stop : decoder_stops(local, Pass::backward)) {
      EXPECT_EQ(stop.reads_weights, stop.kind != Kind::embedding) << "look-ups need no weights to go back";
      EXPECT_TRUE(stop.adds_gradients);
    }
    EXPECT_FALSE(head_stop(local, Pass::forward, HeadGradient::none)->adds_gradients);
    EXPECT_TRUE(head_stop(local, Pass::forward, HeadGradient::in_forward)->adds_gradients);
    EXPECT_FALSE(head_stop(local, Pass::forward, HeadGradient::in_backward)->adds_gradients);
    EXPECT_TRUE(head_stop(local, Pass::backward, HeadGradient::in_backward)->adds_gradients);
    EXPECT_EQ(head_stop(local, Pass::forward, HeadGradient::none)->unit, tied ? Unit::kEmbedding : Unit::kHead);
  }
}

// Below the first layer that trains nothing is brought, computed or summed.
TEST(Stops, ABackwardEndsWhereNothingFurtherDownTrains) {
  const LocalShape local(train_only(shape_of(4, false), TrainedChoice("model.layers.[23]\\..*")));
  std::vector<std::int64_t> layers;
  for (const Stop& stop : decoder_stops(local, Pass::backward)) {
    EXPECT_NE(stop.kind, Kind::embedding);
    if (stop.is_layer()) layers.push_back(stop.unit);
  }
  EXPECT_EQ(layers, (std::vector<std::int64_t>{3, 2}));
}

}  // namespace
}  // namespace espalier
