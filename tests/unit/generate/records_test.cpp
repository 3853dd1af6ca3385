// From a directory and a file to records: settings from options, stop ids from the model, and `score` as the judge.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/generate/generate_records.h"
#include "espalier/score/score.h"
#include "tests/unit/generate/sampling_case.h"
#include "tests/with_products.h"

namespace espalier::testing {
namespace {

class Folder {
 public:
  Folder() : path_(std::filesystem::path(::testing::TempDir()) / ("espalier-generate-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path_ / name) << text; }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST(Records, LogprobsAreThoseOfScore) {
  for (const char* family : {"llama", "qwen3", "qwen3-moe", "DeepseekV2", "DeepseekV3"}) {
    const auto model = tiny_model(family, DType::float64, 2);
    SamplingSettings settings;
    settings.n = 6, settings.temperature = 0.7, settings.top_p = 0.9, settings.max_response_length = 70;
    settings.stop_ids = {9};
    const auto rollouts = sample(*model, make_prompts({5, 40, 1, 5}, 50, 2), settings).rollouts;
    Options options = test_options();
    options.dtype = "float64";
    Workspace workspace(std::int64_t{1} << 30);
    NoProgress progress;
    const ScoredRollouts scored = score_rollouts(model->decoder, rollouts, options,
                                                 default_profile("cpu", DType::float64, 2), workspace, progress);
    for (std::size_t i = 0; i < rollouts.size(); ++i)
      for (std::size_t t = 0; t < rollouts[i].response_ids.size(); ++t)
        ASSERT_NEAR(scored.series[i].logprob[t], rollouts[i].rollout_logprobs[t], 1e-12) << family;
  }
}

// The first update's ratios are then exactly 1: at a temperature and at 0, whatever the plan of `score`.
class SampledBits : public ::testing::TestWithParam<std::string> {};

TEST_P(SampledBits, AreThoseOfScore) {
  const WithProducts own(true);
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const auto model = tiny_model(GetParam(), dtype, 2);
    for (const double temperature : {0.7, 0.0}) {
      SamplingSettings settings;
      settings.n = 3, settings.temperature = temperature, settings.max_response_length = 30, settings.stop_ids = {9};
      const auto rollouts = sample(*model, make_prompts({5, 40, 1, 5}, 50, 2), settings).rollouts;
      for (const char* schedule : {"dense", "phased"}) {
        Options options = test_options();
        options.dtype = name_of(dtype), options.schedule = schedule, options.token_budget = 24;
        Workspace workspace(std::int64_t{1} << 30);
        NoProgress progress;
        const ScoredRollouts scored =
            score_rollouts(model->decoder, rollouts, options, default_profile("cpu", dtype, 2), workspace, progress);
        for (std::size_t i = 0; i < rollouts.size(); ++i)
          EXPECT_EQ(scored.series[i].logprob, rollouts[i].rollout_logprobs)
              << name_of(dtype) << ", " << schedule << ", temperature " << temperature << ", rollout " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, SampledBits, ::testing::ValuesIn(families_of_table()),
                         [](const auto& info) { return info.param; });

TEST(Records, StopIdsComeFromTheOptionElseFromTheModel) {
  const Folder folder;
  Options options;
  options.model = folder.path();
  EXPECT_TRUE(stop_ids(options, 50, nullptr).empty());
  folder.write("config.json", R"({"eos_token_id": 3})");
  EXPECT_EQ(stop_ids(options, 50, nullptr), std::vector<std::int32_t>{3});
  folder.write("generation_config.json", R"({"eos_token_id": [4, 5]})");
  EXPECT_EQ(stop_ids(options, 50, nullptr), (std::vector<std::int32_t>{4, 5}));
  folder.write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(stop_ids(options, 50, nullptr), std::vector<std::int32_t>{3});
  options.stop_ids = "7,8";
  EXPECT_EQ(stop_ids(options, 50, nullptr), (std::vector<std::int32_t>{7, 8}));
  options.stop_ids = "50";
  EXPECT_THROW(stop_ids(options, 50, nullptr), OptionError);
  options.stop_ids = "1.5";
  EXPECT_THROW(stop_ids(options, 50, nullptr), OptionError);
  options.stop_ids = "";
  folder.write("generation_config.json", R"({"eos_token_id": "end"})");
  EXPECT_THROW(stop_ids(options, 50, nullptr), InputError);
}

TEST(Records, SettingsAreTheOptions) {
  Options options;
  options.n = "4", options.temperature = 0, options.top_k = 5, options.top_p = 0.5, options.max_response_length = 7;
  options.max_num_seqs = 3, options.token_budget = 11, options.seed = 9;
  const SamplingSettings s = sampling_settings(options);
  EXPECT_EQ(s.n, 4);
  EXPECT_EQ(s.temperature, 0);
  EXPECT_EQ(s.top_k, 5);
  EXPECT_EQ(s.top_p, 0.5);
  EXPECT_EQ(s.max_response_length, 7);
  EXPECT_EQ(s.max_num_seqs, 3);
  EXPECT_EQ(s.token_budget, 11);
  EXPECT_EQ(s.seed, 9u);
  for (const char* n : {"1,2", "1.5", "0"}) {
    options.n = n;
    EXPECT_THROW(sampling_settings(options), OptionError) << n;
  }
}

// Keys, values and activations together stay within the budget; a smaller budget gives smaller sets, never none.
TEST(Records, TheMemoryBudgetIsSplit) {
  const ModelShape shape = tiny_shape("qwen3");
  Options options;
  std::int64_t last_rows = 0, last_kv = 0;
  const StepKind forward = kForwardOnly;
  const std::int64_t held = ActivationBytes(shape, DType::float32, forward).constant();
  for (const std::int64_t mebibytes : {1, 16, 1024}) {
    options.memory_budget = std::to_string(held + (mebibytes << 20));
    SamplingSettings settings;
    plan_memory(shape, options, settings);
    EXPECT_GE(settings.token_budget, std::max<std::int64_t>(16, last_rows));
    EXPECT_GT(settings.kv_limit_bytes, last_kv);
    EXPECT_GE(settings.max_num_seqs, 1);
    EXPECT_LT(settings.kv_limit_bytes, mebibytes << 20);  // weights and the process are of the budget too
    last_rows = settings.token_budget, last_kv = settings.kv_limit_bytes;
  }
}

}  // namespace
}  // namespace espalier::testing
