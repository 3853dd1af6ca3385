// The table of parameters: names, shapes, neighbours, offsets.
#include "tests/support/layers.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

TEST(ParameterTable, HasGaplessAscendingOffsets) {
  const ParameterTable table(llama_shape());
  std::int64_t end = 0;
  for (const Parameter& parameter : table.parameters()) {
    EXPECT_EQ(parameter.offset, end) << parameter.name;
    std::int64_t product = 1;
    for (const std::int64_t size : parameter.shape) product *= size;
    EXPECT_EQ(parameter.count, product) << parameter.name;
    end += product;
  }
  EXPECT_EQ(table.size(), end);
}

TEST(ParameterTable, NamesALlamaAsHuggingFaceDoes) {
  ModelShape shape = llama_shape();
  shape.layer.resize(1);
  const ParameterTable table(shape);
  std::vector<std::string> names;
  for (const Parameter& parameter : table.parameters()) names.push_back(parameter.name);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
                       "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
                       "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight",
                       "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.gate_proj.weight",
                       "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
                       "lm_head.weight"}));
  EXPECT_EQ(table.at("model.layers.0.self_attn.k_proj.weight").shape, (std::vector<std::int64_t>{4, 8}));
  EXPECT_EQ(table.at("model.layers.0.self_attn.o_proj.weight").shape, (std::vector<std::int64_t>{8, 8}));
  EXPECT_EQ(table.at("model.layers.0.mlp.down_proj.weight").shape, (std::vector<std::int64_t>{8, 12}));
}

TEST(ParameterTable, PlacesTogetherWhatOneProductReads) {
  ModelShape shape = llama_shape();
  shape.mlp_bias = true;
  testing::change_attention(shape, [](AttentionShape& a, std::size_t) { a.qkv_bias = a.output_bias = true; });
  const ParameterTable table(shape);
  const auto follows = [&](const std::string& first, const std::string& second) {
    const Parameter& a = table.at("model.layers.1." + first);
    return a.offset + a.count == table.at("model.layers.1." + second).offset;
  };
  for (const std::string kind : {".weight", ".bias"}) {
    EXPECT_TRUE(follows("self_attn.q_proj" + kind, "self_attn.k_proj" + kind));
    EXPECT_TRUE(follows("self_attn.k_proj" + kind, "self_attn.v_proj" + kind));
    EXPECT_TRUE(follows("mlp.gate_proj" + kind, "mlp.up_proj" + kind));
  }
  EXPECT_EQ(table.at("model.layers.0.self_attn.o_proj.bias").count, shape.hidden);
  EXPECT_EQ(table.at("model.layers.0.mlp.down_proj.bias").count, shape.hidden);
}

TEST(ParameterTable, FollowsTheFlagsOfAFamily) {
  ModelShape shape = llama_shape();
  EXPECT_FALSE(ParameterTable(shape).contains("model.layers.0.self_attn.q_proj.bias"));
  EXPECT_FALSE(ParameterTable(shape).contains("model.layers.0.self_attn.q_norm.weight"));
  testing::change_attention(shape, [](AttentionShape& a, std::size_t) { a.qkv_bias = true; });
  EXPECT_TRUE(ParameterTable(shape).contains("model.layers.0.self_attn.v_proj.bias"));
  EXPECT_FALSE(ParameterTable(shape).contains("model.layers.0.self_attn.o_proj.bias"));
  testing::change_attention(shape, [](AttentionShape& a, std::size_t) { a.qk_norm = true; });
  EXPECT_EQ(ParameterTable(shape).at("model.layers.0.self_attn.k_norm.weight").count,
            testing::attention_of(shape).head_dim);
  const std::int64_t untied = ParameterTable(shape).size();
  shape.tied_head = true;
  EXPECT_FALSE(ParameterTable(shape).contains("lm_head.weight"));
  EXPECT_EQ(ParameterTable(shape).size(), untied - shape.vocabulary * shape.hidden);
}

TEST(ParameterTable, NamesExpertsAsHuggingFaceDoesAndPlacesThemTogether) {
  const ParameterTable table(moe_shape());
  EXPECT_TRUE(table.contains("model.layers.0.mlp.gate_proj.weight"));
  EXPECT_FALSE(table.contains("model.layers.1.mlp.gate_proj.weight"));
  EXPECT_EQ(table.at("model.layers.1.mlp.gate.weight").shape, (std::vector<std::int64_t>{3, 8}));
  std::string before = "gate.weight";
  for (const char* name : {"experts.0.gate_proj.weight", "experts.0.up_proj.weight", "experts.1.gate_proj.weight",
                           "experts.1.up_proj.weight", "experts.2.gate_proj.weight", "experts.2.up_proj.weight",
                           "experts.0.down_proj.weight", "experts.1.down_proj.weight", "experts.2.down_proj.weight"}) {
    const Parameter &a = table.at("model.layers.1.mlp." + before),
                    &b = table.at(std::string("model.layers.1.mlp.") + name);
    EXPECT_EQ(a.offset + a.count, b.offset) << name;
    before = name;
  }
  EXPECT_EQ(table.at("model.layers.1.mlp.experts.2.up_proj.weight").shape, (std::vector<std::int64_t>{4, 8}));
  EXPECT_EQ(table.at("model.layers.1.mlp.experts.2.down_proj.weight").shape, (std::vector<std::int64_t>{8, 4}));
}

TEST(ParameterTable, RefusesAnUnknownName) {
  EXPECT_THROW(ParameterTable(llama_shape()).at("model.nothing"), InternalError);
}

}  // namespace
}  // namespace espalier::test
