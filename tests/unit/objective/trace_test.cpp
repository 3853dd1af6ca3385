// A recorded training run: its advantages, clip bounds and token means come out of the rewards alone.
// The recorder's loss was computed at log-probs that differ from old_logprobs by rounding only (on-policy steps).
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <vector>

#include "espalier/base/json.h"
#include "espalier/objective/objective.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/reader.h"
#include "tests/support/source_dir.h"

namespace espalier {
namespace {

TEST(RecordedTrace, LossOfOnPolicyStepsFollowsFromTheRewards) {
  const std::filesystem::path folder = testing::source_dir() + "/../shared/data/trace_grpo20";
  if (!std::filesystem::exists(folder / "trace.json")) GTEST_SKIP() << "no recorded trace in ../shared/data";
  std::ifstream file(folder / "trace.json");
  const Json trace = Json::parse(file);
  const std::vector<Rollout> rollouts = read_rollouts({(folder / "rollouts.jsonl.gz").string()}).rollouts;

  Options options;
  options.clip_ratio_high = 0.28;
  options.kl_loss_coef = 0.001;
  const std::vector<std::vector<double>> advantages = compute_advantages(rollouts, options);
  const auto steps = cut_mini_batches(rollouts, 0);
  ASSERT_EQ(steps.size(), trace["steps"].size());
  int checked = 0;
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const Json& recorded = trace["steps"][s];
    if (recorded["off_policy"].get<bool>()) continue;
    std::vector<Rollout> batch;
    std::vector<std::vector<double>> batch_advantages;
    double largest = 0;
    for (std::int64_t i : steps[s]) {
      batch.push_back(rollouts[i]), batch_advantages.push_back(advantages[i]);
      for (double a : advantages[i]) largest = std::max(largest, std::abs(a));
    }
    Objective objective(batch, batch_advantages, options);
    for (std::size_t i = 0; i < batch.size(); ++i)
      for (int t = 0; t < batch[i].response_length(); ++t)
        objective.add_token(static_cast<int>(i), t, batch[i].old_logprobs[t], 0);
    const LossParts parts = objective.parts();
    EXPECT_EQ(parts.loss_tokens, recorded["loss_tokens"].get<std::int64_t>()) << "step " << s + 1;
    // A token's loss moves by at most |A| |r - 1|; float32 sums of the recorder add a few 2^-24 of |A|.
    const double ratio_error =
        std::max(recorded["ratio_max"].get<double>() - 1, 1 - recorded["ratio_min"].get<double>());
    EXPECT_NEAR(parts.pg_loss, recorded["pg_loss"].get<double>(), largest * (ratio_error + 4e-7)) << "step " << s + 1;
    // k3's derivative is 1 - r, below 2 in size here; a token's log-prob is off by the same ratio error.
    EXPECT_NEAR(parts.kl_loss, recorded["kl"].get<double>(), 2 * (ratio_error + 4e-7)) << "step " << s + 1;
    EXPECT_EQ(parts.clip_fraction, recorded["clip_fraction"].get<double>());
    ++checked;
  }
  EXPECT_EQ(checked, 15);
}

}  // namespace
}  // namespace espalier
