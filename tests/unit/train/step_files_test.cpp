// Files of a run about its steps: numbers of a step, of each rollout, log-probs, and the trace that repeats it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/objective/objective.h"
#include "espalier/score/series_file.h"
#include "espalier/train/rollout_metrics.h"
#include "espalier/train/step_statistics.h"
#include "espalier/train/trace.h"
#include "tests/support/make_rollouts.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class StepFiles : public ::testing::Test {
 protected:
  StepFiles() : folder_(fs::temp_directory_path() / ("espalier-step-files-" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~StepFiles() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  std::vector<std::string> lines(const char* name) const {
    std::vector<std::string> out;
    std::ifstream file(path(name));
    for (std::string line; std::getline(file, line);) out.push_back(line);
    return out;
  }

  fs::path folder_;
};

std::vector<Rollout> drawn() {
  testing::RolloutOptions options;
  options.groups = 3, options.group_size = {3, 4}, options.mask_gap = 0.3, options.token_advantages = true;
  options.policy = testing::PolicyAge::far, options.response_length = {2, 8};
  return testing::make_rollouts(options, 9);
}

// Numbers that a run could have found: near the recorded ones, none for masked tokens.
std::vector<RolloutSeries> series_of(const std::vector<Rollout>& rollouts) {
  std::vector<RolloutSeries> out;
  for (const Rollout& rollout : rollouts) {
    RolloutSeries series;
    for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t) {
      const double turn = std::sin(7.0 * static_cast<double>(rollout.index) + static_cast<double>(t));
      series.logprob.push_back(rollout.old_logprobs[t] + 0.3 * turn);
      series.entropy.push_back(1.5 + turn);
    }
    out.push_back(std::move(series));
  }
  return out;
}

TEST_F(StepFiles, LogprobsStandInTheOrderOfTheInputWithAllTheirBits) {
  std::vector<Rollout> rollouts = drawn();
  std::vector<RolloutSeries> series = series_of(rollouts);
  series[1].logprob[0] = 0.1 + 0.2;  // not the shortest decimal
  std::swap(rollouts[0], rollouts[2]), std::swap(series[0], series[2]);
  write_series(path("logprobs.jsonl"), rollouts, series);
  const std::vector<std::string> found = lines("logprobs.jsonl");
  ASSERT_EQ(found.size(), rollouts.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const Json line = Json::parse(found[i]);
    const std::size_t at = i == 0 ? 2 : i == 2 ? 0 : i;
    EXPECT_EQ(line["index"], rollouts[at].index);
    EXPECT_EQ(line["logprobs"].get<std::vector<double>>(), series[at].logprob);
    EXPECT_EQ(line["entropies"].get<std::vector<double>>(), series[at].entropy);
    if (i > 0) {
      EXPECT_LT(Json::parse(found[i - 1])["index"].get<int>(), line["index"].get<int>());
    }
  }
}

TEST_F(StepFiles, LossesOfRolloutsAddUpToThatOfTheStep) {
  const std::vector<Rollout> rollouts = drawn();
  const std::vector<RolloutSeries> series = series_of(rollouts);
  std::vector<std::vector<double>> advantages;
  for (const Rollout& rollout : rollouts) advantages.push_back(rollout.advantages);
  for (const char* loss : {"vanilla", "gspo", "cispo"}) {
    SCOPED_TRACE(loss);
    Options options;
    options.policy_loss = loss, options.entropy_coeff = 0.02, options.kl_loss_coef = 0.1;
    Objective objective(rollouts, advantages, options);
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      std::vector<double> of_logprob(series[i].logprob.size()), of_entropy(series[i].logprob.size());
      objective.add_rollout(static_cast<std::int32_t>(i), series[i].logprob, series[i].entropy, of_logprob, of_entropy);
    }
    RolloutMetrics metrics(path("metrics.jsonl"), options);
    MiniBatch mini_batch{rollouts, advantages, {}};
    metrics.add(4, mini_batch, series);
    metrics.finish();
    double sum = 0;
    std::size_t i = 0;
    for (const std::string& line : lines("metrics.jsonl")) {
      const Json found = Json::parse(line);
      const Rollout& rollout = rollouts[i];
      sum += found["loss"].get<double>();
      EXPECT_EQ(found["step"], 4);
      EXPECT_EQ(found["index"], rollout.index);
      double ratio = 0, largest = 0, tokens = 0;
      for (std::size_t t = 0; t < rollout.loss_mask.size(); ++t)
        if (rollout.loss_mask[t] == 1) {
          const double one = std::exp(series[i].logprob[t] - rollout.old_logprobs[t]);
          ratio += one, largest = std::max(largest, one), tokens += 1;
        }
      EXPECT_EQ(found["loss_tokens"], tokens);
      if (tokens > 0) {
        EXPECT_NEAR(found["ratio"].get<double>(), ratio / tokens, 1e-12);
        EXPECT_NEAR(found["ratio_max"].get<double>(), largest, 1e-12);
      }
      ++i;
    }
    EXPECT_EQ(i, rollouts.size());
    EXPECT_NEAR(sum, objective.parts().loss, 1e-12 * std::max(1.0, std::abs(objective.parts().loss)));
  }
}

TEST_F(StepFiles, CellsOfCsvAreQuotedWhereTheyMustBe) {
  std::vector<Rollout> rollouts = drawn();
  rollouts[0].carried = R"({"id": "a \"b\", c"})";
  rollouts[0].ref_logprobs.clear();
  std::vector<std::vector<double>> advantages;
  for (const Rollout& rollout : rollouts) advantages.push_back(rollout.advantages);
  RolloutMetrics metrics(path("metrics.csv"), Options());
  metrics.add(1, MiniBatch{rollouts, advantages, {}}, series_of(rollouts));
  EXPECT_FALSE(fs::exists(path("metrics.csv"))) << "complete or absent";
  metrics.finish();
  const std::vector<std::string> found = lines("metrics.csv");
  ASSERT_EQ(found.size(), rollouts.size() + 1);
  EXPECT_TRUE(found[0].starts_with("step,index,id,group,")) << found[0];
  EXPECT_TRUE(found[1].starts_with(text_of("1,", rollouts[0].index, ",\"a \"\"b\"\", c\","))) << found[1];
}

TEST(StepStatistics, SayWhatTheRewardsAndRatiosOfAStepAre) {
  std::vector<Rollout> rollouts(5);
  const double rewards[] = {1, 3, 2, 2, 2};
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    Rollout& rollout = rollouts[i];
    rollout.prompt_ids = {i < 2 ? 1 : 2}, rollout.response_ids = {3, 4}, rollout.loss_mask = {1, 0};
    rollout.reward = rewards[i], rollout.old_logprobs = {-1, -1}, rollout.index = static_cast<std::int64_t>(i);
    rollout.carried = i < 4 ? (i == 0 ? R"({"finish_reason": "length"})" : R"({"finish_reason": "stop"})") : "";
  }
  StepReport report;
  report.gradient.series.resize(5);
  const double ratios[] = {0.4, 1.0, 1.0, 1.03, 9};
  for (std::size_t i = 0; i < 5; ++i) report.gradient.series[i].logprob = {-1 + std::log(ratios[i]), -7};
  report.gradient.plan.logical_rows = 600, report.gradient.seconds.total = 2;
  const Json found = step_statistics(report, rollouts, MachineProfile{});
  EXPECT_EQ(found["groups"], 2);
  EXPECT_EQ(found["groups_without_variance"], 1);
  EXPECT_NEAR(found["reward_spread"]["std"].get<double>(), std::sqrt(2.0) / 2, 1e-15) << "mean of sqrt(2) and 0";
  EXPECT_EQ(found["reward_spread"]["min"], 1);
  EXPECT_EQ(found["reward_spread"]["max"], 3);
  EXPECT_EQ(found["truncated"], 0.25);
  EXPECT_EQ(found["tokens_per_second"], 300);
  EXPECT_FALSE(found.contains("mfu")) << "no time was measured";
  const auto edges = found["ratio_histogram"]["edges"].get<std::vector<double>>();
  const auto counts = found["ratio_histogram"]["counts"].get<std::vector<std::int64_t>>();
  ASSERT_EQ(counts.size(), edges.size() + 1);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::int64_t expected = 0;
    for (const double ratio : ratios)
      expected += (i == 0 || edges[i - 1] <= ratio) && (i == edges.size() || ratio < edges[i]);
    EXPECT_EQ(counts[i], expected) << "up to " << (i < edges.size() ? edges[i] : INFINITY);
  }
}

class TraceFiles : public StepFiles {
 protected:
  TraceFiles() {
    fs::create_directories(folder_ / "model");
    std::ofstream(path("rollouts.jsonl.gz")) << "";
    for (const char* name : {"a.safetensors", "b.safetensors"}) std::ofstream(path(name)) << "";
    json_ = Json::parse(R"({
      "model": "model", "rollouts": "rollouts.jsonl.gz", "dtype": "bfloat16",
      "steps": [{"step": 2, "loss": 0.5, "grad_norm": 1.5}, {"step": 1}],
      "checkpoints": [{"step": 2, "file": "b.safetensors"}, {"step": 1, "file": "a.safetensors"}]})");
  }
  Trace read() const {
    std::ofstream(path("trace.json")) << json_.dump();
    return read_trace(folder_);
  }
  void expect_refused(const char* what, const std::string& named) const {
    try {
      read();
      ADD_FAILURE() << what << " is read";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(named), std::string::npos) << what << ": " << error.what();
    }
  }

  Json json_;
};

TEST_F(TraceFiles, StepsAndCheckpointsAreReadInOrder) {
  const Trace trace = read();
  ASSERT_EQ(trace.steps.size(), 2u);
  EXPECT_EQ(trace.steps[0].step, 1);
  EXPECT_FALSE(trace.steps[0].loss.has_value());
  EXPECT_EQ(trace.steps[1].loss, 0.5);
  EXPECT_EQ(trace.steps[1].grad_norm, 1.5);
  ASSERT_EQ(trace.checkpoints.size(), 2u);
  EXPECT_EQ(trace.checkpoints[0].file, folder_ / "a.safetensors");
  EXPECT_EQ(trace.checkpoints[1].file, folder_ / "b.safetensors");
  const DType dtype = trace.options.dtype;
  EXPECT_EQ(dtype, DType::bfloat16);
  EXPECT_TRUE(trace.adapter.empty());
}

TEST_F(TraceFiles, MembersThatAreWrongAreNamed) {
  const Json whole = json_;
  for (const char* member : {"model", "rollouts", "steps", "checkpoints"}) {
    json_ = whole;
    json_.erase(member);
    expect_refused("a trace without it", std::string("\"") + member + "\"");
  }
  json_ = whole, json_["model"] = "/etc";
  expect_refused("an absolute path", "/etc");
  json_ = whole, json_["rollouts"] = "../rollouts.jsonl.gz";
  expect_refused("a path out of the trace", "..");
  json_ = whole, json_["checkpoints"][0]["file"] = "c.safetensors";
  expect_refused("a file that is not there", "c.safetensors");
  json_ = whole, json_["steps"][0]["step"] = 0;
  expect_refused("a step 0", "\"step\"");
  json_ = whole, json_["dtype"] = "int7";
  expect_refused("another dtype", "int7");
}

}  // namespace
}  // namespace espalier
