// --train: parameters that train have the gradients of a run in which everything trains; the others have none, cost
// nothing and stay as they are.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/config/model_config.h"
#include "espalier/forecast/memory_model.h"
#include "espalier/prove/verify.h"
#include "espalier/replay/replay.h"
#include "espalier/shape/trained_parameters.h"
#include "espalier/train/trainer.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

// Groups, modules and expressions; some end the backward above the first layer, or train nothing but an end.
std::vector<std::string> words_for(const std::string& family) {
  std::vector<std::string> words = {"norms",
                                    "embeddings",
                                    "attention,head",
                                    "o_proj,down_proj",
                                    "head",
                                    "model[.]norm[.]weight",
                                    "q_proj",
                                    "model[.]layers[.]1[.].*",
                                    "model[.]layers[.]2[.](self_attn[.](k|v)_proj|post.*)[.].*"};
  if (family.find("bias") != family.npos) words.emplace_back(".*bias");
  if (family.find("moe") != family.npos) {
    words.emplace_back("router");
    words.emplace_back("experts,norms");
    words.emplace_back("model[.]layers[.][12][.]mlp[.]experts[.].*[.](gate|up)_proj[.]weight");
  } else {
    words.emplace_back("mlp");
  }
  return words;
}

class HeldParameters : public ::testing::TestWithParam<const char*> {};

TEST_P(HeldParameters, GradientsAreThoseOfARunThatTrainsEverything) {
  const Case all = ragged(GetParam());
  std::map<std::string, Outcome> whole;
  for (const Plan& plan : all_plans({7})) whole[plan.name] = run_case(with(all, plan));
  for (const std::string& words : words_for(all.family))
    for (const Plan& plan : all_plans({7})) {
      SCOPED_TRACE(text_of(all.family, ", ", words, ", ", plan.name));
      Case c = with(all, plan);
      c.options.train = words;
      const Outcome held = run_case(c), &reference = whole[plan.name];
      const at::Tensor expected = trained_part(c, reference.gradient);
      ASSERT_EQ(held.gradient.numel(), expected.numel());
      EXPECT_EQ(held.loss, reference.loss);
      if (held.report.plan.items == reference.report.plan.items) {
        EXPECT_TRUE(held.gradient.equal(expected));
      } else {
        EXPECT_LE(worst_parameter(c, held.gradient, expected).error, kFloat64);
      }
    }
}

TEST_P(HeldParameters, TheArenaTakesWhatWasPredicted) {
  for (const std::string& words : words_for(GetParam()))
    for (const Plan& plan : all_plans({9}))
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        SCOPED_TRACE(text_of(GetParam(), ", ", words, ", ", plan.name, ", ", name_of(dtype)));
        Case c = with(ragged(GetParam()), plan);
        c.options.train = words;
        const GradientReport report = run_case(c, dtype).report;
        const PhasePeaks predicted = predicted_arena_bytes(c, report.plan, dtype), &taken = report.arena_bytes;
        EXPECT_EQ(taken.a, predicted.a);
        EXPECT_EQ(taken.b, predicted.b);
        EXPECT_EQ(taken.c, predicted.c);
      }
}

TEST_P(HeldParameters, NoGradientOrMomentIsHeldOfThem) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const std::string& words : words_for(GetParam())) {
      SCOPED_TRACE(text_of(words, ", ", name_of(dtype)));
      const auto model = tiny_model(GetParam(), dtype, 1, false, mesh_of_one(), words);
      AdamW optimizer(model->table, model->weights, {});
      Options options = test_options();
      options.dtype = name_of(dtype);
      Actor actor(*model, options, default_profile("cpu", dtype, 1), &optimizer);
      const std::int64_t all = model->shape.parameters(), trained = model->table.size();
      EXPECT_LT(trained, all);
      EXPECT_EQ(trained + model->held_table.size(), all);
      EXPECT_EQ(actor.gradients.flat().numel(), trained);
      EXPECT_EQ(optimizer.exp_avg().numel(), trained);
      EXPECT_EQ(optimizer.masters().numel(), trained);
      const std::int64_t state = dtype == DType::bfloat16 ? 12 : 8;
      EXPECT_EQ(actor.held_bytes(), all * bytes_of(dtype) + trained * (4 + state));
    }
}

INSTANTIATE_TEST_SUITE_P(Models, HeldParameters,
                         ::testing::Values("llama", "llama-bias", "qwen2", "qwen3", "qwen3-moe", "qwen3-moe-sparse",
                                           "qwen3-moe-late", "qwen3-pad"),
                         [](const auto& one) { return name_of_family(one.param); });

// A critic holds what the words do not name, but for its value head.
TEST(HeldParametersOfACritic, TheValueHeadAlwaysTrains) {
  Case all = ragged("qwen3");
  all.critic = all.rollouts.values = true;
  for (const std::string words : {"norms", "embeddings", "router"})
    for (const Plan& plan : all_plans({7})) {
      Case c = with(all, plan);
      const Outcome reference = run_case(c);
      c.options.train = words;
      const ParameterTable trained(shape_of(c), Parameters::trained);
      EXPECT_TRUE(trained.contains(kValueWeight) && trained.contains(kValueBias));
      EXPECT_TRUE(run_case(c).gradient.equal(trained_part(c, reference.gradient))) << words << ", " << plan.name;
    }
}

TEST(HeldParametersOfRouterLosses, TrainAsWithEverything) {
  Case all = ragged("qwen3-moe");
  all.options.router_aux_loss_coef = 0.5, all.options.router_z_loss_coef = 0.1;
  for (const char* scope : {"rollout", "minibatch"})
    for (const std::string words : {"router", "norms", "model[.]layers[.]2[.].*"})
      for (const Plan& plan : all_plans({7})) {
        Case c = with(all, plan);
        c.options.router_aux_loss_scope = scope;
        const Outcome reference = run_case(c);
        c.options.train = words;
        const Outcome held = run_case(c);
        EXPECT_LE(worst_parameter(c, held.gradient, trained_part(c, reference.gradient)).error, kFloat64)
            << words << ", " << plan.name;
        // The loss is told with the penalties of layers that a backward runs.
        if (words == "router") {
          EXPECT_EQ(held.loss, reference.loss);
        }
      }
}

class HeldRuns : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier-held-" + std::to_string(getpid()));
    write_tiny_model(*tiny_model("qwen3", DType::float32, 3), folder_ / "model");
    RolloutOptions rollouts;
    rollouts.groups = 6, rollouts.group_size = {2, 4};
    write_jsonl(path("rollouts.jsonl"), make_rollouts(rollouts, 3));
    options_ = test_options();
    options_.model = path("model"), options_.rollouts = path("rollouts.jsonl");
    options_.overwrite = true, options_.train = "norms";
    options_.mini_batch_size = 6, options_.lr = 1e-3, options_.epochs = 2;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::vector<StepReport> run(const Options& options) {
    std::vector<StepReport> reports;
    NoProgress progress;
    train(options, progress, [&](const StepReport& report, const Json&) { reports.push_back(report); });
    return reports;
  }

  fs::path folder_;
  Options options_;
};

// The source is float32: in bfloat16 the weights that a run computes with have fewer bits than those it holds.
TEST_F(HeldRuns, FrozenTensorsKeepTheBitsOfTheirFile) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    options_.dtype = dtype, options_.out = path("out"), options_.gradients = path("gradients.safetensors");
    run(options_);
    const SafetensorsFile before(path("model/model.safetensors")), after(path("out/model.safetensors"));
    const SafetensorsFile gradients(path("gradients.safetensors")), state(path("out/espalier/state.safetensors"));
    std::size_t trained = 0;
    ASSERT_EQ(before.entries().size(), after.entries().size());
    for (const SafetensorsEntry& entry : before.entries()) {
      const SafetensorsEntry* const now = after.find(entry.name);
      ASSERT_NE(now, nullptr) << entry.name;
      const bool norm = entry.name.ends_with("norm.weight");
      trained += norm ? 1 : 0;
      EXPECT_EQ(now->bytes, entry.bytes);
      EXPECT_EQ(std::memcmp(now->data, entry.data, static_cast<std::size_t>(entry.bytes)) != 0, norm) << entry.name;
      EXPECT_EQ(gradients.find(entry.name) != nullptr, norm) << entry.name;
    }
    EXPECT_EQ(gradients.entries().size(), trained);
    EXPECT_EQ(state.entries().size(), 3 * trained);
  }
}

TEST_F(HeldRuns, ResumingEqualsNeverHavingStopped) {
  for (const char* dtype : {"float32", "bfloat16"})
    for (const char* words : {"norms", "embeddings", "attention,model[.]layers[.]2[.].*"}) {
      Options whole = options_, first = options_, second = options_;
      whole.dtype = first.dtype = second.dtype = dtype;
      whole.train = first.train = second.train = words;
      whole.out = path("whole"), first.out = path("first"), second.out = path("second");
      ASSERT_GE(run(whole).size(), 3u);
      first.steps = 2, second.resume = first.out, second.model.clear();
      run(first);
      run(second);
      for (const char* file : {"/model.safetensors", "/espalier/state.safetensors"})
        EXPECT_EQ(read_text_file(second.out + file), read_text_file(whole.out + file)) << dtype << ", " << words;
    }
}

TEST_F(HeldRuns, ResumingWithOtherWordsIsRefused) {
  options_.out = path("out"), options_.steps = 1;
  run(options_);
  options_.resume = options_.out, options_.out = path("again"), options_.steps = 0, options_.train = "attention";
  EXPECT_THROW(run(options_), InputError);
}

TEST_F(HeldRuns, ATraceIsReplayedToTheBit) {
  options_.record = path("trace"), options_.record_every = 1;
  const std::vector<StepReport> recorded = run(options_);
  NoProgress progress;
  const ReplayReport report = replay(path("trace"), test_options(), progress, [](const CheckpointDifference&) {});
  ASSERT_EQ(report.checkpoints.size(), recorded.size());
  for (const CheckpointDifference& c : report.checkpoints) EXPECT_EQ(c.max_abs, 0) << "step " << c.step;
}

TEST_F(HeldRuns, VerifyJudgesWhatTrains) {
  options_.dtype = "float64", options_.max_grad_norm = 1;
  NoProgress progress;
  const Verdict verdict = verify(options_, progress);
  EXPECT_TRUE(verdict.pass());
  EXPECT_EQ(verdict.parameters.size(),
            ParameterTable(read_trained_shape(path("model"), "norms"), Parameters::trained).parameters().size());
}

// The norm of what trains alone decides the clipping.
TEST_F(HeldRuns, TheGradientNormIsThatOfWhatTrains) {
  options_.steps = 1, options_.gradients = path("gradients.safetensors"), options_.dtype = "float64";
  const StepReport report = run(options_).front();
  const SafetensorsFile gradients(path("gradients.safetensors"));
  double squares = 0;
  for (const SafetensorsEntry& entry : gradients.entries())
    squares += at::from_blob(const_cast<std::byte*>(entry.data), {entry.bytes}, at::kByte)
                   .clone()
                   .view(at::kDouble)
                   .square()
                   .sum()
                   .item<double>();
  EXPECT_NEAR(report.update.grad_norm, std::sqrt(squares), 1e-12 * report.update.grad_norm);
}

TEST(TrainedWords, OfNothingOrOfAPartOfAProductAreRefused) {
  const ModelShape dense = tiny_shape("qwen3"), experts = tiny_shape("qwen3-moe");
  for (const char* words : {"", "nrms", "norms,", "nothing", "router", "experts", "model[.]nothing", "model(", "k_proj",
                            "up_proj", "model[.]layers[.]0[.]self_attn[.]v_proj[.]weight"})
    EXPECT_THROW(train_only(dense, words), OptionError) << words;
  for (const char* words : {"mlp", "model[.]layers[.]0[.]mlp[.]experts[.]3[.].*"})
    EXPECT_THROW(train_only(experts, words), OptionError) << words;
  try {
    train_only(dense, "nothing");
  } catch (const OptionError& error) {
    for (const char* word :
         {"--train", "embeddings", "norms", "attention", "mlp", "router", "experts", "head", "nothing"})
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word;
  }
}

TEST(TrainedWords, OfEverythingAreTheDefault) {
  for (const char* words : {"all", "norms,all", ".*", "embeddings,norms,attention,mlp,head"})
    EXPECT_TRUE(train_only(tiny_shape("qwen3"), words).trained.all()) << words;
  EXPECT_FALSE(train_only(tiny_shape("llama"), "embeddings,norms,attention,mlp").trained.all());
}

}  // namespace
}  // namespace espalier::testing
