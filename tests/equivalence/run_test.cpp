// Whole runs through files: continuation, recording and replay, each to the bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/replay/replay.h"
#include "espalier/train/score.h"
#include "espalier/train/trainer.h"
#include "espalier/train/verify.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class Runs : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier-runs-" + std::to_string(getpid()));
    fs::create_directories(folder_ / "model");
    const auto model = tiny_model("qwen3", DType::float32, 3);
    const ModelShape& s = model->shape;
    write_json_file(folder_ / "model/config.json", {{"architectures", {s.architecture}},
                                                    {"model_type", "qwen3"},
                                                    {"hidden_size", s.hidden},
                                                    {"num_hidden_layers", s.layers},
                                                    {"intermediate_size", s.inner},
                                                    {"num_attention_heads", s.heads},
                                                    {"num_key_value_heads", s.kv_heads},
                                                    {"head_dim", s.head_dim},
                                                    {"vocab_size", s.vocabulary},
                                                    {"max_position_embeddings", s.max_positions},
                                                    {"rms_norm_eps", s.rms_norm_eps},
                                                    {"rope_theta", s.rope_theta},
                                                    {"tie_word_embeddings", s.tied_head},
                                                    {"hidden_act", "silu"},
                                                    {"torch_dtype", "float32"}});
    write_named_tensors(folder_ / "model/model.safetensors", model->table, DType::float32, model->weights.data_ptr());
    RolloutOptions rollouts;
    rollouts.groups = 6, rollouts.group_size = {2, 4};
    write_jsonl(path("rollouts.jsonl"), make_rollouts(rollouts, 3));
    options_ = test_options();
    options_.model = path("model"), options_.rollouts = path("rollouts.jsonl");
    options_.mini_batch_size = 6, options_.lr = 1e-3, options_.epochs = 3, options_.warmup_steps = 2;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string content(const std::string& name) const { return read_text_file(folder_ / name); }
  static std::vector<StepReport> run(const Options& options) {
    std::vector<StepReport> reports;
    NoProgress progress;
    train(options, progress, [&](const StepReport& report) { reports.push_back(report); });
    return reports;
  }

  fs::path folder_;
  Options options_;
};

TEST_F(Runs, ResumingEqualsNeverHavingStopped) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    Options whole = options_;
    whole.dtype = dtype, whole.out = path("whole");
    const std::size_t steps = run(whole).size();
    ASSERT_GE(steps, 6u);
    for (std::size_t cut = 1; cut < steps; cut += 2) {
      Options first = whole, second = whole;
      first.out = path("first"), first.steps = static_cast<std::int64_t>(cut);
      second.out = path("second"), second.resume = first.out, second.model.clear();
      EXPECT_EQ(run(first).size(), cut);
      EXPECT_EQ(run(second).size(), steps - cut);
      for (const char* file : {"model.safetensors", "espalier/state.safetensors"})
        EXPECT_EQ(content(std::string("second/") + file), content(std::string("whole/") + file)) << dtype << " " << cut;
    }
  }
}

TEST_F(Runs, ResumingWithNothingLeftIsAnError) {
  options_.out = path("out");
  run(options_);
  options_.resume = path("out"), options_.out = path("again");
  EXPECT_THROW(run(options_), OptionError);
  EXPECT_FALSE(fs::exists(path("again")));
}

TEST_F(Runs, ReplayingARecordedRunGivesItsWeights) {
  options_.record = path("trace"), options_.record_every = 2;
  options_.adv_estimator = "reinforce_plus_plus_baseline";  // whitened over the whole file, not over a step
  const std::vector<StepReport> recorded = run(options_);
  NoProgress progress;
  const ReplayReport report = replay(path("trace"), test_options(), progress, [](const CheckpointDifference&) {});
  ASSERT_EQ(report.steps.size(), recorded.size());
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    EXPECT_EQ(report.steps[i].loss, recorded[i].gradient.loss.loss);
    EXPECT_EQ(report.steps[i].grad_norm, recorded[i].update.grad_norm);
  }
  ASSERT_EQ(report.checkpoints.size(), (recorded.size() + 1) / 2);
  for (const CheckpointDifference& c : report.checkpoints) EXPECT_EQ(c.max_abs, 0) << "step " << c.step;
}

TEST_F(Runs, ReplayingUnderAnotherScheduleMovesTheSameWay) {
  options_.record = path("trace"), options_.dtype = "float64";
  run(options_);
  for (const char* schedule : {"dense", "packed", "phased"}) {
    Options other = test_options();
    other.schedule = schedule, other.token_budget = 9;
    NoProgress progress;
    const ReplayReport report = replay(path("trace"), other, progress, [](const CheckpointDifference&) {});
    // Gradients agree to 1e-12; AdamW can turn that into at most the same relative share of a move, unless an element's
    // gradient is itself rounding (then of the order of lr, for few elements of the smallest ones).
    EXPECT_LE(report.checkpoints.back().movement_rel_l2, 1e-6) << schedule;
  }
}

TEST_F(Runs, ADamagedTraceIsAnInputError) {
  options_.record = path("trace");
  run(options_);
  const std::string whole = content("trace/trace.json");
  NoProgress progress;
  for (const std::string& text :
       {std::string(), whole.substr(0, whole.size() / 2), std::string("[]"), std::string("{}")}) {
    std::ofstream(folder_ / "trace/trace.json") << text;
    EXPECT_THROW(replay(path("trace"), test_options(), progress, [](const CheckpointDifference&) {}), InputError);
  }
}

TEST_F(Runs, VerifyPassesInEveryDtype) {
  options_.mini_batch_size = 0;
  for (const char* dtype : {"float64", "float32", "bfloat16"}) {
    options_.dtype = dtype;
    NoProgress progress;
    const Verdict verdict = verify(options_, progress);
    EXPECT_TRUE(verdict.pass()) << dtype << " " << verdict.worst().name << " " << verdict.worst().distance.ratio();
    EXPECT_GE(verdict.schedules.size(), 7u);
  }
}

TEST_F(Runs, ScoresEqualTheLogProbsOfTraining) {
  options_.mini_batch_size = 0, options_.epochs = 1;
  options_.logprobs = path("logprobs.jsonl"), options_.schedule = "dense", options_.dtype = "float64";
  run(options_);
  options_.out = path("scored.jsonl"), options_.schedule = "phased", options_.entropies = true;
  NoProgress progress;
  const ScoreReport report = score(options_, progress);
  EXPECT_LT(report.physical_rows, report.logical_rows);
  std::ifstream trained(path("logprobs.jsonl")), scored(path("scored.jsonl"));
  std::string a, b;
  std::int64_t lines = 0;
  while (std::getline(trained, a) && std::getline(scored, b)) {
    const Json x = Json::parse(a), y = Json::parse(b);
    EXPECT_EQ(x["index"], lines++);
    for (const auto& [ours, theirs] : {std::pair("logprobs", "logprobs"), std::pair("entropies", "entropies")}) {
      const auto u = x[ours].get<std::vector<double>>(), v = y[theirs].get<std::vector<double>>();
      ASSERT_EQ(u.size(), v.size());
      for (std::size_t t = 0; t < u.size(); ++t) EXPECT_NEAR(u[t], v[t], 1e-11);  // sums of O(10) terms in float64
    }
  }
  EXPECT_EQ(lines, report.rollouts);
}

}  // namespace
}  // namespace espalier::testing
