// Views of flat buffers: every element is seen where its name says, once, as the product that reads it wants it.
#include "espalier/model/model_views.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/concat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstring>

#include "espalier/base/error.h"
#include "espalier/shape/trained_parameters.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

using at::Tensor;

ModelShape small_shape() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.hidden = 6, shape.vocabulary = 5, shape.max_positions = 8;
  shape.layer = attention_layers(2, {.heads = 2, .kv_heads = 1, .head_dim = 4, .qkv_bias = true, .qk_norm = true}, 7);
  shape.mlp_bias = true;
  return shape;
}

// The number of an element is its place.
FlatParameters numbered(const ParameterTable& table, double first = 0) {
  return {table, at::arange(table.kept_size(), at::kDouble) + first, {}};
}

Tensor named(const FlatParameters& of, const std::string& name) {
  const Parameter& parameter = of.table.at(name);
  return of.flat.narrow(0, parameter.offset, parameter.count).view(parameter.shape);
}

TEST(ModelViews, JoinTheNeighboursThatOneProductReads) {
  const LocalShape shape(small_shape());
  const ParameterTable table(shape);
  const FlatParameters flat = numbered(table);
  const ModelViews views = view_model({&flat, 1}, shape);
  ASSERT_EQ(views.layers.size(), 2u);
  const LayerViews& layer = views.layers[1];
  const auto weight = [&](const std::string& name) { return named(flat, "model.layers.1." + name); };
  const Projection& kv = layer.mixer.products[Attention::key_value];
  EXPECT_TRUE(kv.weight.equal(at::concat({weight("self_attn.k_proj.weight"), weight("self_attn.v_proj.weight")})));
  EXPECT_TRUE(kv.bias.equal(at::concat({weight("self_attn.k_proj.bias"), weight("self_attn.v_proj.bias")})));
  EXPECT_TRUE(layer.mixer.products[Attention::query].weight.equal(weight("self_attn.q_proj.weight")));
  EXPECT_TRUE(layer.mixer.products[Attention::output].weight.equal(weight("self_attn.o_proj.weight")));
  EXPECT_FALSE(layer.mixer.products[Attention::output].bias.defined());
  EXPECT_TRUE(layer.mixer.tensors[Attention::query_norm].equal(weight("self_attn.q_norm.weight")));
  EXPECT_TRUE(layer.gate_up.weight.equal(at::concat({weight("mlp.gate_proj.weight"), weight("mlp.up_proj.weight")})));
  EXPECT_TRUE(layer.gate_up.bias.equal(at::concat({weight("mlp.gate_proj.bias"), weight("mlp.up_proj.bias")})));
  EXPECT_TRUE(layer.down.weight.equal(weight("mlp.down_proj.weight")));
  EXPECT_TRUE(layer.mixer_norm_M.equal(weight("input_layernorm.weight")));
  EXPECT_TRUE(layer.mlp_norm_M.equal(weight("post_attention_layernorm.weight")));
  EXPECT_TRUE(views.final_norm_M.equal(named(flat, "model.norm.weight")));
  EXPECT_TRUE(views.head_VM.equal(named(flat, "lm_head.weight")));
  EXPECT_EQ(layer.dtype, at::kDouble);
  for (const Tensor& absent : {layer.mlp_post_norm_M, layer.mixer_norm_bias_M, layer.router.weight,
                               layer.expert_down_EMF, views.value_M, views.head_low_rank.a_rK})
    EXPECT_FALSE(absent.defined());
}

// Numbers written through the views fill the buffer without a gap.
TEST(ModelViews, SeeEveryElementOnce) {
  ModelShape dense = small_shape(), experts = small_shape();
  experts.experts = 3, experts.experts_per_token = 1, experts.expert_inner = 2;
  experts.shared_expert = {4, true};
  experts.mlp_bias = false;
  set_experts(experts, {0, 1});
  for (const ModelShape& whole : {dense, experts}) {
    const LocalShape shape(whole);
    const ParameterTable table(shape);
    const FlatParameters flat{table, at::zeros({table.kept_size()}, at::kDouble), {}};
    const ModelViews views = view_model({&flat, 1}, shape);
    const auto count = [](const Tensor& view) {
      if (view.defined()) view.add_(1);
    };
    count(views.embedding_VM), count(views.head_VM), count(views.final_norm_M);
    for (LayerViews layer : views.layers) {
      for (const Tensor& norm : {layer.mixer_norm_M, layer.mlp_norm_M}) count(norm);
      for (const Tensor& tensor : layer.mixer.tensors) count(tensor);
      for_each_projection(layer,
                          [&](const Projection& projection) { count(projection.weight), count(projection.bias); });
      count(layer.expert_gate_up_EWM), count(layer.expert_down_EMF);
    }
    EXPECT_TRUE(flat.flat.equal(at::ones_like(flat.flat)));
  }
}

TEST(ModelViews, ExpertsStandOneBehindTheOther) {
  ModelShape whole = small_shape();
  whole.mlp_bias = false;
  whole.experts = 3, whole.experts_per_token = 1, whole.expert_inner = 2;
  set_experts(whole, {1, 1});
  const LocalShape shape(whole);
  const ParameterTable table(shape);
  const FlatParameters flat = numbered(table);
  const LayerViews layer = view_model({&flat, 1}, shape).layers[1];
  EXPECT_FALSE(layer.gate_up.weight.defined());
  for (std::int64_t e = 0; e < 3; ++e) {
    const std::string expert = "model.layers.1.mlp.experts." + std::to_string(e) + ".";
    EXPECT_TRUE(layer.expert_gate_up_EWM[e].equal(
        at::concat({named(flat, expert + "gate_proj.weight"), named(flat, expert + "up_proj.weight")})));
    EXPECT_TRUE(layer.expert_down_EMF[e].equal(named(flat, expert + "down_proj.weight")));
  }
  EXPECT_TRUE(layer.router.weight.equal(named(flat, "model.layers.1.mlp.gate.weight")));
}

TEST(ModelViews, ATiedHeadIsTheEmbedding) {
  ModelShape whole = small_shape();
  whole.tied_head = true;
  const LocalShape shape(whole);
  const ParameterTable table(shape);
  const FlatParameters flat = numbered(table);
  const ModelViews views = view_model({&flat, 1}, shape);
  EXPECT_TRUE(views.head_VM.is_same(views.embedding_VM) || views.head_VM.data_ptr() == views.embedding_VM.data_ptr());
}

TEST(ModelViews, TakeEachParameterFromTheBufferThatHasIt) {
  const LocalShape shape(train_only(small_shape(), "norms"));
  const ParameterTable trained(shape, Parameters::trained), held(shape, Parameters::held);
  const std::vector<FlatParameters> both{numbered(trained), numbered(held, 1000)};
  const ModelViews views = view_model(both, shape);
  EXPECT_LT(views.layers[0].mlp_norm_M.max().item<double>(), 1000);
  EXPECT_GE(views.layers[0].down.weight.min().item<double>(), 1000);
  // A buffer of gradients has the trained parameters alone.
  const ModelViews gradients = view_model({both.data(), 1}, shape);
  EXPECT_TRUE(gradients.layers[0].mlp_norm_M.defined());
  EXPECT_FALSE(gradients.layers[0].down.trains());
  EXPECT_FALSE(gradients.embedding_VM.defined());
}

TEST(ModelViews, AdaptersOfJoinedProjectionsStandAtTheirOutputs) {
  const LocalShape shape(train_only(
      small_shape(),
      {"all", AdditionChoice{.rank = 2, .alpha = 8, .target = "v_proj,up_proj", .modules = {}, .directory = {}}}));
  const ParameterTable trained(shape, Parameters::trained), held(shape, Parameters::held);
  const std::vector<FlatParameters> both{numbered(trained), numbered(held, 1000)};
  const LayerViews layer = view_model(both, shape).layers[1];
  const std::vector<LowRank>& kv = layer.mixer.products[Attention::key_value].low_rank;
  ASSERT_EQ(kv.size(), 1u);
  EXPECT_EQ(kv[0].first, 4) << "behind the outputs of k_proj";
  EXPECT_EQ(kv[0].scale, 4);
  EXPECT_TRUE(kv[0].a_rK.equal(named(both[0], "model.layers.1.self_attn.v_proj.lora_A.weight")));
  EXPECT_TRUE(kv[0].b_Nr.equal(named(both[0], "model.layers.1.self_attn.v_proj.lora_B.weight")));
  ASSERT_EQ(layer.gate_up.low_rank.size(), 1u);
  EXPECT_EQ(layer.gate_up.low_rank[0].first, 7);
  EXPECT_TRUE(layer.mixer.products[Attention::query].low_rank.empty());
}

TEST(ModelViews, BuffersOfAnotherSizeAreRefused) {
  const LocalShape shape(small_shape());
  const ParameterTable table(shape);
  const FlatParameters flat{table, at::zeros({table.kept_size() - 1}, at::kDouble), {}};
  EXPECT_THROW(view_model({&flat, 1}, shape), InternalError);
}

}  // namespace
}  // namespace espalier::testing
