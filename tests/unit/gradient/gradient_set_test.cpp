// Gradients of ranks that hold the same weights, summed around the stops of their last backward, and of ranks that
// divide the weights, unit by unit.
#include "espalier/gradient/gradient_set.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <string>

#include "espalier/mixers/attention/shape.h"
#include "tests/support/in_process.h"

namespace espalier {
namespace {

ModelShape small_shape() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.vocabulary = 11, shape.hidden = 8;
  shape.layer = attention_layers(3, {.heads = 2, .kv_heads = 1, .head_dim = 4}, 12);
  return shape;
}

struct Rank {
  explicit Rank(const Mesh& mesh)
      : local(small_shape(), mesh.degrees, mesh.place()),
        table(local, Parameters::trained),
        gradients(table, local, at::kDouble, cpu_device(), mesh) {}

  void leave(const Stop& stop) { gradients.guest()->leave(stop); }

  LocalShape local;
  ParameterTable table;
  GradientSet gradients;
};

TEST(GradientSet, OfOneRankHasNoGuest) {
  Rank alone(mesh_of_one());
  EXPECT_EQ(alone.gradients.guest(), nullptr);
}

TEST(GradientSet, IsSummedOverReplicasWhileTheLastBackwardRuns) {
  run_ranks({.dp = 2}, [](const Mesh& mesh) {
    Rank rank(mesh);
    rank.gradients.flat().fill_(mesh.world.rank() + 1);
    rank.gradients.begin_last_backward();
    std::int64_t given = 0;
    for (const Stop& stop : decoder_stops(rank.local, Pass::backward)) {
      rank.leave(stop);
      if (stop.is_layer()) {
        EXPECT_GT(rank.gradients.given_ahead(), given) << "the sum of layer " << stop.unit << " begins behind it";
      }
      given = rank.gradients.given_ahead();
    }
    EXPECT_LT(given, rank.table.size() * 8) << "the embedding, which the head may be, ends last";
    rank.gradients.finish_sums();
    EXPECT_TRUE(rank.gradients.flat().eq(3).all().item<bool>());
  });
}

TEST(GradientSet, IsSummedOnceAStepWhateverBackwardsWereRunBefore) {
  run_ranks({.dp = 2}, [](const Mesh& mesh) {
    Rank rank(mesh);
    rank.gradients.flat().fill_(1);
    for (int backward = 0; backward < 3; ++backward)
      for (const Stop& stop : decoder_stops(rank.local, Pass::backward)) rank.leave(stop);
    EXPECT_EQ(rank.gradients.given_ahead(), 0);
    rank.gradients.finish_sums();
    EXPECT_TRUE(rank.gradients.flat().eq(2).all().item<bool>());
  });
}

// Two items, each of which adds its rank's number to a layer's views: every part gets 2 (1 + 2 + 3).
TEST(GradientSet, OfShardedWeightsAddsUpItemByItem) {
  run_ranks({.dp = 3, .full = true}, [](const Mesh& mesh) {
    Rank rank(mesh);
    ASSERT_TRUE(rank.table.sharded());
    Guest& guest = *rank.gradients.guest();
    for (int item = 0; item < 2; ++item)
      for (const Stop& stop : decoder_stops(rank.local, Pass::backward)) {
        guest.enter(stop);
        if (stop.is_layer()) {
          const at::Tensor& norm_M = rank.gradients.views().layers[static_cast<std::size_t>(stop.unit)].mlp_norm_M;
          EXPECT_TRUE(norm_M.eq(0).all().item<bool>()) << "a room begins with 0";
          norm_M.add_(mesh.world.rank() + 1);
        }
        guest.leave(stop);
      }
    rank.gradients.finish_sums();
    for (const Parameter& parameter : rank.table.parameters()) {
      const bool added = parameter.name.find("post_attention_layernorm") != std::string::npos;
      EXPECT_TRUE(rank.gradients.kept(parameter).eq(added ? 12 : 0).all().item<bool>()) << parameter.name;
    }
  });
}

// A forward's head that computes its gradient is a stop like another.
TEST(GradientSet, TheHeadsUnitIsSummedInTheForward) {
  run_ranks({.dp = 2, .full = true}, [](const Mesh& mesh) {
    Rank rank(mesh);
    Guest& guest = *rank.gradients.guest();
    for (const Stop& stop : decoder_stops(rank.local, Pass::forward)) guest.enter(stop), guest.leave(stop);
    const Stop head = *head_stop(rank.local, Pass::forward, HeadGradient::in_forward);
    guest.enter(head);
    rank.gradients.views().head_VM.add_(1);
    guest.leave(head);
    rank.gradients.finish_sums();
    EXPECT_TRUE(rank.gradients.kept(rank.table.at("lm_head.weight")).eq(2).all().item<bool>());
    EXPECT_TRUE(rank.gradients.kept(rank.table.at("model.embed_tokens.weight")).eq(0).all().item<bool>());
  });
}

}  // namespace
}  // namespace espalier
