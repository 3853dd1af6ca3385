// Whole training runs of several ranks, threads of this process, and the files that they write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "espalier/checkpoint/safetensors.h"
#include "espalier/train/trainer.h"
#include "tests/equivalence/fixture.h"
#include "tests/support/in_process.h"

namespace espalier::testing {

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

  // A model with experts in place of the dense one.
  void take_experts() {
    fs::remove_all(folder_ / "model");
    write_tiny_model(*tiny_model("qwen3-moe", DType::float32, 3), folder_ / "model");
    options_.router_aux_loss_coef = 0.1;
  }

  // Reports of rank 0.
  static std::vector<StepReport> run(const Options& options, const Degrees& degrees) {
    std::vector<StepReport> reports;
    run_ranks(degrees, [&](const Mesh& mesh) {
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

  // Compares gradients, log-probs, weights and state of a run under each layout with one process's.
  void expect_files_of_one_process(const std::vector<Degrees>& layouts) {
    options_.epochs = 2;
    const auto with_outputs = [&](const std::string& name) {
      Options out = options_;
      out.out = path(name), out.gradients = path(name + ".safetensors"), out.logprobs = path(name + ".jsonl");
      return out;
    };
    const std::vector<StepReport> alone = run(with_outputs("alone"), {});
    ASSERT_GE(alone.size(), 3u);
    for (const Degrees& degrees : layouts) {
      SCOPED_TRACE(text_of_degrees(degrees));
      const std::vector<StepReport> ranks = run(with_outputs("ranks"), degrees);
      ASSERT_EQ(ranks.size(), alone.size());
      for (std::size_t i = 0; i < alone.size(); ++i) {
        EXPECT_LT(alone[i].update.clip_factor, 1);
        EXPECT_NEAR(ranks[i].update.grad_norm, alone[i].update.grad_norm, 1e-10 * alone[i].update.grad_norm);
        EXPECT_NEAR(ranks[i].gradient.loss.loss, alone[i].gradient.loss.loss, 1e-10);
      }
      EXPECT_LE(distance("ranks.safetensors", "alone.safetensors"), kFloat64);
      // AdamW divides a gradient by its own size: 1e-10 of it moves a weight by 1e-10 of the learning rate, 1e-3, a
      // step, unless the gradient is as small as epsilon; weights are of size 0.1.
      EXPECT_LE(distance("ranks/model.safetensors", "alone/model.safetensors"), kFloat64);
      EXPECT_LE(distance("ranks/espalier/state.safetensors", "alone/espalier/state.safetensors"), 1e-9);
      expect_same_logprobs("ranks.jsonl", "alone.jsonl");
    }
  }

  void expect_same_logprobs(const std::string& a, const std::string& b) const {
    std::ifstream ours(path(a)), theirs(path(b));
    for (std::string one_line, other_line; std::getline(theirs, other_line);) {
      ASSERT_TRUE(std::getline(ours, one_line));
      const Json one = Json::parse(one_line), other = Json::parse(other_line);
      EXPECT_EQ(one["index"], other["index"]);
      ASSERT_EQ(one["logprobs"].size(), other["logprobs"].size());
      for (std::size_t t = 0; t < other["logprobs"].size(); ++t)
        EXPECT_NEAR(one["logprobs"][t].get<double>(), other["logprobs"][t].get<double>(), 1e-9);
    }
  }

  fs::path folder_;
  Options options_;
};

}  // namespace espalier::testing
