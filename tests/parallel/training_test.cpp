// Whole runs on several ranks, through files: what rank 0 writes is what one process writes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "espalier/base/atomic_file.h"
#include "espalier/base/error.h"
#include "espalier/checkpoint/json_file.h"
#include "espalier/checkpoint/safetensors.h"
#include "espalier/parallel/in_process.h"
#include "espalier/prove/verify.h"
#include "espalier/train/score.h"
#include "espalier/train/trainer.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

class RankRuns : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier-ranks-" + std::to_string(getpid()));
    write_tiny_model(*tiny_model("qwen3", DType::float32, 3), folder_ / "model");
    RolloutOptions rollouts;
    rollouts.groups = 6, rollouts.group_size = {2, 4};
    write_jsonl(path("rollouts.jsonl"), make_rollouts(rollouts, 3));
    options_ = test_options();
    options_.model = path("model"), options_.rollouts = path("rollouts.jsonl");
    options_.dtype = "float64", options_.save_dtype = "float64", options_.overwrite = true;
    options_.mini_batch_size = 6, options_.lr = 1e-3, options_.max_grad_norm = 0.01;  // clipping is active
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // Reports of rank 0.
  static std::vector<StepReport> run(const Options& options, std::int64_t dp) {
    std::vector<StepReport> reports;
    run_ranks({.dp = dp}, [&](const Mesh& mesh) {
      NoProgress progress;
      const auto on_step = [&](const StepReport& report, const Json&) {
        if (mesh.writes()) reports.push_back(report);
      };
      train(options, progress, on_step, mesh);
    });
    return reports;
  }

  // |a - b| / |b| of every tensor of two float64 files with the same names.
  double distance(const std::string& a, const std::string& b) const {
    const SafetensorsFile ours(path(a)), theirs(path(b));
    EXPECT_EQ(ours.entries().size(), theirs.entries().size());
    double worst = 0;
    for (const SafetensorsEntry& entry : theirs.entries()) {
      const SafetensorsEntry* own = ours.find(entry.name);
      if (own == nullptr || own->type != TensorType::F64 || own->count != entry.count) {
        ADD_FAILURE() << a << " has no such " << entry.name;
        continue;
      }
      const auto values = [](const SafetensorsEntry& e) {
        return at::from_blob(const_cast<std::byte*>(e.data), {e.bytes}, at::kByte).clone().view(at::kDouble);
      };
      const at::Tensor expected = values(entry);
      const double norm = std::max(expected.norm().item<double>(), std::numeric_limits<double>::min());
      worst = std::max(worst, (values(*own) - expected).norm().item<double>() / norm);
    }
    return worst;
  }

  fs::path folder_;
  Options options_;
};

TEST_F(RankRuns, FilesAreThoseOfOneProcess) {
  options_.epochs = 2;
  const auto with_outputs = [&](const std::string& name) {
    Options out = options_;
    out.out = path(name), out.gradients = path(name + ".safetensors"), out.logprobs = path(name + ".jsonl");
    return out;
  };
  const std::vector<StepReport> alone = run(with_outputs("alone"), 1);
  ASSERT_GE(alone.size(), 3u);
  for (const std::int64_t dp : {2, 5}) {
    SCOPED_TRACE(dp);
    const std::vector<StepReport> ranks = run(with_outputs("ranks"), dp);
    ASSERT_EQ(ranks.size(), alone.size());
    for (std::size_t i = 0; i < alone.size(); ++i) {
      EXPECT_LT(alone[i].update.clip_factor, 1);
      EXPECT_NEAR(ranks[i].update.grad_norm, alone[i].update.grad_norm, 1e-10 * alone[i].update.grad_norm);
      EXPECT_NEAR(ranks[i].gradient.loss.loss, alone[i].gradient.loss.loss, 1e-10);
    }
    EXPECT_LE(distance("ranks.safetensors", "alone.safetensors"), kFloat64);
    // AdamW divides a gradient by its own size: 1e-10 of it moves a weight by 1e-10 of the learning rate, 1e-3, a step,
    // unless the gradient is as small as epsilon; weights are of size 0.1.
    EXPECT_LE(distance("ranks/model.safetensors", "alone/model.safetensors"), kFloat64);
    EXPECT_LE(distance("ranks/espalier/state.safetensors", "alone/espalier/state.safetensors"), 1e-9);
    std::ifstream ours(path("ranks.jsonl")), theirs(path("alone.jsonl"));
    for (std::string a, b; std::getline(theirs, b);) {
      ASSERT_TRUE(std::getline(ours, a));
      const Json one = Json::parse(a), other = Json::parse(b);
      EXPECT_EQ(one["index"], other["index"]);
      ASSERT_EQ(one["logprobs"].size(), other["logprobs"].size());
      for (std::size_t t = 0; t < other["logprobs"].size(); ++t)
        EXPECT_NEAR(one["logprobs"][t].get<double>(), other["logprobs"][t].get<double>(), 1e-9);
    }
  }
}

TEST_F(RankRuns, SharedOptimizerStateMovesTheSameWeights) {
  for (const char* dtype : {"float64", "bfloat16"}) {
    options_.dtype = dtype, options_.save_dtype = "float64", options_.epochs = 2;
    Options whole = options_, parts = options_, first = options_, second = options_;
    whole.out = path("whole"), parts.out = path("parts"), first.out = path("first"), second.out = path("second");
    run(whole, 3);
    parts.shard = first.shard = "optimizer";
    run(parts, 3);
    first.steps = 2;
    run(first, 3);
    second.resume = first.out;  // every rank has the whole state again
    run(second, 3);
    for (const char* file : {"/model.safetensors", "/espalier/state.safetensors"}) {
      EXPECT_EQ(read_text_file(path("parts") + file), read_text_file(path("whole") + file)) << dtype << file;
      EXPECT_EQ(read_text_file(path("second") + file), read_text_file(path("whole") + file)) << dtype << file;
    }
  }
}

TEST_F(RankRuns, ARunGoesOnUnderAnotherLayout) {
  options_.epochs = 2;
  Options whole = options_, first = options_, second = options_, same = options_;
  whole.out = path("whole"), first.out = path("first"), second.out = path("second"), same.out = path("same");
  run(whole, 1);
  first.steps = 2;
  run(first, 3);
  second.resume = same.resume = first.out;
  run(second, 2);
  EXPECT_LE(distance("second/model.safetensors", "whole/model.safetensors"), kFloat64);
  run(same, 3);
  whole.out = path("again");
  run(whole, 3);
  EXPECT_EQ(read_text_file(path("same/model.safetensors")), read_text_file(path("again/model.safetensors")))
      << "the same layout gives the same bits";
}

TEST_F(RankRuns, ACriticTrainsAsAlone) {
  options_.critic = options_.model, options_.adv_estimator = "gae";
  Options alone = options_, ranks = options_;
  alone.out = path("alone"), ranks.out = path("ranks");
  run(alone, 1);
  run(ranks, 2);
  for (const char* file : {"/model.safetensors", "/critic/model.safetensors", "/critic/espalier/values.safetensors"})
    EXPECT_LE(distance(std::string("ranks") + file, std::string("alone") + file), kFloat64) << file;
}

TEST_F(RankRuns, ScoresAreThoseOfOneProcess) {
  const auto scored = [&](const std::string& name, std::int64_t dp) {
    Options options = options_;
    options.out = path(name), options.entropies = true;
    ScoreReport report;
    run_ranks({.dp = dp}, [&](const Mesh& mesh) {
      NoProgress progress;
      const ScoreReport own = score(options, progress, mesh);
      if (mesh.writes()) report = own;
    });
    return report;
  };
  const ScoreReport alone = scored("alone.jsonl", 1), ranks = scored("ranks.jsonl", 4);
  EXPECT_EQ(ranks.tokens, alone.tokens);
  EXPECT_EQ(ranks.logical_rows, alone.logical_rows);
  std::ifstream ours(path("ranks.jsonl")), theirs(path("alone.jsonl"));
  for (std::string a, b; std::getline(theirs, b);) {
    ASSERT_TRUE(std::getline(ours, a));
    const Json one = Json::parse(a), other = Json::parse(b);
    EXPECT_EQ(one["response_ids"], other["response_ids"]);
    for (const char* field : {"logprobs", "entropies"})
      for (std::size_t t = 0; t < other[field].size(); ++t)
        EXPECT_NEAR(one[field][t].get<double>(), other[field][t].get<double>(), 1e-10);
  }
}

TEST_F(RankRuns, VerifyPassesOnSeveralRanks) {
  options_.mini_batch_size = 0, options_.schedule = "phased";
  for (const char* dtype : {"float64", "float32"}) {
    options_.dtype = dtype;
    run_ranks({.dp = 2}, [&](const Mesh& mesh) {
      NoProgress progress;
      EXPECT_TRUE(verify(options_, progress, mesh).pass()) << dtype;
    });
  }
}

// NaN on one rank is NaN in the sum: all refuse, and nothing is written.
TEST_F(RankRuns, ANanOnOneRankStopsAllAndLeavesNothing) {
  std::vector<Rollout> rollouts = make_rollouts({.groups = 2, .group_size = {2, 2}}, 3);
  for (Rollout& rollout : rollouts) rollout.advantages.assign(rollout.response_ids.size(), -1);
  rollouts.front().old_logprobs.assign(rollouts.front().response_ids.size(), -1e6);  // a ratio beyond all numbers
  write_jsonl(path("rollouts.jsonl"), rollouts);
  options_.log_ratio_bound = options_.clip_ratio_c = std::numeric_limits<double>::infinity();
  options_.out = path("out");
  EXPECT_THROW(run(options_, 2), InputError);
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(RankRuns, RanksWithOtherFilesAreTold) {
  fs::copy(path("rollouts.jsonl"), path("other.jsonl"));
  std::string text = read_text_file(path("other.jsonl"));
  const std::size_t digit = text.find("\"reward\":");
  ASSERT_NE(digit, std::string::npos);
  text.insert(digit + 9, "1");
  std::ofstream(path("other.jsonl")) << text;
  options_.out = path("out");
  const auto body = [&](const Mesh& mesh) {
    Options own = options_;
    if (mesh.world.rank() == 1) own.rollouts = path("other.jsonl");
    NoProgress progress;
    train(
        own, progress, [](const StepReport&, const Json&) {}, mesh);
  };
  EXPECT_THROW(run_ranks({.dp = 2}, body), CommunicationError);
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(RankRuns, WhatRankZeroCannotWriteEndsAll) {
  options_.out = path("out"), options_.gradients = path("missing/folder/g.safetensors");
  EXPECT_THROW(run(options_, 3), WriteError);
  EXPECT_FALSE(fs::exists(path("out")));
}

}  // namespace
}  // namespace espalier::testing
