// Files for users: every family's parameters in the tensors of its own files. Rows of the table write them, and the
// loader of models, which knows the tensors of files by their names, reads them.
#include <cstring>
#include <set>
#include <tuple>

#include "espalier/checkpoint/model_directory.h"
#include "espalier/config/stored_names.h"
#include "espalier/shape/trained_parameters.h"
#include "tests/equivalence/fixture.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier::testing {
namespace {

using espalier::test::TemporaryDirectory;
using Sizes = std::vector<std::int64_t>;

constexpr std::int64_t kVocabulary = 31;

std::vector<float> different_numbers(std::int64_t count) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(i) + 0.25F;
  return out;
}

std::vector<ExpertFiles> forms_of(const ModelShape& shape) {
  const ParameterNames& names = shape.names;
  const bool also_stacked = shape.experts > 0 && names.expert_files == ExpertFiles::each &&
                            std::string_view(names.expert_down) == "down_proj";
  return also_stacked ? std::vector{ExpertFiles::each, ExpertFiles::stacked} : std::vector{names.expert_files};
}

class FileNamesOf : public ::testing::TestWithParam<std::string> {};

TEST_P(FileNamesOf, WhatIsWrittenByRowsIsReadByNames) {
  ModelShape shape = tiny_shape(GetParam(), kVocabulary);
  for (const ExpertFiles form : forms_of(shape)) {
    shape.names.expert_files = form;
    const TemporaryDirectory folder;
    const ParameterTable table(shape);
    const std::vector<float> written = different_numbers(table.size());
    write_named_tensors(folder / "model.safetensors", table, DType::float32, written.data());
    std::vector<float> read(written.size());
    load_parameters(folder.path(), table, DType::float32, read.data());
    EXPECT_EQ(read, written);
    ModelShape found = tiny_shape(GetParam(), kVocabulary);
    set_stored_names(folder.path(), found);
    EXPECT_EQ(found.names.expert_files, form);
    EXPECT_STREQ(found.names.file_root, shape.names.file_root);
    // A checkpoint of a trace, read by rows, and one of a part of the model.
    std::ranges::fill(read, 0.0F);
    load_named_tensors(folder / "model.safetensors", table, DType::float32, read.data());
    EXPECT_EQ(read, written);
    for (const char* words : {"attention", "mlp,experts", "norms"}) {
      const bool no_mlp =
          std::string_view(words) == "mlp,experts" && (shape.experts == 0 || shape.shared_expert.inner == 0);
      const ParameterTable part(train_only(shape, no_mlp ? (shape.experts > 0 ? "experts" : "mlp") : words),
                                Parameters::trained);
      std::vector<float> of_part(static_cast<std::size_t>(part.size()));
      write_named_tensors(folder / "part", part, DType::float32, different_numbers(part.size()).data());
      load_named_tensors(folder / "part", part, DType::float32, of_part.data());
      EXPECT_EQ(of_part, different_numbers(part.size())) << words;
    }
  }
}

TEST_P(FileNamesOf, EveryNumberOfATensorIsOfOneParameter) {
  ModelShape shape = tiny_shape(GetParam(), kVocabulary);
  for (const ExpertFiles form : forms_of(shape)) {
    shape.names.expert_files = form;
    const ParameterTable table(shape);
    std::set<std::string> names;
    for (const FileTensor& tensor : file_tensors(table)) {
      EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
      std::vector<int> times(static_cast<std::size_t>(tensor.count));
      for (const auto& [parameter, place] : tensor.parts) {
        if (place == nullptr) {
          EXPECT_EQ(tensor.shape, parameter->shape);
          for (int& one : times) ++one;
          continue;
        }
        EXPECT_EQ(place->rows * place->columns, parameter->count);
        for (std::int64_t i = 0; i < place->rows; ++i)
          for (std::int64_t j = 0; j < place->columns; ++j) ++times.at(static_cast<std::size_t>(place->at(i, j)));
      }
      EXPECT_TRUE(std::ranges::all_of(times, [](int count) { return count == 1; })) << tensor.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, FileNamesOf, ::testing::ValuesIn(families_of_table()),
                         [](const auto& info) { return name_of_family(info.param); });

// Sizes of tiny_shape: width 24, MLPs of 40, 4 heads of 8 that share 2 of keys and values, 8 experts of 12.
TEST(FileNames, AreThoseOfTheFilesThatTransformersWrites) {
  const std::tuple<const char*, const char*, Sizes> expected[] = {
      {"Phi3", "model.layers.0.self_attn.qkv_proj.weight", {64, 24}},
      {"Phi3", "model.layers.2.mlp.gate_up_proj.weight", {80, 24}},
      {"Glm4", "model.layers.1.mlp.gate_up_proj.weight", {80, 24}},
      {"Glm", "model.layers.1.mlp.gate_up_proj.weight", {80, 24}},
      {"GptOss", "model.layers.0.mlp.experts.gate_up_proj", {8, 24, 24}},
      {"GptOss", "model.layers.0.mlp.experts.gate_up_proj_bias", {8, 24}},
      {"GptOss", "model.layers.0.mlp.experts.down_proj", {8, 12, 24}},
      {"GptOss", "model.layers.0.mlp.experts.down_proj_bias", {8, 24}},
      {"GptOss", "model.layers.0.self_attn.sinks", {4}},
      {"NemotronH", "backbone.embeddings.weight", {kVocabulary, 24}},
      {"NemotronH", "backbone.norm_f.weight", {24}},
      {"NemotronH", "backbone.layers.0.norm.weight", {24}},
      {"GraniteMoe", "model.layers.0.block_sparse_moe.input_linear.weight", {8, 24, 24}},
      {"GraniteMoe", "model.layers.0.block_sparse_moe.output_linear.weight", {8, 24, 12}},
      {"GraniteMoeShared", "model.layers.0.shared_mlp.input_linear.weight", {40, 24}},
      {"Mixtral", "model.layers.0.block_sparse_moe.experts.7.w3.weight", {12, 24}},
      {"Qwen3Next", "model.layers.0.linear_attn.in_proj_qkvz.weight", {}},
      {"KimiLinear", "model.layers.0.mlp.gate_proj.weight", {40, 24}},
  };
  for (const auto& [family, name, sizes] : expected) {
    const ParameterTable table(tiny_shape(family, kVocabulary));
    const std::vector<FileTensor> tensors = file_tensors(table);
    const auto found = std::ranges::find(tensors, name, &FileTensor::name);
    ASSERT_NE(found, tensors.end()) << family << ": " << name;
    if (!sizes.empty()) {
      EXPECT_EQ(found->shape, sizes) << family << ": " << name;
    }
  }
}

TEST(FileNames, FollowTheFormOfTheFilesThatAreThere) {
  const auto name_of = [](const char* family, const char* own, auto&& change) {
    ModelShape shape = tiny_shape(family, kVocabulary);
    change(shape.names);
    return ParameterTable(shape).at(own).file_tensor();
  };
  EXPECT_EQ(name_of("Qwen3Moe", "model.layers.0.mlp.experts.3.up_proj.weight",
                    [](ParameterNames& names) { names.expert_files = ExpertFiles::stacked; }),
            "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(name_of("NemotronH", "model.norm.weight", [](ParameterNames& names) { names.file_root = "model."; }),
            "model.norm_f.weight");
  EXPECT_EQ(name_of("KimiLinear", "model.layers.0.mlp.gate_proj.weight",
                    [](ParameterNames& names) { names.dense_below_experts = true; }),
            "model.layers.0.block_sparse_moe.gate_proj.weight");
  const auto beside_tower = [](ParameterNames& names) {
    names.file_root = "language_model.model.", names.file_head = "language_model.lm_head";
  };
  EXPECT_EQ(name_of("Mistral", "model.layers.2.self_attn.q_proj.weight", beside_tower),
            "language_model.model.layers.2.self_attn.q_proj.weight");
  EXPECT_EQ(name_of("Mistral", "lm_head.weight", beside_tower), "language_model.lm_head.weight");
}

// Queries of Phi-3 may train without keys and values: the tensor of files is whole, and 0 where nothing trains.
TEST(FileNames, ATensorIsWholeWhereAPartOfItTrains) {
  const TemporaryDirectory folder;
  const ModelShape shape = train_only(tiny_shape("Phi3", kVocabulary), "q_proj");
  const ParameterTable table(shape, Parameters::trained);
  const std::vector<float> values = different_numbers(table.size());
  write_named_tensors(folder / "g", table, DType::float32, values.data());
  const SafetensorsFile file(folder / "g");
  ASSERT_EQ(file.entries().size(), 3u);
  const SafetensorsEntry& first = *file.find("model.layers.0.self_attn.qkv_proj.weight");
  EXPECT_EQ(first.shape, (Sizes{64, 24}));
  std::vector<float> found(static_cast<std::size_t>(first.count)), expected(found.size());
  std::memcpy(found.data(), first.data, static_cast<std::size_t>(first.bytes));
  std::copy_n(values.begin(), 32 * 24, expected.begin());
  EXPECT_EQ(found, expected);
}

TEST(FileNames, TrainedParametersAreNamedAsFilesDo) {
  const auto trained = [](const char* family, const std::string& words) {
    std::set<std::string> out;
    const ParameterTable table(train_only(tiny_shape(family, kVocabulary), words), Parameters::trained);
    for (const FileTensor& tensor : file_tensors(table)) out.insert(tensor.name);
    return out;
  };
  using Names = std::set<std::string>;
  EXPECT_EQ(trained("Phi3", "model.layers.1.self_attn.qkv_proj.weight"),
            (Names{"model.layers.1.self_attn.qkv_proj.weight"}));
  EXPECT_EQ(trained("Phi3", "gate_up_proj").size(), 3u);
  EXPECT_EQ(trained("GptOss", R"(.*\.1\.mlp\.experts\.down_proj(_bias)?)"),
            (Names{"model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj_bias"}));
  EXPECT_EQ(trained("NemotronH", R"(backbone\.layers\.1\.norm\..*)"), (Names{"backbone.layers.1.norm.weight"}));
  EXPECT_THROW(trained("NemotronH", R"(model\.layers\.1\..*)"),
               OptionError);  // numbers of files count halves of blocks
}

}  // namespace
}  // namespace espalier::testing
