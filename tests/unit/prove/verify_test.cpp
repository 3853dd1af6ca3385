// `verify` by itself: what its verdict depends on, and that it notices an engine whose shared path is wrong.
#include "espalier/prove/verify.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <functional>

#include "espalier/device/device.h"
#include "espalier/ops/cpu/operations.h"
#include "tests/equivalence/fixture.h"

namespace espalier::testing {
namespace {

namespace fs = std::filesystem;

Verdict within_limits() {
  Verdict verdict;
  verdict.parameters = {{"a", {1, 1, 2}, 1}, {"b", {2, 1, 2}, 1}};
  verdict.logprob = verdict.loss = {1e-6, 1e-6, 2e-6};
  verdict.critic.emplace();
  verdict.critic->values = verdict.critic->loss = {0, 0, 0};
  return verdict;
}

TEST(Verdict, PassesWhereEveryDistanceIsAllowed) {
  const Verdict verdict = within_limits();
  EXPECT_TRUE(verdict.pass());
  EXPECT_EQ(verdict.worst().name, "b") << "exactly at its limit";
}

TEST(Verdict, FailsByAnyOneDistance) {
  const std::function<Distance&(Verdict&)> members[] = {
      [](Verdict& v) -> Distance& { return v.parameters[0].distance; },
      [](Verdict& v) -> Distance& { return v.parameters[1].distance; },
      [](Verdict& v) -> Distance& { return v.logprob; },
      [](Verdict& v) -> Distance& { return v.loss; },
      [](Verdict& v) -> Distance& { return v.critic->values; },
      [](Verdict& v) -> Distance& { return v.critic->loss; },
  };
  for (const auto& member : members)
    for (const Distance& wrong : {Distance{2.1, 1, 2}, Distance{1e-300, 0, 0}, Distance{HUGE_VAL, 1, 2},
                                  Distance{NAN, 1, 2}, Distance{1, NAN, NAN}}) {
      Verdict verdict = within_limits();
      member(verdict) = wrong;
      EXPECT_FALSE(verdict.pass()) << "member " << &member - members << ", error " << wrong.error;
    }
}

TEST(Verdict, DoesNotJudgeTheOptimizer) {
  Verdict verdict = within_limits();
  verdict.optimizer = {1, 0, 0};
  EXPECT_TRUE(verdict.pass());
}

// Operations of the processor, with a fault that a test may switch on. A fault acts only where there is a path: dense
// runs have none, so that only shared runs are wrong.
enum class PathFault { none, forward, gradient };
PathFault path_fault = PathFault::none;

bool has_path(const AttentionProblem& problem) { return problem.path_k_P.defined() && problem.path_k_P.size(0) > 0; }

void attention_with_fault(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
  cpu::operations().attention(problem, out, lse);
  if (path_fault == PathFault::forward && has_path(problem)) out.mul_(1 + 1e-3);
}
void backward_with_fault(const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse,
                         const at::Tensor& grad_out, const AttentionGradients& gradients) {
  AttentionGradients own = gradients;
  if (path_fault == PathFault::gradient && has_path(problem)) {  // what comes to the path's values is lost
    own.path_v_P = at::zeros_like(gradients.path_v_P);
  }
  cpu::operations().add_attention_backward(problem, out, lse, grad_out, own);
}

class Verify : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    static const Operations operations = [] {
      Operations changed = cpu::operations();
      changed.attention = attention_with_fault;
      changed.add_attention_backward = backward_with_fault;
      return changed;
    }();
    static const std::unique_ptr<Device> device = cpu::device_with(operations);
    bind_device(*device);
  }

  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("espalier-verify-" + std::to_string(getpid()));
    write_tiny_model(*tiny_model("qwen3", DType::float32, 5), folder_ / "model");
    RolloutOptions rollouts;
    rollouts.groups = 2, rollouts.group_size = {3, 4};
    rollouts.prompt_length = {8, 12}, rollouts.response_length = {4, 9};
    write_jsonl((folder_ / "rollouts.jsonl").string(), make_rollouts(rollouts, 5));
  }
  void TearDown() override {
    path_fault = PathFault::none;
    fs::remove_all(folder_);
  }

  Verdict verdict(const char* dtype, PathFault fault) {
    Options options = test_options();
    options.model = (folder_ / "model").string(), options.rollouts = (folder_ / "rollouts.jsonl").string();
    options.dtype = dtype;
    path_fault = fault;
    NoProgress progress;
    return verify(options, progress);
  }

  fs::path folder_;
};

TEST_F(Verify, PassesTheEngine) {
  for (const char* dtype : {"float64", "float32"}) {
    const Verdict found = verdict(dtype, PathFault::none);
    EXPECT_TRUE(found.pass()) << dtype << ": " << found.worst().name << ", " << found.worst().distance.ratio();
    EXPECT_GT(found.gradient_norm, 0);
    std::int64_t trunks = 0;
    for (const ScheduleCheck& schedule : found.schedules) trunks += schedule.trunks;
    EXPECT_GT(trunks, 0) << "something is shared by trunks";
  }
}

TEST_F(Verify, FailsAForwardThatIsWrongBelowTrunks) {
  for (const char* dtype : {"float64", "float32"}) {
    const Verdict found = verdict(dtype, PathFault::forward);
    EXPECT_FALSE(found.pass()) << dtype;
    EXPECT_GT(found.logprob.ratio(), 1) << dtype;
    EXPECT_GT(found.other_bits, 0) << dtype;
  }
}

// Log-probs are right; only the gradients show it.
TEST_F(Verify, FailsAGradientThatIsLostOnThePath) {
  for (const char* dtype : {"float64", "float32"}) {
    const Verdict found = verdict(dtype, PathFault::gradient);
    EXPECT_FALSE(found.pass()) << dtype;
    EXPECT_LE(found.logprob.ratio(), 1) << dtype;
    EXPECT_GT(found.worst().distance.ratio(), 1) << dtype;
    for (const ScheduleCheck& schedule : found.schedules)
      EXPECT_EQ(schedule.worst_ratio > 1, schedule.trunks > 0) << schedule.name << ": plans without trunks are right";
  }
}

}  // namespace
}  // namespace espalier::testing
