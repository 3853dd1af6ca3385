// The closed loop by the engine alone: this program links no task, no report page and no names of other trainers.
#include "espalier/loop/grpo.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "espalier/base/json.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class NoTexts final : public TurnTexts {
 public:
  std::vector<std::string> read(std::span<const std::span<const std::int32_t>> turns) override {
    return std::vector<std::string>(turns.size());
  }
  std::vector<std::vector<std::int32_t>> observations(std::span<const Observation>, const Where&) override {
    return {};
  }
  std::vector<RenderedChat> rendered(std::span<const RenderedTurn>, const Where&) override { return {}; }
  std::vector<EncodedPrompt> prompts(std::span<const std::string>, const Where&) override { return {}; }
};

// Two prompts of one token. Longer responses are better.
class LongAnswers final : public Questions {
 public:
  std::vector<Prompt> train(const Draw&, std::int64_t count) override {
    std::vector<Prompt> out(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < out.size(); ++i) out[i].ids = {1, static_cast<std::int32_t>(2 + i)};
    return out;
  }
  std::vector<Prompt> held_out() override { return {}; }
  std::vector<Judgement> judge(std::vector<Rollout>& rollouts, Progress&) override {
    std::vector<Judgement> out;
    for (const Rollout& rollout : rollouts) out.push_back({static_cast<double>(rollout.response_ids.size()), 1.0});
    return out;
  }
  std::int64_t longest_prompt() const override { return 2; }
  const std::vector<std::int32_t>& stop_ids() const override { return stop_ids_; }
  TurnTexts& turn_texts() override { return texts_; }
  std::string fingerprint() const override { return ""; }

 private:
  std::vector<std::int32_t> stop_ids_{0, 3, 5};
  NoTexts texts_;
};

class NoWarmStart final : public WarmStart {
 public:
  bool run(Progress&, const std::function<void(const WarmStartStep&)>& on_step) override {
    on_step(last_);
    return true;
  }
  const WarmStartStep& last() const override { return last_; }
  bool learned() const override { return true; }
  void save(const fs::path&, std::int64_t) const override {}
  std::int64_t load(const fs::path&) override { return 0; }

 private:
  WarmStartStep last_;
};

class TestTasks final : public BuiltInTasks {
 public:
  std::unique_ptr<Questions> questions(const Options&) const override { return std::make_unique<LongAnswers>(); }
  void check_words(const fs::path&, const ModelShape&) const override {}
  Json fresh_config(const Options&) const override {
    return {{"architectures", {"Qwen3ForCausalLM"}},
            {"model_type", "qwen3"},
            {"vocab_size", 11},
            {"hidden_size", 8},
            {"num_hidden_layers", 1},
            {"num_attention_heads", 2},
            {"num_key_value_heads", 1},
            {"head_dim", 4},
            {"intermediate_size", 8},
            {"max_position_embeddings", 64},
            {"rms_norm_eps", 1e-6},
            {"rope_theta", 10000.0},
            {"tie_word_embeddings", true}};
  }
  void write_fresh_model(const fs::path& directory, const Json& config) const override {
    fs::create_directories(directory);
    std::ofstream(directory / "config.json") << config;
  }
  std::unique_ptr<WarmStart> warm_start(ModelState&, const Options&, const MachineProfile&) const override {
    return std::make_unique<NoWarmStart>();
  }
};

class GrpoTest : public ::testing::Test {
 protected:
  GrpoTest() : root_(fs::temp_directory_path() / ("espalier_grpo_" + std::to_string(getpid()))) {
    fs::remove_all(root_);
  }
  ~GrpoTest() override { fs::remove_all(root_); }

  Options options() const {
    Options out = default_options('l');
    out.out = root_.string();
    out.steps = 2;
    out.train_batch_size = 2;
    out.n = "4";
    out.max_response_length = 6;
    return out;
  }
  std::vector<std::string> kinds() const {
    std::vector<std::string> out;
    std::ifstream lines(root_ / "metrics.jsonl");
    for (std::string line; std::getline(lines, line);) out.push_back(Json::parse(line)["kind"].get<std::string>());
    return out;
  }

  fs::path root_;
  TestTasks tasks_;
  NoProgress progress_;
};

TEST_F(GrpoTest, TrainsOnTheTasksThatItIsGiven) {
  std::int64_t seen = 0;
  const GrpoReport report = grpo(options(), {tasks_}, progress_, [&](const Json&) { ++seen; });
  EXPECT_EQ(report.steps, 2);
  EXPECT_FALSE(report.accuracy);
  const std::vector<std::string> written = kinds();
  EXPECT_EQ(std::ranges::count(written, "warm_start"), 1);
  EXPECT_EQ(std::ranges::count(written, "step"), 2);
  EXPECT_EQ(std::ranges::count(written, "picture"), 0);
  EXPECT_EQ(seen, static_cast<std::int64_t>(written.size()));
  EXPECT_TRUE(fs::exists(root_ / "model" / "model.safetensors"));
}

TEST_F(GrpoTest, KeepsThePictureThatItIsGiven) {
  std::size_t drawn = 0;
  const auto picture = [&](const StepPlan&, std::span<const Rollout> rollouts) {
    ++drawn;
    return Json{{"rollouts", rollouts.size()}};
  };
  Options each = options();
  each.test_freq = 1;
  grpo(each, {tasks_, picture}, progress_, [](const Json&) {});
  EXPECT_EQ(drawn, 2u);
  EXPECT_EQ(std::ranges::count(kinds(), "picture"), 2);
}

}  // namespace
}  // namespace espalier
