// An adapter's directory, read and written: peft's formula, its names, and every kind of file that is refused.
#include "espalier/checkpoint/adapter.h"

#include <cmath>
#include <map>
#include <numeric>

#include "espalier/base/json.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/shape/trained_parameters.h"
#include "tests/unit/checkpoint/small_model.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using test::llama_shape;
using test::moe_shape;
using test::TemporaryDirectory;
using test::write_text;

constexpr const char* kDown = "model.layers.1.mlp.down_proj";  // [8, 12]
const std::string kPrefix = "base_model.model.";

struct Stored {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
using Tensors = std::map<std::string, Stored>;

Stored tensor(std::vector<std::int64_t> shape, std::uint64_t seed) {
  const std::int64_t count =
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<std::int64_t>());
  return {std::move(shape), test::exact_values(count, seed)};
}

std::string safetensors_of(const Tensors& tensors) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, stored] : tensors) {
    const std::size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(stored.values.data()), stored.values.size() * sizeof(float));
    header[name] = {{"dtype", "F32"}, {"shape", stored.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return test::raw_safetensors(header.dump(), data);
}

Json config_of(std::int64_t rank = 2, double alpha = 6) {
  return {{"peft_type", "LORA"}, {"r", rank}, {"lora_alpha", alpha}, {"target_modules", {"layers.1.mlp.down_proj"}}};
}

// A and B of the second layer's down.
Tensors pair_of_down(std::int64_t rank = 2) {
  return {{kPrefix + kDown + ".lora_A.weight", tensor({rank, 12}, 1)},
          {kPrefix + kDown + ".lora_B.weight", tensor({8, rank}, 2)}};
}

class AdapterTest : public ::testing::Test {
 protected:
  Adapter read(const Json& config, const Tensors& tensors, const ModelShape& base = llama_shape()) {
    write_text(directory_ / "adapter_config.json", config.dump());
    write_text(directory_ / "adapter_model.safetensors", safetensors_of(tensors));
    return Adapter(directory_.path(), base);
  }
  template <class Expected>
  std::string refusal(const Json& config, const Tensors& tensors, const ModelShape& base = llama_shape()) {
    return test::message_of<Expected>([&] { read(config, tensors, base); });
  }

  TemporaryDirectory directory_;
};

// W + s B A, element by element.
void expect_applied(const Adapter& adapter, const Tensors& tensors, std::int64_t rank, double scale) {
  const std::vector<float>&a = tensors.at(kPrefix + kDown + ".lora_A.weight").values,
        &b = tensors.at(kPrefix + kDown + ".lora_B.weight").values;
  std::vector<double> found(8 * 12, 0.5), expected = found;
  for (std::int64_t n = 0; n < 8; ++n)
    for (std::int64_t k = 0; k < 12; ++k)
      for (std::int64_t i = 0; i < rank; ++i)
        expected[static_cast<std::size_t>(n * 12 + k)] +=
            scale * static_cast<double>(b[static_cast<std::size_t>(n * rank + i)]) *
            static_cast<double>(a[static_cast<std::size_t>(i * 12 + k)]);
  adapter.apply(std::string(kDown) + ".weight", found);
  // Values of at most 2 with 7 bits: products and their sums are exact, up to the factor.
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-14 * std::abs(expected[i]));
}

TEST_F(AdapterTest, AddsTheProductOfItsPairTimesAlphaOverR) {
  const Tensors tensors = pair_of_down();
  const Adapter adapter = read(config_of(), tensors);
  EXPECT_EQ(adapter.changed(), 1);
  EXPECT_TRUE(adapter.changes(std::string(kDown) + ".weight"));
  EXPECT_FALSE(adapter.changes("model.layers.0.mlp.down_proj.weight"));
  EXPECT_EQ(adapter.rank(), 2);
  EXPECT_EQ(adapter.scale(), 3);
  EXPECT_EQ(adapter.modules(), (std::set<std::string>{kDown}));
  expect_applied(adapter, tensors, 2, 3);
}

TEST_F(AdapterTest, RsloraDividesByTheRootOfR) {
  Json config = config_of(4, 6);
  config["use_rslora"] = true;
  const Tensors tensors = pair_of_down(4);
  const Adapter adapter = read(config, tensors);
  EXPECT_TRUE(adapter.root_of_rank());
  expect_applied(adapter, tensors, 4, 3);
}

TEST_F(AdapterTest, TheFirstPatternThatMatchesHasTheRankAndAlpha) {
  Json config = config_of(8, 16);
  config["rank_pattern"] = {{"down_proj", 2}};
  config["alpha_pattern"] = {{"layers\\.1\\.mlp\\.down_proj", 10}};
  const Tensors tensors = pair_of_down(2);
  expect_applied(read(config, tensors), tensors, 2, 5);
}

TEST_F(AdapterTest, SmallerPairsAreFilledWithZerosWhereTheFactorsAreEqual) {
  Json config = config_of(4, 8);
  config["target_modules"] = {"layers.1.mlp.down_proj", "layers.1.mlp.up_proj"};
  config["rank_pattern"] = {{"up_proj", 2}};
  config["alpha_pattern"] = {{"up_proj", 4}};
  Tensors tensors = pair_of_down(4);
  const std::string up = "model.layers.1.mlp.up_proj";
  tensors[kPrefix + up + ".lora_A.weight"] = tensor({2, 8}, 3);
  tensors[kPrefix + up + ".lora_B.weight"] = tensor({12, 2}, 4);
  const Adapter adapter = read(config, tensors);
  EXPECT_EQ(adapter.common_size().rank, 4);
  EXPECT_EQ(adapter.common_size().alpha, 8);
  const std::vector<std::byte> a = adapter.values(up + ".lora_A.weight", DType::float32);
  ASSERT_EQ(a.size(), 4 * 8 * sizeof(float));
  const auto* const values = reinterpret_cast<const float*>(a.data());
  const std::vector<float>& stored = tensors.at(kPrefix + up + ".lora_A.weight").values;
  EXPECT_TRUE(std::equal(stored.begin(), stored.end(), values));
  EXPECT_TRUE(std::all_of(values + 16, values + 32, [](float value) { return value == 0; }));
  config["alpha_pattern"] = {{"up_proj", 6}};
  EXPECT_HOLDS(test::message_of<UnsupportedError>([&] { read(config, tensors).common_size(); }), "one factor s");
}

TEST_F(AdapterTest, ModulesToSaveReplaceTheWhole) {
  Json config = config_of();
  config["modules_to_save"] = {"up_proj"};
  Tensors tensors = pair_of_down();
  const std::string up = "model.layers.0.mlp.up_proj.weight";
  tensors[kPrefix + up] = tensor({12, 8}, 5);
  const Adapter adapter = read(config, tensors);
  EXPECT_EQ(adapter.whole(), std::vector<std::string>{up});
  std::vector<double> values(12 * 8, 7.0);
  adapter.apply(up, values);
  const std::vector<float>& stored = tensors.at(kPrefix + up).values;
  EXPECT_TRUE(std::equal(values.begin(), values.end(), stored.begin()));
}

TEST_F(AdapterTest, FilesThatAreDamagedOrOfAnotherModelAreNamed) {
  const Tensors pair = pair_of_down();
  Tensors half = pair, foreign = pair, wide = pair, twice = pair, both = pair;
  half.erase(kPrefix + kDown + ".lora_B.weight");
  EXPECT_HOLDS(refusal<InputError>(config_of(), half), "lora_A alone");
  foreign[kPrefix + "model.layers.7.mlp.down_proj.lora_A.weight"] = tensor({2, 12}, 6);
  EXPECT_HOLDS(refusal<InputError>(config_of(), foreign), "which the base model lacks");
  wide[kPrefix + kDown + ".lora_A.weight"] = tensor({2, 11}, 6);
  EXPECT_HOLDS(refusal<InputError>(config_of(), wide), "[2, 11]");
  twice[std::string(kDown) + ".lora_A.weight"] = tensor({2, 12}, 6);
  EXPECT_HOLDS(refusal<InputError>(config_of(), twice), "every tensor once");
  both[kPrefix + kDown + ".weight"] = tensor({8, 12}, 6);
  EXPECT_HOLDS(refusal<InputError>(config_of(), both), "or the whole tensor");
  EXPECT_HOLDS(refusal<InputError>(config_of(3), pair), "shape [3, 12]");
  EXPECT_HOLDS(refusal<InputError>(config_of(0), pair), ": r");
  EXPECT_HOLDS(refusal<InputError>(config_of(), {}), "none");
  Json without = config_of();
  without.erase("lora_alpha");
  EXPECT_HOLDS(refusal<InputError>(without, pair), "lora_alpha");
  Json other = config_of();
  other["target_modules"] = {"layers.1.mlp.down_proj", "q_proj"};
  EXPECT_HOLDS(refusal<InputError>(other, pair), "q_proj");
}

TEST_F(AdapterTest, OtherFormulasAreRefusedByTheirMember) {
  const Tensors pair = pair_of_down();
  for (const auto& [member, value] : std::map<std::string, Json>{{"use_dora", true},
                                                                 {"bias", "all"},
                                                                 {"peft_type", "IA3"},
                                                                 {"init_lora_weights", "pissa"},
                                                                 {"a_member_of_tomorrow", 1}}) {
    Json config = config_of();
    config[member] = value;
    EXPECT_HOLDS(refusal<UnsupportedError>(config, pair), member);
    config[member] = nullptr;
    if (member == "peft_type" || member == "bias") continue;
    EXPECT_NO_THROW(read(config, pair)) << member << " is off";
  }
  Tensors dora = pair;
  dora[kPrefix + kDown + ".lora_magnitude_vector"] = tensor({8}, 6);
  EXPECT_HOLDS(refusal<UnsupportedError>(config_of(), dora), "another part of an adapter");
}

TEST_F(AdapterTest, ATiedHeadTakesOnlyWhatIsEqualInBothPlaces) {
  ModelShape tied = llama_shape();
  tied.tied_head = true;
  Json config = config_of();
  config["modules_to_save"] = {"lm_head", "embed_tokens"};
  Tensors tensors = pair_of_down();
  tensors[kPrefix + "lm_head.weight"] = tensors[kPrefix + "model.embed_tokens.weight"] = tensor({11, 8}, 7);
  EXPECT_NO_THROW(read(config, tensors, tied));
  tensors[kPrefix + "lm_head.weight"].values[3] += 1;
  EXPECT_HOLDS(refusal<UnsupportedError>(config, tensors, tied), "one matrix in the model");
}

TEST_F(AdapterTest, NumbersThatAreNotFiniteAreRefusedWhenTheyAreRead) {
  Tensors tensors = pair_of_down();
  tensors[kPrefix + kDown + ".lora_A.weight"].values[5] = std::nanf("");
  const Adapter adapter = read(config_of(), tensors);
  std::vector<double> values(8 * 12);
  EXPECT_THROW(adapter.apply(std::string(kDown) + ".weight", values), InputError);
  EXPECT_THROW(adapter.values(std::string(kDown) + ".lora_A.weight", DType::float32), InputError);
}

TEST_F(AdapterTest, TellsWhatKindOfModelItIsOf) {
  EXPECT_FALSE(is_adapter(directory_.path()));
  Json config = config_of();
  config["base_model_name_or_path"] = "some/base";
  config["task_type"] = "SEQ_CLS";
  read(config, pair_of_down());
  EXPECT_TRUE(is_adapter(directory_.path()));
  EXPECT_TRUE(is_reward_adapter(directory_.path()));
  EXPECT_FALSE(is_critic_adapter(directory_.path()));
  EXPECT_EQ(base_named_in(directory_.path()), "some/base");
  EXPECT_EQ(peft_name("model.layers.0.self_attn.q_proj.lora_A.weight"),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
}

// A run reads its own adapter file back bit for bit.
TEST_F(AdapterTest, WrittenAndReadAgainItHasTheSameNumbers) {
  for (const ModelShape& base : {llama_shape(), moe_shape()}) {
    const ModelShape shape = train_only(
        base,
        {"all", AdditionChoice{
                    .rank = 2, .alpha = 6, .target = "q_proj,v_proj,o_proj,lm_head", .modules = {}, .directory = {}}});
    const ParameterTable table(shape, Parameters::trained);
    const std::vector<float> values = test::exact_values(table.size(), 11);
    const fs::path target = directory_ / "written";
    write_added_values(target, shape, "the/base", table, DType::float32, values_of(values.data(), sizeof(float)),
                       DType::float32);
    const Adapter again(target, base);
    EXPECT_EQ(again.rank(), 2);
    EXPECT_EQ(again.scale(), 3);
    EXPECT_EQ(base_named_in(target), "the/base");
    EXPECT_EQ(again.modules().size(), 7u);
    for (const Parameter& p : table.parameters()) {
      ASSERT_TRUE(again.has(p.name)) << p.name;
      const std::vector<std::byte> read = again.values(p.name, DType::float32);
      ASSERT_EQ(read.size(), static_cast<std::size_t>(p.count) * sizeof(float)) << p.name;
      EXPECT_EQ(std::memcmp(read.data(), values.data() + p.offset, read.size()), 0) << p.name;
    }
    fs::remove_all(target);
  }
}

}  // namespace
}  // namespace espalier
