// The one list of a model's parameters: names, order, sizes and counts, by hand.
#include "espalier/shape/parameter_shapes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "espalier/shape/trained_parameters.h"
#include "tests/support/layers.h"

namespace espalier::testing {
namespace {

using Of = ReadTogether::Of;

// M 6, H 2 heads of 4, one key/value head, F 7.
ModelShape dense_shape() {
  ModelShape shape;
  shape.architecture = "LlamaForCausalLM";
  shape.hidden = 6, shape.vocabulary = 5, shape.max_positions = 8;
  shape.layer = attention_layers(2, {.heads = 2, .kv_heads = 1, .head_dim = 4, .qkv_bias = true}, 7);
  return shape;
}

// 3 experts of width 2 in the second layer, with a shared one of width 4 and its gate.
ModelShape expert_shape() {
  ModelShape shape = dense_shape();
  shape.experts = 3, shape.experts_per_token = 1, shape.expert_inner = 2;
  shape.shared_expert = {4, true};
  shape.router.correction_bias = true;
  set_experts(shape, {0, 1});
  return shape;
}

std::vector<ParameterShape> listed(const ModelShape& shape) {
  std::vector<ParameterShape> out;
  for_each_parameter(shape, [&](const ParameterShape& p) { out.push_back(p); });
  return out;
}
std::vector<std::string> names_of(const std::vector<ParameterShape>& parameters, const std::string& prefix) {
  std::vector<std::string> out;
  for (const ParameterShape& p : parameters)
    if (p.name.starts_with(prefix)) out.push_back(p.name.substr(prefix.size()));
  return out;
}
const ParameterShape& one(const std::vector<ParameterShape>& parameters, const std::string& name) {
  const auto found = std::ranges::find(parameters, name, &ParameterShape::name);
  if (found == parameters.end()) throw std::out_of_range(name);
  return *found;
}

TEST(ParameterShapes, StandInTheOrderOfTheFlatBuffer) {
  const auto parameters = listed(dense_shape());
  EXPECT_EQ(parameters.front().name, "model.embed_tokens.weight");
  EXPECT_EQ(
      names_of(parameters, "model.layers.0."),
      (std::vector<std::string>{"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
                                "self_attn.v_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.bias",
                                "self_attn.v_proj.bias", "self_attn.o_proj.weight", "post_attention_layernorm.weight",
                                "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}));
  EXPECT_EQ(parameters[parameters.size() - 2].name, "model.norm.weight");
  EXPECT_EQ(parameters.back().name, "lm_head.weight");
}

TEST(ParameterShapes, ExpertsStandByProductAndThenByExpert) {
  EXPECT_EQ(names_of(listed(expert_shape()), "model.layers.1.mlp."),
            (std::vector<std::string>{
                "gate.weight", "gate.e_score_correction_bias", "experts.0.gate_proj.weight", "experts.0.up_proj.weight",
                "experts.1.gate_proj.weight", "experts.1.up_proj.weight", "experts.2.gate_proj.weight",
                "experts.2.up_proj.weight", "experts.0.down_proj.weight", "experts.1.down_proj.weight",
                "experts.2.down_proj.weight", "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight",
                "shared_expert.down_proj.weight", "shared_expert_gate.weight"}));
}

TEST(ParameterShapes, SayWhatTheyArePartsOf) {
  const auto parameters = listed(expert_shape());
  const ParameterShape& k = one(parameters, "model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(k.sides[0].size, 4);
  EXPECT_EQ(k.sides[1].size, 6);
  EXPECT_TRUE(k.of_mixer);
  EXPECT_EQ(k.layer, 0);
  const ParameterShape& v = one(parameters, "model.layers.0.self_attn.v_proj.weight");
  const ParameterShape& q = one(parameters, "model.layers.0.self_attn.q_proj.weight");
  const ParameterShape& bias = one(parameters, "model.layers.0.self_attn.k_proj.bias");
  EXPECT_EQ(k.read, v.read);
  EXPECT_NE(k.read, q.read);
  EXPECT_TRUE(k.read.is_product() && k.read.in_mixer());
  EXPECT_EQ(bias.read.of, Of::mixer_bias);
  const ParameterShape& expert = one(parameters, "model.layers.1.mlp.experts.2.down_proj.weight");
  EXPECT_EQ(expert.expert, 2);
  EXPECT_EQ(expert.read.number, ExpertProductNumbers::down);
  EXPECT_EQ(expert.read, one(parameters, "model.layers.1.mlp.experts.0.down_proj.weight").read);
  EXPECT_FALSE(one(parameters, "model.layers.1.mlp.gate.e_score_correction_bias").trains);
  EXPECT_TRUE(keeps_its_dtype("model.layers.1.mlp.gate.e_score_correction_bias"));
  EXPECT_EQ(one(parameters, "model.norm.weight").layer, -1);
}

TEST(ParameterShapes, AreCountedAsTheyAreListed) {
  ModelShape tied = dense_shape(), critic = dense_shape(), layer_norm = dense_shape(), both = dense_shape();
  tied.tied_head = true;
  critic.value_head = true;
  layer_norm.norm = NormKind::layer;
  set_norm_place(both, NormPlace::both);
  for (const ModelShape& shape : {dense_shape(), expert_shape(), tied, critic, layer_norm, both}) {
    std::int64_t sum = 0;
    std::set<std::string> names;
    for (const ParameterShape& p : listed(shape)) {
      std::int64_t elements = 1;
      for (const Side& side : p.sides) elements *= side.size;
      sum += elements;
      EXPECT_TRUE(names.insert(p.name).second) << p.name << " stands twice";
    }
    EXPECT_EQ(sum, shape.parameters());
  }
  // By hand: norms 2 x 6, q 8 x 6 + 8, k and v 4 x 6 + 4 each, o 6 x 8, gate, up and down 7 x 6 each.
  const ModelShape shape = dense_shape();
  const std::int64_t layer = 12 + 56 + 2 * 28 + 48 + 3 * 42;
  EXPECT_EQ(layer_parameters(shape, shape.at(0)).parameters(), layer);
  EXPECT_EQ(shape.parameters(), 2 * layer + 2 * 5 * 6 + 6);
  // Router 3 x 6 and its correction, 3 experts of 3 matrices 2 x 6, the shared one's 3 of 4 x 6, its gate.
  const ModelShape experts = expert_shape();
  EXPECT_EQ(layer_parameters(experts, experts.at(1)).parameters(), layer - 126 + 18 + 3 + 3 * 36 + 72 + 6);
}

TEST(ParameterShapes, LayersWithoutAnMlpHaveItsMixerAndOneNorm) {
  ModelShape shape = dense_shape();
  shape.layer[1].mlp = MlpKind::none;
  EXPECT_EQ(names_of(listed(shape), "model.layers.1.").size(), 8u);
  EXPECT_EQ(layer_parameters(shape, shape.at(1)).mlp_norm.width, 0);
}

TEST(ParameterShapes, ProjectionsHaveABitEach) {
  ModelShape shape = expert_shape();
  LayerParameters p = layer_parameters(shape, shape.at(1));
  AdaptedLayer adapted;
  std::vector<std::string> names;
  for_each_projection(
      p, adapted, [&](const ProjectionShape& projection, const ProductShape&, std::uint32_t& bits, std::uint32_t bit) {
        EXPECT_EQ(bits & bit, 0u) << projection.name;
        bits |= bit;
        names.emplace_back(projection.name);
      });
  EXPECT_EQ(adapted.mixer, 0b1111u);
  EXPECT_EQ(adapted.mlp, 0b1111'1111u);
  EXPECT_EQ(names[0], "self_attn.q_proj");
  EXPECT_EQ(names[4], "mlp.gate");
}

TEST(ParameterShapes, AdaptersStandBehindTheirProductAndAreCounted) {
  const ModelShape shape = train_only(
      dense_shape(),
      {"all", AdditionChoice{.rank = 2, .target = "v_proj,down_proj,lm_head", .modules = {}, .directory = {}}});
  const auto parameters = listed(shape);
  EXPECT_EQ(names_of(parameters, "model.layers.1.self_attn.v_proj.lora"),
            (std::vector<std::string>{"_A.weight", "_B.weight"}));
  const ParameterShape& a = one(parameters, "model.layers.1.mlp.down_proj.lora_A.weight");
  EXPECT_TRUE(a.added && a.trains);
  EXPECT_EQ(a.sides[0].size, 2);
  EXPECT_EQ(a.sides[1].size, 7);
  EXPECT_FALSE(one(parameters, "model.layers.1.mlp.down_proj.weight").trains);
  EXPECT_EQ(layer_parameters(shape, shape.at(0)).low_rank(), 2 * (4 + 6) + 2 * (6 + 7));
  EXPECT_EQ(trained_weights(shape).layers, 2 * (2 * (4 + 6) + 2 * (6 + 7)));
  const std::vector<AddedPair> pairs = added_pairs(shape);
  ASSERT_EQ(pairs.size(), 5u);
  EXPECT_EQ(pairs[0].module, "model.layers.0.self_attn.v_proj");
  EXPECT_EQ(pairs[0].weight, "model.layers.0.self_attn.v_proj.weight");
  EXPECT_EQ(pairs[4].b, "lm_head.lora_B.weight");
  std::set<std::string> added;
  for (const ParameterShape& p : parameters)
    if (p.added) added.insert(p.name);
  for (const AddedPair& pair : pairs) EXPECT_TRUE(added.contains(pair.a) && added.contains(pair.b));
  EXPECT_EQ(added.size(), 10u);
}

TEST(ParameterShapes, EachKindOfStorageHasItsOwn) {
  ParameterShape p;
  const auto kinds = [&] {
    std::vector<Parameters> out;
    for (const Parameters each :
         {Parameters::trained, Parameters::held, Parameters::narrow, Parameters::mapped, Parameters::quantised})
      if (belongs(p, each)) out.push_back(each);
    return out;
  };
  EXPECT_EQ(kinds(), std::vector{Parameters::trained});
  p.trains = false;
  EXPECT_EQ(kinds(), std::vector{Parameters::held});
  p.narrow = true;
  EXPECT_EQ(kinds(), std::vector{Parameters::narrow});
  p.mapped = true;
  EXPECT_EQ(kinds(), std::vector{Parameters::mapped});
  p.narrow = p.mapped = false, p.quantised = true;
  EXPECT_EQ(kinds(), std::vector{Parameters::quantised});
  EXPECT_TRUE(belongs(p, Parameters::all));
}

TEST(ModuleNames, AreThoseOfTransformers) {
  EXPECT_EQ(module_name("model.layers.0.block_sparse_moe.gate"), "model.layers.0.mlp.gate");
  EXPECT_EQ(module_name("model.layers.0.self_attn.f_a_proj"), "model.layers.0.self_attn.forget_gate.f_a_proj");
  EXPECT_EQ(module_name("model.layers.0.self_attn.q_proj"), "model.layers.0.self_attn.q_proj");
  EXPECT_EQ(expert_prefix(expert_shape(), 1, 2), "model.layers.1.mlp.experts.2.");
}

}  // namespace
}  // namespace espalier::testing
