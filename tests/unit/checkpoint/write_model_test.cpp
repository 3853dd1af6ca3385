// Writing models: bits, shards, config, the files that are copied.
#include <sys/stat.h>

#include "espalier/checkpoint/convert.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/safetensors.h"
#include "tests/support/layers.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

namespace fs = std::filesystem;

struct WriteModel : ::testing::Test {
  TemporaryDirectory folder;
  ParameterTable table{llama_shape()};
  fs::path source = folder / "source", target = folder / "target";

  void SetUp() override {
    fs::create_directory(source);
    write_text(source / "config.json", "{\"rms_norm_eps\":1e-05,   \"torch_dtype\": \"float32\", \"b\": 2, \"a\": 1}");
  }
  std::vector<std::byte> bits(DType dtype, std::uint64_t seed = 1) const {
    return random_bytes(static_cast<std::size_t>(table.size() * bytes_of(dtype)), seed);
  }
  std::vector<std::byte> load(const fs::path& directory, DType dtype) const {
    std::vector<std::byte> out(static_cast<std::size_t>(table.size() * bytes_of(dtype)));
    load_parameters(directory, table, dtype, out.data());
    return out;
  }
};

TEST_F(WriteModel, RoundTripsBitForBitInEveryDtypeAndShardSize) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16})
    for (const std::int64_t shard_bytes : {std::int64_t{1}, std::int64_t{500}, std::int64_t{5'000'000'000}})
      for (const bool tied : {false, true}) {
        SCOPED_TRACE(text_of(name_of(dtype), " shards of ", shard_bytes, tied ? " tied" : " untied"));
        ModelShape shape = llama_shape();
        shape.tied_head = tied;
        testing::change_attention(shape, [](AttentionShape& a, std::size_t) { a.qkv_bias = a.qk_norm = true; });
        table = ParameterTable(shape);
        fs::remove_all(target);
        const std::vector<std::byte> values = bits(dtype);
        write_model_directory(target, source, table, dtype, values.data(), dtype,
                              {.shard_bytes = shard_bytes, .changed = {}, .progress = {}});
        EXPECT_EQ(load(target, dtype), values);
        EXPECT_EQ(fs::exists(target / "model.safetensors"), shard_bytes > 500);
        EXPECT_EQ(fs::exists(target / "model.safetensors.index.json"), shard_bytes <= 500);
      }
}

TEST_F(WriteModel, KeepsShardsWithinTheirSize) {
  const std::vector<std::byte> values = bits(DType::float32);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float32,
                        {.shard_bytes = 700, .changed = {}, .progress = {}});
  std::size_t shards = 0;
  for (const auto& entry : fs::directory_iterator(target)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++shards;
    const SafetensorsFile file(entry.path());
    std::int64_t bytes = 0;
    for (const SafetensorsEntry& tensor : file.entries()) bytes += tensor.bytes;
    EXPECT_LE(bytes, 700) << entry.path();
  }
  ASSERT_GE(shards, 10u);
  EXPECT_TRUE(fs::exists(target / text_of("model-00001-of-000", shards, ".safetensors"))) << shards;
  const std::string index = read_text(target / "model.safetensors.index.json");
  EXPECT_HOLDS(index, text_of("\"total_size\": ", table.size() * 4));
  EXPECT_HOLDS(index, text_of("\"lm_head.weight\": \"model-000", shards, "-of-000", shards, ".safetensors\""));
}

TEST_F(WriteModel, TheSameWeightsGiveTheSameBytes) {
  const std::vector<std::byte> values = bits(DType::float32);
  for (const char* name : {"one", "two"})
    write_model_directory(folder / name, source, table, DType::float32, values.data(), DType::bfloat16);
  for (const char* name : {"model.safetensors", "config.json"})
    EXPECT_EQ(read_text(folder / "one" / name), read_text(folder / "two" / name));
  write_named_tensors(folder / "g1", table, DType::float32, values.data());
  write_named_tensors(folder / "g2", table, DType::float32, values.data());
  EXPECT_EQ(read_text(folder / "g1"), read_text(folder / "g2"));
}

TEST_F(WriteModel, ConvertsToTheWantedDtypeAndSaysSoInTheConfig) {
  std::vector<float> values = exact_values(table.size(), 3);
  values[5] = 1.0f + 0x1p-8f + 0x1p-20f;  // rounds up in bfloat16
  write_model_directory(target, source, table, DType::float32, values.data(), DType::bfloat16);
  std::vector<float> back(values.size());
  load_parameters(target, table, DType::float32, back.data());
  values[5] = 1.0f + 0x1p-7f;
  EXPECT_EQ(back, values);
  EXPECT_EQ(read_text(target / "config.json"),
            "{\n  \"rms_norm_eps\": 1e-05,\n  \"torch_dtype\": \"bfloat16\",\n  \"b\": 2,\n  \"a\": 1\n}\n");
}

TEST_F(WriteModel, LeavesTheConfigUntouchedWhenItIsRight) {
  const std::vector<std::byte> values = bits(DType::float32);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float32);
  EXPECT_EQ(read_text(target / "config.json"), read_text(source / "config.json"));
  write_text(source / "config.json", "{}");  // no dtype means float32
  fs::remove_all(target);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float32);
  EXPECT_EQ(read_text(target / "config.json"), "{}");
  fs::remove_all(target);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float64);
  EXPECT_EQ(read_text(target / "config.json"), "{\n  \"torch_dtype\": \"float64\"\n}\n");
  write_text(source / "config.json", "{\"dtype\": \"float16\"}");
  fs::remove_all(target);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float64);
  EXPECT_EQ(read_text(target / "config.json"), "{\n  \"dtype\": \"float64\"\n}\n");
}

TEST_F(WriteModel, CopiesOtherFilesButNoWeights) {
  for (const char* kept : {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "LICENSE",
                           "generation_config.json", "chat_template.jinja"})
    write_text(source / kept, std::string("content of ") + kept);
  for (const char* dropped : {"pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt", ".hidden"})
    write_text(source / dropped, "old");
  write_text(source / "model.safetensors", std::string("\x02\0\0\0\0\0\0\0{}", 10));  // whole, without a tensor
  fs::create_directories(source / "espalier");
  write_text(source / "espalier" / "state.json", "old");
  const std::vector<std::byte> values = bits(DType::float32);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float32);
  EXPECT_EQ(entries_in(target), 9u);  // seven, the config, the weights
  for (const char* kept : {"tokenizer.json", "tokenizer.model", "merges.txt", "LICENSE", "chat_template.jinja"})
    EXPECT_EQ(read_text(target / kept), std::string("content of ") + kept);
  EXPECT_EQ(load(target, DType::float32), values);
}

TEST_F(WriteModel, CopiesTheContentOfLinksAndSkipsBrokenOnes) {
  write_text(folder / "blob", "the tokenizer");
  fs::create_symlink("../blob", source / "tokenizer.json");
  fs::create_symlink("../nothing", source / "broken.json");
  fs::create_directory_symlink("/", source / "everything");
  ASSERT_EQ(::chmod((folder / "blob").c_str(), 0444), 0);
  const std::vector<std::byte> values = bits(DType::float32);
  write_model_directory(target, source, table, DType::float32, values.data(), DType::float32);
  EXPECT_FALSE(fs::is_symlink(target / "tokenizer.json"));
  EXPECT_EQ(read_text(target / "tokenizer.json"), "the tokenizer");
  EXPECT_EQ(entries_in(target), 3u);
}

TEST_F(WriteModel, NamedTensorsAreTheFlatBufferUnderItsNames) {
  for (const DType dtype : {DType::float32, DType::float64}) {
    const std::vector<std::byte> values = bits(dtype, 9);
    write_named_tensors(folder / "gradients.safetensors", table, dtype, values.data());
    const SafetensorsFile file(folder / "gradients.safetensors");
    ASSERT_EQ(file.entries().size(), table.parameters().size());
    for (const Parameter& parameter : table.parameters()) {
      const SafetensorsEntry* entry = file.find(parameter.name);
      ASSERT_NE(entry, nullptr);
      EXPECT_EQ(entry->type, tensor_type_of(dtype));
      EXPECT_EQ(entry->shape, parameter.shape);
      EXPECT_EQ(std::memcmp(entry->data, values.data() + parameter.offset * bytes_of(dtype),
                            static_cast<std::size_t>(entry->bytes)),
                0);
    }
  }
  EXPECT_EQ(entries_in(folder.path()), 2u);  // the file and the source, nothing temporary
}

}  // namespace
}  // namespace espalier::test
