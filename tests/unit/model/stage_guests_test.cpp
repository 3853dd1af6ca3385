// Guests of several ranks: rows and gradients go from stage to stage where a stage's layers begin and end; sharded
// weights are whole between a stop's enter and the next unit's.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "espalier/mixers/attention/shape.h"
#include "espalier/model/gathered_weights.h"
#include "espalier/model/stage_link.h"
#include "espalier/shape/trained_parameters.h"
#include "tests/support/in_process.h"

namespace espalier {
namespace {

ModelShape shape_of_layers(std::int64_t layers = 4) {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.vocabulary = 11, shape.hidden = 8;
  shape.layer = attention_layers(layers, {.heads = 2, .kv_heads = 1, .head_dim = 4}, 12);
  return shape;
}

// The weights of one rank, whose elements the test sets.
struct Rank {
  explicit Rank(const Mesh& mesh, const ModelShape& shape = shape_of_layers())
      : local(shape, mesh.degrees, mesh.place()),
        table(local, Parameters::trained),
        flat(at::zeros({table.kept_size()}, at::kDouble)),
        rooms(at::full({table.units().rooms}, NAN, at::kDouble)),
        gathered({{table, flat, rooms}}, mesh),
        decoder(local, view_model(std::vector<FlatParameters>{{table, flat, rooms}}, local), cpu_device(), mesh,
                &gathered) {}

  LocalShape local;
  ParameterTable table;
  at::Tensor flat, rooms;
  GatheredWeights gathered;
  Decoder decoder;
};

// Each stage adds 1 to the rows at each of its layers; a backward counts down.
TEST(StageLink, RowsPassThroughAllLayersAndGradientsBack) {
  for (const std::int64_t stages : {1, 2, 4})
    run_ranks({.pp = stages}, [](const Mesh& mesh) {
      const Rank rank(mesh);
      const bool first = rank.local.is_first_stage(), last = rank.local.is_last_stage();
      const at::Tensor stream = at::full({3, 8}, first ? 10.0 : NAN, at::kDouble);
      const auto pass = [&](Pass direction, double step) {
        StageLink link(rank.decoder, stream);
        walk(decoder_stops(rank.local, direction), {&link}, [&](const Stop& stop) {
          if (stop.is_layer()) stream.add_(step);
        });
      };
      pass(Pass::forward, 1);
      if (last) {
        EXPECT_TRUE(stream.eq(14).all().item<bool>());
      }
      if (!last) stream.fill_(NAN);
      pass(Pass::backward, -1);
      if (first) {
        EXPECT_TRUE(stream.eq(10).all().item<bool>());
      }
    });
}

// Stages below the first layer that trains get no gradient.
TEST(StageLink, NoGradientGoesWhereNothingTrains) {
  run_ranks({.pp = 2}, [](const Mesh& mesh) {
    const Rank rank(mesh, train_only(shape_of_layers(), {"model.layers.3.*"}));
    const at::Tensor stream = at::full({3, 8}, 5.0, at::kDouble);
    StageLink link(rank.decoder, stream);
    walk(decoder_stops(rank.local, Pass::backward), {&link});
    EXPECT_EQ(mesh.bytes().pp, 0);
  });
}

// A rank keeps a part of every unit; at a stop its views have the whole parameter, numbered here.
TEST(GatheredWeights, AreWholeAtTheirStop) {
  run_ranks({.dp = 3, .full = true}, [](const Mesh& mesh) {
    Rank rank(mesh);
    ASSERT_TRUE(rank.table.sharded());
    double number = 1;
    for (const Parameter& parameter : rank.table.parameters()) {
      const Kept kept = rank.table.kept(parameter);
      rank.flat.narrow(0, kept.place, kept.count)
          .copy_(at::arange(kept.first, kept.first + kept.count, at::kDouble) + 1000 * number++);
    }
    const ModelViews& views = rank.decoder.weights();
    const auto expect_whole = [](const at::Tensor& view, const char* what) {
      const at::Tensor values = view.flatten();
      const double first = values[0].item<double>();
      EXPECT_GE(first, 1000) << what;
      EXPECT_TRUE(values.equal(at::arange(0, values.numel(), at::kDouble) + first)) << what;
    };
    std::int64_t layers = 0;
    for (const Pass pass : {Pass::forward, Pass::backward})
      walk(decoder_stops(rank.local, pass), {&rank.gathered}, [&](const Stop& stop) {
        if (!stop.reads_weights) return;
        if (stop.kind == Stop::Kind::embedding) expect_whole(views.embedding_VM, "embedding");
        if (stop.kind == Stop::Kind::final_norm) expect_whole(views.final_norm_M, "final norm");
        if (!stop.is_layer()) return;
        const LayerViews& layer = views.layers[static_cast<std::size_t>(stop.unit)];
        expect_whole(layer.mixer_norm_M, "norm before attention");
        expect_whole(layer.mlp_norm_M, "norm before the MLP");
        ++layers;
      });
    EXPECT_EQ(layers, 8);
  });
}

}  // namespace
}  // namespace espalier
