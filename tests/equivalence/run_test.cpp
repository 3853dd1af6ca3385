// Whole runs through files: continuation, recording and replay, each to the bit.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/base/json.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/model_directory.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/config/model_config.h"
#include "espalier/data/training_data.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/prove/verify.h"
#include "espalier/replay/replay.h"
#include "espalier/score/score.h"
#include "espalier/train/trainer.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class Runs : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier-runs-" + std::to_string(getpid()));
    const auto model = tiny_model("qwen3", DType::float32, 3);
    write_tiny_model(*model, folder_ / "model");
    RolloutOptions rollouts;
    rollouts.groups = 6, rollouts.group_size = {2, 4};
    write_jsonl(path("rollouts.jsonl"), make_rollouts(rollouts, 3));
    options_ = test_options();
    options_.model = path("model"), options_.rollouts = path("rollouts.jsonl");
    options_.overwrite = true;
    options_.mini_batch_size = 6, options_.lr = 1e-3, options_.epochs = 3, options_.warmup_steps = 2;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string content(const std::string& name) const { return read_text_file(folder_ / name); }
  static std::vector<StepReport> run(const Options& options) {
    std::vector<StepReport> reports;
    NoProgress progress;
    train(options, progress, [&](const StepReport& report, const Json&) { reports.push_back(report); });
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

class CriticRuns : public Runs {
 protected:
  void SetUp() override {
    Runs::SetUp();
    options_.critic = path("model"), options_.critic_lr = 2e-3;
    options_.adv_estimator = "gae", options_.gamma = 0.9, options_.lam = 0.8;
  }

  template <class Error>
  static std::string message(const Options& options) {
    try {
      run(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing thrown";
  }

  // The directory of a trained critic.
  std::string trained_critic() {
    Options options = options_;
    options.out = path("trained"), options.steps = 1, options.warmup_steps = 0;
    run(options);
    return path("trained/critic");
  }

  // The same with one tensor of another shape or name: "" leaves it out.
  void rewrite_weights(const std::string& directory, const std::string& name, std::vector<std::int64_t> shape) {
    struct Copy {
      std::vector<TensorSpec> specs;
      std::vector<std::vector<std::byte>> data;
    } copy;
    {
      const SafetensorsFile file(directory + "/model.safetensors");
      for (const SafetensorsEntry& entry : file.entries()) {
        if (entry.name == name && shape.empty()) continue;
        copy.specs.push_back({entry.name, entry.type, entry.name == name ? shape : entry.shape});
        std::int64_t bytes = bytes_of(entry.type);
        for (const std::int64_t size : copy.specs.back().shape) bytes *= size;
        copy.data.emplace_back(static_cast<std::size_t>(bytes));
        std::copy_n(entry.data, std::min(bytes, entry.bytes), copy.data.back().data());
      }
    }
    AtomicFile output(directory + "/model.safetensors");
    SafetensorsWriter writer(output.output(), copy.specs);
    for (const auto& data : copy.data) writer.append(data.data(), static_cast<std::int64_t>(data.size()));
    writer.finish();
    output.commit();
  }
};

TEST_F(CriticRuns, ResumingEqualsNeverHavingStopped) {
  for (const bool with_steps : {false, true}) {
    RolloutOptions rollouts;
    rollouts.groups = 4, rollouts.group_size = {2, 3}, rollouts.mask_gap = 0.3, rollouts.steps = with_steps ? 3 : 0;
    write_jsonl(path("rollouts.jsonl"), make_rollouts(rollouts, 5));
    for (const char* dtype : {"float32", "bfloat16"}) {
      Options whole = options_;
      whole.dtype = dtype, whole.out = path("whole"), whole.epochs = 2, whole.mini_batch_size = 4;
      const std::size_t steps = run(whole).size();
      ASSERT_GE(steps, 4u);
      for (std::size_t cut = 1; cut < steps; cut += 2) {
        Options first = whole, second = whole;
        first.out = path("first"), first.steps = static_cast<std::int64_t>(cut);
        second.out = path("second"), second.resume = first.out, second.model.clear(), second.critic.clear();
        EXPECT_EQ(run(first).size(), cut);
        EXPECT_EQ(run(second).size(), steps - cut);
        for (const char* file : {"model.safetensors", "espalier/state.safetensors", "critic/model.safetensors",
                                 "critic/espalier/state.safetensors"})
          EXPECT_EQ(content(std::string("second/") + file), content(std::string("whole/") + file))
              << dtype << " " << cut << " " << file;
      }
    }
  }
}

// Two steps by hand: values first, then for every mini-batch the critic and the actor, each with its own AdamW.
TEST_F(CriticRuns, AStepIsTheCriticsUpdateAndTheActors) {
  options_.dtype = "float64", options_.out = path("out"), options_.save_dtype = "float64", options_.steps = 2;
  const std::vector<StepReport> reports = run(options_);
  ASSERT_EQ(reports.size(), 2u);
  NoProgress progress;
  const auto model = load_model(options_.model, DType::float64, progress);
  const MachineProfile machine = default_profile("cpu", DType::float64, 2);
  AdamW optimizer(model->table, model->weights, AdamWSettings::from(options_));
  Actor actor(*model, options_, machine, &optimizer);
  Critic critic(load_critic(*espalier::trained_critic(options_), options_, model->shape, progress), options_, machine,
                actor.workspace);
  TrainingData data(read_for_model(options_.rollouts, model->shape, progress), options_, true);
  model->decoder.reserve_positions(data.longest());
  critic.model().decoder.reserve_positions(data.longest());
  data.prepare(0, [&](std::span<const Rollout> rollouts) { return critic.values_of(rollouts, progress); });
  for (std::int64_t i = 0; i < 2; ++i) {
    const MiniBatch batch = data.mini_batch(i);
    const CriticReport of_critic = critic.update(batch);
    const StepReport of_actor = run_step(actor, batch, false);
    const StepReport& report = reports[static_cast<std::size_t>(i)];
    EXPECT_EQ(report.critic->loss.loss, of_critic.loss.loss);
    EXPECT_EQ(report.critic->update.grad_norm, of_critic.update.grad_norm);
    EXPECT_EQ(report.update.grad_norm, of_actor.update.grad_norm);
    EXPECT_EQ(report.critic->update.lr, i == 0 ? 0 : options_.critic_lr / 2);  // the second of two warm-up steps
  }
  const auto saved = load_value_model(path("out/critic"), DType::float64, 0, progress);
  EXPECT_TRUE(on_host(saved->weights).equal(on_host(critic.model().weights)));
  EXPECT_TRUE(on_host(load_model(path("out"), DType::float64, progress)->weights).equal(on_host(model->weights)));
}

// The planner's bytes for the actor's step grow by the critic's weights, gradients and moments, and the other way
// round.
TEST_F(CriticRuns, EachHoldsTheOtherInItsPrediction) {
  options_.schedule = "dense", options_.steps = 1;
  Options alone = options_;
  alone.critic.clear(), alone.adv_estimator = "grpo";
  const std::vector<StepReport> together = run(options_), apart = run(alone);
  const auto peak = [](const PassReport& pass) { return pass.plan.chosen.bytes.b; };
  const ModelShape actor = tiny_shape("qwen3");
  const ModelShape critic = read_critic_shape(options_.critic).shape;
  EXPECT_EQ(peak(together[0].gradient) - peak(apart[0].gradient), critic.parameters() * 4 * 4);
  const std::int64_t own =
      ActivationBytes(critic, DType::float32).constant() - ActivationBytes(actor, DType::float32).constant();
  EXPECT_EQ(own, (critic.parameters() - actor.parameters()) * 4 * 4);
  // Both steps hold both models; the critic's head takes no logits.
  EXPECT_LE(peak(*together[0].critic), peak(together[0].gradient));
  EXPECT_GT(peak(*together[0].critic), ActivationBytes(critic, DType::float32).constant() + actor.parameters() * 4 * 4);
}

TEST_F(CriticRuns, BothGradientsAreInOneFile) {
  options_.gradients = path("gradients.safetensors"), options_.steps = 1;
  run(options_);
  const SafetensorsFile file(options_.gradients);
  for (const char* name : {"model.norm.weight", "critic.model.norm.weight", "critic.score.weight", "critic.score.bias"})
    EXPECT_NE(file.find(name), nullptr) << name;
  EXPECT_EQ(file.find("critic.score.weight")->shape, (std::vector<std::int64_t>{1, tiny_shape("qwen3").hidden}));
}

TEST_F(CriticRuns, VerifyPassesInEveryDtype) {
  options_.mini_batch_size = 0;
  for (const char* dtype : {"float64", "float32", "bfloat16"}) {
    options_.dtype = dtype;
    NoProgress progress;
    const Verdict verdict = verify(options_, progress);
    EXPECT_TRUE(verdict.pass()) << dtype << " " << verdict.worst().name << " " << verdict.worst().distance.ratio();
    ASSERT_TRUE(verdict.critic.has_value());
    EXPECT_LE(verdict.critic->values.ratio(), 1) << dtype;
    EXPECT_EQ(verdict.parameters.back().name, "critic.score.bias");
    EXPECT_GT(verdict.critic->loss_dense, 0);
  }
}

// Values written by `score` are those that training takes: the same two steps, bit for bit.
TEST_F(CriticRuns, ScoredValuesTrainAsTheCriticsOwn) {
  options_.dtype = "float64", options_.steps = 2;
  Options scoring = options_;
  scoring.values = true, scoring.out = path("scored.jsonl");
  NoProgress progress;
  const ScoreReport report = score(scoring, progress);
  EXPECT_LT(report.physical_rows, report.logical_rows);
  Options recorded = options_;
  recorded.rollouts = scoring.out;
  const auto own = run(options_), given = run(recorded);
  for (std::size_t i = 0; i < own.size(); ++i) {
    EXPECT_EQ(own[i].critic->loss.loss, given[i].critic->loss.loss);
    EXPECT_EQ(own[i].gradient.loss.loss, given[i].gradient.loss.loss);
    EXPECT_EQ(given[i].critic->values_seconds, 0);
  }
}

TEST_F(CriticRuns, ScoringRefusesValuesWithoutACriticAndTheReverse) {
  NoProgress progress;
  options_.out = path("scored.jsonl");
  EXPECT_THROW(score(options_, progress), OptionError);
  options_.values = true, options_.critic.clear();
  EXPECT_THROW(score(options_, progress), OptionError);
  EXPECT_FALSE(fs::exists(options_.out));
}

TEST_F(CriticRuns, AFreshHeadDependsOnTheSeedAlone) {
  NoProgress progress;
  const auto load = [&](std::uint64_t seed) {
    return load_value_model(options_.critic, DType::float32, seed, progress);
  };
  const auto a = load(1), b = load(1), c = load(2);
  EXPECT_TRUE(on_host(a->weights).equal(on_host(b->weights)));
  const Parameter& head = a->table.at(kValueWeight);
  const auto slice = [&](const ModelState& m) { return on_host(m.weights).narrow(0, head.offset, head.count); };
  EXPECT_FALSE(slice(*a).equal(slice(*c)));
  EXPECT_GT(slice(*a).abs().max().item<double>(), 0);
  EXPECT_LT(slice(*a).abs().max().item<double>(), 5 * a->shape.initializer_range);
  EXPECT_EQ(on_host(a->decoder.weights().value_bias_1).item<double>(), 0);
}

TEST_F(CriticRuns, AnAbsentBiasStartsAtZero) {
  const std::string critic = trained_critic();
  NoProgress progress;
  const auto bias = [&] {
    const auto model = load_value_model(critic, DType::float32, 0, progress);
    return on_host(model->decoder.weights().value_bias_1).item<float>();
  };
  EXPECT_NE(bias(), 0);
  rewrite_weights(critic, "score.bias", {});
  EXPECT_EQ(bias(), 0);
}

TEST_F(CriticRuns, BadCriticsAreNamed) {
  const std::string critic = trained_critic();
  options_.critic = critic;
  Json config = read_json_object(critic + "/config.json");
  const Json good = config;

  config["vocab_size"] = 60;
  write_json_file(critic + "/config.json", config);
  rewrite_weights(critic, "model.embed_tokens.weight", {60, tiny_shape("qwen3").hidden});
  EXPECT_NE(message<InputError>(options_).find("vocabulary of 60"), std::string::npos) << message<InputError>(options_);
  rewrite_weights(critic, "model.embed_tokens.weight", {50, tiny_shape("qwen3").hidden});

  config = good, config["id2label"] = {{"0", "a"}, {"1", "b"}};
  write_json_file(critic + "/config.json", config);
  EXPECT_NE(message<InputError>(options_).find("one label"), std::string::npos) << message<InputError>(options_);

  write_json_file(critic + "/config.json", good);
  rewrite_weights(critic, "score.weight", {2, tiny_shape("qwen3").hidden});
  EXPECT_NE(message<InputError>(options_).find("'score.weight'"), std::string::npos) << message<InputError>(options_);
  rewrite_weights(critic, "score.weight", {});
  EXPECT_NE(message<InputError>(options_).find("score.weight"), std::string::npos) << message<InputError>(options_);

  options_.critic = path("absent");
  EXPECT_NE(message<InputError>(options_).find("absent"), std::string::npos);
}

TEST_F(CriticRuns, ACriticIsNoPolicy) {
  options_.model = trained_critic();
  EXPECT_NE(message<UnsupportedError>(options_).find("Qwen3ForTokenClassification"), std::string::npos);
}

TEST_F(CriticRuns, GaeWithoutValuesOrCriticNamesOptionAndLine) {
  options_.critic.clear();
  const std::string text = message<InputError>(options_);
  for (const char* part : {"rollouts.jsonl:", "--adv-estimator gae", "--critic DIR"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace
}  // namespace espalier::testing
