// Sums of a step's gradients over ranks: copies within tp, replicas, and a tied embedding, which the first and the last
// stage of pp have a gradient of.
#include "espalier/gradient/reduction.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cmath>

#include "espalier/mixers/attention/shape.h"
#include "tests/support/in_process.h"

namespace espalier {
namespace {

ModelShape small_shape(bool tied) {
  ModelShape shape;
  shape.architecture = "Qwen3ForCausalLM";
  shape.vocabulary = 12, shape.hidden = 8, shape.tied_head = tied;
  shape.layer = attention_layers(3, {.heads = 4, .kv_heads = 2, .head_dim = 4, .qk_norm = true}, 12);
  return shape;
}

// Every rank fills its gradients with 10^rank, so that a digit of the sum says how often a rank was added.
template <class Check>
void sum(const Degrees& degrees, bool tied, Check&& check) {
  run_ranks(degrees, [&](const Mesh& mesh) {
    const LocalShape local(small_shape(tied), mesh.degrees, mesh.place());
    const ParameterTable table(local, Parameters::trained);
    GradientSet gradients(table, local, at::kDouble, cpu_device(), mesh);
    gradients.flat().fill_(std::pow(10, mesh.world.rank()));
    sum_over_ranks(gradients, mesh);
    for (const Parameter& parameter : table.parameters()) {
      const at::Tensor values = gradients.kept(parameter).flatten();
      if (values.numel() == 0) continue;
      check(mesh, parameter, values);
    }
  });
}

void expect_all(const at::Tensor& values, double expected, const Parameter& parameter) {
  EXPECT_TRUE(values.eq(expected).all().item<bool>())
      << parameter.name << ": " << values[0].item<double>() << ", expected " << expected;
}

TEST(Reduction, ReplicasAreAddedOnceEach) {
  for (const Degrees& degrees : {Degrees{.dp = 3}, Degrees{.cp = 3}})
    sum(degrees, true,
        [](const Mesh&, const Parameter& parameter, const at::Tensor& values) { expect_all(values, 111, parameter); });
}

TEST(Reduction, ATiedEmbeddingIsTheSumOfItsTwoStages) {
  for (const bool tied : {true, false})
    sum({.pp = 3}, tied, [&](const Mesh& mesh, const Parameter& parameter, const at::Tensor& values) {
      const bool shared = tied && parameter.name == "model.embed_tokens.weight";
      expect_all(values, shared ? 101 : std::pow(10, mesh.world.rank()), parameter);
    });
}

TEST(Reduction, OfStagesWithReplicasBothHold) {
  // Ranks 0 and 1 are stages of the first replica, 2 and 3 of the second.
  sum({.pp = 2, .dp = 2}, true, [](const Mesh& mesh, const Parameter& parameter, const at::Tensor& values) {
    const bool shared = parameter.name == "model.embed_tokens.weight";
    expect_all(values, shared ? 1111 : mesh.place().pp == 0 ? 101 : 1010, parameter);
  });
}

// Ranks of tp compute parts of the gradient of a head norm, which all of them hold; of a matrix each has its own part.
TEST(Reduction, CopiesWithinTpAreSummedWhereEachComputesAPart) {
  bool any = false;
  sum({.tp = 2}, true, [&](const Mesh& mesh, const Parameter& parameter, const at::Tensor& values) {
    const bool partial = parameter.shard.partial_gradient;
    if (parameter.name.find("q_norm") != std::string::npos) {
      EXPECT_TRUE(partial) << parameter.name;
      if (mesh.world.rank() == 0) any = true;
    }
    expect_all(values, partial ? 11 : std::pow(10, mesh.world.rank()), parameter);
  });
  EXPECT_TRUE(any);
}

}  // namespace
}  // namespace espalier
