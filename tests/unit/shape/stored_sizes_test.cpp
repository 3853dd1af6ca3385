// Sizes that config.json leaves out and the tensors say.
#include "espalier/config/stored_sizes.h"
#include "espalier/config/model_config.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <utility>

#include "espalier/shape/model_shape.h"
#include "tests/support/layers.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

struct StoredSizes : ::testing::Test {
  fs::path folder = made();
  Json config = Json::parse(R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "vocab_size": 32})");

  ~StoredSizes() override { fs::remove_all(folder); }

  static fs::path made() {
    std::string name = (fs::temp_directory_path() / "espalier-sizes-XXXXXX").string();
    return ::mkdtemp(name.data());
  }
  void write(const char* file, const std::vector<std::pair<std::string, std::vector<int>>>& tensors) const {
    Json header = Json::object();
    for (const auto& [name, shape] : tensors) header[name] = {{"dtype", "F32"}, {"shape", shape}};
    const std::string text = header.dump();
    const std::uint64_t length = text.size();
    std::ofstream out(folder / file, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), sizeof length) << text;
  }
  void write_attention(int head_dim, int key_value_heads) const {
    write("model.safetensors", {{"model.layers.0.self_attn.k_proj.weight", {key_value_heads * head_dim, 64}},
                                {"model.layers.0.self_attn.o_proj.weight", {64, 4 * head_dim}}});
  }
  ModelShape read() const {
    std::ofstream(folder / "config.json") << config.dump();
    return read_model_shape(folder);
  }
  AttentionShape read_heads() { return testing::attention_of(read()); }
};

TEST_F(StoredSizes, DecideAnAbsentHeadDim) {
  for (const int head_dim : {16, 128, 24}) {  // hidden_size / heads; the family's; neither
    write_attention(head_dim, 2);
    EXPECT_EQ(read_heads().head_dim, head_dim);
    EXPECT_EQ(read_heads().kv_heads, 2);
  }
}

TEST_F(StoredSizes, LeaveWhatTheConfigSays) {
  write_attention(16, 2);
  config["head_dim"] = 32, config["num_key_value_heads"] = 4;
  EXPECT_EQ(read_heads().head_dim, 32);
  EXPECT_EQ(read_heads().kv_heads, 4);
  config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(read_heads().kv_heads, 4);
}

TEST_F(StoredSizes, ComeFromTheShardThatHasTheTensor) {
  write("b.safetensors", {{"model.layers.0.self_attn.o_proj.weight", {64, 4 * 24}}});
  write("a.safetensors", {{"model.layers.0.self_attn.k_proj.weight", {2 * 24, 64}}});
  std::ofstream(folder / "model.safetensors.index.json")
      << Json{{"weight_map",
               {{"model.layers.0.self_attn.k_proj.weight", "a.safetensors"},
                {"model.layers.0.self_attn.o_proj.weight", "b.safetensors"}}}};
  EXPECT_EQ(read_heads().head_dim, 24);
  EXPECT_EQ(read_heads().kv_heads, 2);
}

TEST_F(StoredSizes, AreTheFamilysWithoutReadableWeights) {
  EXPECT_EQ(read_heads().head_dim, 128);
  for (const char* const bytes : {"", "1234567", "\x10\0\0\0\0\0\0\0{\"a\": [1]}      "}) {
    std::ofstream(folder / "model.safetensors", std::ios::binary) << bytes;
    EXPECT_EQ(read_heads().head_dim, 128);
  }
  std::ofstream(folder / "model.safetensors", std::ios::binary) << std::string(8, '\xff');
  EXPECT_EQ(read_heads().head_dim, 128);
  write("model.safetensors", {{"model.layers.0.self_attn.o_proj.weight", {64, 0}}});
  EXPECT_EQ(read_heads().head_dim, 128);
}

TEST_F(StoredSizes, AreTheTextModelsBesideAVisionTower) {
  write("model.safetensors", {{"model.vision_tower.layers.0.self_attn.o_proj.weight", {64, 4 * 48}},
                              {"model.language_model.layers.0.self_attn.o_proj.weight", {64, 4 * 24}}});
  Json text = std::move(config);
  config = {{"text_config", std::move(text)}};
  add_stored_sizes(folder, config);
  EXPECT_EQ(config["text_config"]["head_dim"], 24);
}

TEST_F(StoredSizes, SayNothingOfLatentAttention) {
  write("model.safetensors", {{"model.layers.0.self_attn.kv_a_proj_with_mqa.weight", {48, 64}},
                              {"model.layers.0.self_attn.o_proj.weight", {64, 4 * 24}}});
  const Json before = config;
  add_stored_sizes(folder, config);
  EXPECT_EQ(config, before);
}

}  // namespace
}  // namespace espalier
