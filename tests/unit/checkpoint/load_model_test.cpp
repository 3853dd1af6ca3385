// Loading models: names, shapes, tied heads, number formats, and recorded models where they are present.
#include "espalier/base/atomic_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/safetensors.h"
#include "tests/support/source_dir.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::test {
namespace {

// A model file whose tensors come from a table, with changes: rename(name) returning "" drops a tensor.
template <class Rename>
void write_model(const std::filesystem::path& path, const ParameterTable& table, const std::vector<float>& values,
                 Rename rename, const std::vector<std::pair<TensorSpec, std::vector<float>>>& more = {}) {
  std::vector<TensorSpec> specs;
  for (const Parameter& parameter : table.parameters())
    if (const std::string name = rename(parameter.name); !name.empty())
      specs.push_back({name, TensorType::F32, parameter.shape});
  for (const auto& item : more) specs.push_back(item.first);
  OutputFile output(path);
  SafetensorsWriter writer(output, specs);
  for (const Parameter& parameter : table.parameters())
    if (!rename(parameter.name).empty()) writer.append(values.data() + parameter.offset, 4 * parameter.count);
  for (const auto& item : more) writer.append(item.second.data(), static_cast<std::int64_t>(4 * item.second.size()));
  writer.finish();
  output.close_synced();
}

const auto kSameName = [](const std::string& name) { return name; };

struct LoadModel : ::testing::Test {
  TemporaryDirectory folder;
  ModelShape shape = llama_shape();

  std::vector<float> values() const { return exact_values(ParameterTable(shape).size(), 17); }
  std::vector<float> loaded() const {
    const ParameterTable table(shape);
    std::vector<float> out(static_cast<std::size_t>(table.size()), -77.0f);
    load_parameters(folder.path(), table, DType::float32, out.data());
    return out;
  }
  std::string error() const {
    return message_of<InputError>([&] { loaded(); });
  }
  std::filesystem::path file() const { return folder / "model.safetensors"; }
};

TEST_F(LoadModel, IgnoresRotaryBuffers) {
  write_model(file(), ParameterTable(shape), values(), kSameName,
              {{{"model.layers.0.self_attn.rotary_emb.inv_freq", TensorType::F32, {1}}, {1.0f}}});
  EXPECT_EQ(loaded(), values());
}

// Every element of every rank's parameters, against the place it has in the file; padding stays as it was.
TEST_F(LoadModel, ReadsTheRanksPartOfEachTensor) {
  for (const bool experts : {false, true}) {
    shape = experts ? moe_shape() : llama_shape();
    if (experts) shape.experts = 4;
    const ParameterTable whole(shape);
    const std::vector<float> all = values();
    write_model(file(), whole, all, kSameName);
    for (const Degrees& degrees : {Degrees{.tp = 2}, experts ? Degrees{.tp = 2, .ep = 2} : Degrees{.dp = 2}})
      for (std::int64_t rank = 0; rank < degrees.ranks(); ++rank) {
        const ParameterTable table(LocalShape(shape, degrees, place_of(rank, degrees)));
        std::vector<float> out(static_cast<std::size_t>(table.size()), -77.0f);
        load_parameters(folder.path(), table, DType::float32, out.data());
        for (const Parameter& p : table.parameters()) {
          const Parameter& file_of = whole.at(p.name);
          const std::int64_t columns = p.shape.back(), file_columns = file_of.shape.back();
          for (std::int64_t i = 0; i < p.count; ++i) {
            const bool rows_sharded = p.shard.dim == 0;
            const std::int64_t row = p.shape.size() == 1 ? 0 : i / columns, column = i % columns;
            const std::int64_t along = rows_sharded && p.shape.size() == 2 ? row : column;
            const bool padding = p.shard.dim >= 0 && along >= p.shard.end - p.shard.begin;
            const std::int64_t file_row = row + (rows_sharded && p.shape.size() == 2 ? p.shard.begin : 0);
            const std::int64_t file_column =
                column + (p.shard.dim == 1 || (rows_sharded && p.shape.size() == 1) ? p.shard.begin : 0);
            const float expected =
                padding ? -77.0f
                        : all[static_cast<std::size_t>(file_of.offset + file_row * file_columns + file_column)];
            ASSERT_EQ(out[static_cast<std::size_t>(p.offset + i)], expected)
                << p.name << " element " << i << ", rank " << rank << " of " << text_of_degrees(degrees);
          }
        }
      }
  }
}

// experts.gate_up_proj [E, 2F, M] and experts.down_proj [E, M, F] are the table's own ranges.
TEST_F(LoadModel, ReadsFusedExpertsAsTheirSlices) {
  shape = moe_shape();
  const ParameterTable table(shape);
  const std::string layer = "model.layers.1.mlp.experts.";
  const std::vector<float> all = values();
  const auto slice = [&](const std::string& first, std::int64_t count) {
    const auto begin = all.begin() + table.at(layer + first).offset;
    return std::vector<float>(begin, begin + count);
  };
  const auto without_experts = [](const std::string& name) {
    return name.find(".experts.") == std::string::npos ? name : std::string();
  };
  write_model(file(), table, all, without_experts,
              {{{layer + "gate_up_proj", TensorType::F32, {3, 8, 8}}, slice("0.gate_proj.weight", 3 * 8 * 8)},
               {{layer + "down_proj", TensorType::F32, {3, 8, 4}}, slice("0.down_proj.weight", 3 * 8 * 4)}});
  EXPECT_EQ(loaded(), all);
  write_model(file(), table, all, without_experts,
              {{{layer + "gate_up_proj", TensorType::F32, {2, 8, 8}}, slice("0.gate_proj.weight", 2 * 8 * 8)},
               {{layer + "down_proj", TensorType::F32, {3, 8, 4}}, slice("0.down_proj.weight", 3 * 8 * 4)}});
  EXPECT_HOLDS(error(), "experts.2.gate_proj.weight");
  write_model(file(), table, all, kSameName,
              {{{layer + "down_proj", TensorType::F32, {3, 8, 4}}, slice("0.down_proj.weight", 3 * 8 * 4)}});
  EXPECT_HOLDS(error(), "fused and on its own");
}

TEST_F(LoadModel, AddsThePrefixToABareDecoder) {
  write_model(file(), ParameterTable(shape), values(),
              [](const std::string& name) { return name.starts_with("model.") ? name.substr(6) : name; });
  EXPECT_EQ(loaded(), values());
}

TEST_F(LoadModel, DoesNotMixPrefixedAndBareNames) {
  write_model(file(), ParameterTable(shape), values(),
              [](const std::string& name) { return name == "model.norm.weight" ? "norm.weight" : name; });
  EXPECT_HOLDS(error(), "1 missing: 'model.norm.weight'; 1 unexpected: 'norm.weight'");
}

TEST_F(LoadModel, AcceptsATiedHeadThatEqualsTheEmbedding) {
  shape.tied_head = true;
  const std::vector<float> all = values();
  write_model(file(), ParameterTable(shape), all, kSameName,
              {{{"lm_head.weight", TensorType::F32, {11, 8}}, {all.begin(), all.begin() + 88}}});
  EXPECT_EQ(loaded(), all);
}

TEST_F(LoadModel, RefusesATiedHeadWithOtherValues) {
  shape.tied_head = true;
  write_model(file(), ParameterTable(shape), values(), kSameName,
              {{{"lm_head.weight", TensorType::F32, {11, 8}}, std::vector<float>(88, 9.0f)}});
  EXPECT_HOLDS(error(), "Set tie_word_embeddings to false");
}

TEST_F(LoadModel, TakesTheTiedHeadForAnAbsentEmbedding) {
  shape.tied_head = true;
  write_model(file(), ParameterTable(shape), values(),
              [](const std::string& name) { return name == "model.embed_tokens.weight" ? "lm_head.weight" : name; });
  EXPECT_EQ(loaded(), values());
}

TEST_F(LoadModel, NamesAMissingHeadAndItsRemedy) {
  write_model(file(), ParameterTable(shape), values(),
              [](const std::string& name) { return name == "lm_head.weight" ? "" : name; });
  EXPECT_HOLDS(error(), "set tie_word_embeddings to true");
}

TEST_F(LoadModel, NamesTheFirstMissingAndUnexpectedTensors) {
  write_model(file(), ParameterTable(shape), values(), [](const std::string& name) {
    return name.find("layers.1.") == std::string::npos ? name : "model.layers.9." + name.substr(15);
  });
  const std::string text = error();
  EXPECT_HOLDS(text, folder.path().string());
  EXPECT_HOLDS(text, "9 missing: 'model.layers.1.input_layernorm.weight', ");
  EXPECT_HOLDS(text, " and 5 more; 9 unexpected: 'model.layers.9.");
}

TEST_F(LoadModel, NamesBothShapes) {
  ModelShape other = shape;
  for (LayerShape& layer : other.layer) layer.inner = 13;
  write_model(file(), ParameterTable(other), exact_values(ParameterTable(other).size(), 1), kSameName);
  const std::string text = error();
  EXPECT_HOLDS(text, "tensor 'model.layers.0.mlp.gate_proj.weight'");
  EXPECT_HOLDS(text, "expected shape [12, 8], got [13, 8]");
}

TEST_F(LoadModel, ConvertsNothingBeforeEverythingIsChecked) {
  ModelShape other = shape;
  other.vocabulary = 10;
  write_model(file(), ParameterTable(shape), values(), kSameName);
  const ParameterTable table(other);
  std::vector<float> out(static_cast<std::size_t>(table.size()), -77.0f);
  EXPECT_THROW(load_parameters(folder.path(), table, DType::float32, out.data()), InputError);
  EXPECT_EQ(out, std::vector<float>(out.size(), -77.0f));
}

TEST_F(LoadModel, RefusesWholeNumbersAsUnsupported) {
  OutputFile output(file());
  std::vector<TensorSpec> specs;
  const ParameterTable table(shape);
  for (const Parameter& parameter : table.parameters())
    specs.push_back({parameter.name, TensorType::I8, parameter.shape});
  SafetensorsWriter writer(output, specs);
  writer.append(values().data(), table.size());
  output.close_synced();
  EXPECT_HOLDS(message_of<UnsupportedError>([&] { loaded(); }), "I8");
}

TEST_F(LoadModel, NamesWhatAnEmptyDirectoryLacks) {
  EXPECT_HOLDS(error(), "expected model.safetensors or model.safetensors.index.json, got neither");
  write_text(folder / "pytorch_model.bin", "x");
  EXPECT_HOLDS(message_of<UnsupportedError>([&] { loaded(); }), "save_pretrained");
}

TEST_F(LoadModel, ReportsProgressUpToTheEnd) {
  write_model(file(), ParameterTable(shape), values(), kSameName);
  const ParameterTable table(shape);
  std::vector<double> out(static_cast<std::size_t>(table.size()));
  std::vector<std::int64_t> seen;
  load_named_tensors(file(), table, DType::float64, out.data(), [&](std::int64_t done, std::int64_t total) {
    EXPECT_EQ(total, table.size());
    seen.push_back(done);
  });
  EXPECT_EQ(seen.size(), table.parameters().size());
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(seen.back(), table.size());
}

TEST(RecordedModels, LoadsATrainedLlamaWithATiedHead) {
  const std::filesystem::path directory = testing::source_dir() + "/../shared/data/stories260K/hf";
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << "the recorded model is not there: " << directory;
  ModelShape shape = llama_shape();
  shape.layer = attention_layers(5, {.heads = 8, .kv_heads = 4, .head_dim = 8}, 172);
  shape.hidden = 64, shape.vocabulary = 512, shape.tied_head = true;
  const ParameterTable table(shape);
  std::vector<float> out(static_cast<std::size_t>(table.size()));
  load_parameters(directory, table, DType::float32, out.data());
  // The norm's weights of a trained model are neither 0 nor 1 all over; the file's bytes are the values.
  const SafetensorsFile file(directory / "model.safetensors");
  for (const Parameter& parameter : table.parameters())
    EXPECT_EQ(std::memcmp(out.data() + parameter.offset, file.find(parameter.name)->data,
                          4 * static_cast<std::size_t>(parameter.count)),
              0);
  EXPECT_EQ(table.size() * 4, [&] {
    std::int64_t sum = 0;
    for (const auto& e : file.entries()) sum += e.bytes;
    return sum;
  }());
}

TEST(RecordedModels, LoadsTheCheckpointsOfATrace) {
  const std::filesystem::path directory = testing::source_dir() + "/../shared/data/trace_grpo20";
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << "the recorded trace is not there: " << directory;
  ModelShape shape = llama_shape();
  shape.layer = attention_layers(4, {.heads = 4, .kv_heads = 2, .head_dim = 32, .qk_norm = true}, 320);
  shape.hidden = 128, shape.vocabulary = 64, shape.tied_head = true;
  const ParameterTable table(shape);
  std::vector<float> start(static_cast<std::size_t>(table.size())), later(start.size());
  load_parameters(directory / "model", table, DType::float32, start.data());
  load_named_tensors(directory / "checkpoints" / "step-000020.safetensors", table, DType::float32, later.data());
  EXPECT_NE(start, later);
}

}  // namespace
}  // namespace espalier::test
