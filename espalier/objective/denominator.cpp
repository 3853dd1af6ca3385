#include "espalier/objective/denominator.h"

#include <algorithm>
#include <array>

#include "espalier/base/error.h"

namespace espalier {

namespace {
constexpr std::array<const char*, 5> kModes = {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean",
                                               "seq-mean-token-sum-norm", "token-sum"};
constexpr double kTokenMeanEpsilon = 1e-8;  // verl adds it to a rollout's token count

std::string given_mode(const Options& options, const char* absent) {
  const std::string mode = options.loss_agg_mode.empty() ? absent : options.loss_agg_mode;
  if (std::find(kModes.begin(), kModes.end(), mode) == kModes.end())
    throw OptionError({"--loss-agg-mode",
                       "token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm or token-sum",
                       mode, "choose one of these"});
  return mode;
}
}  // namespace

std::string resolve_loss_agg_mode(const Options& options) {
  const bool sequence_mean = options.policy_loss == "gspo" || options.policy_loss == "sapo";
  const std::string mode = given_mode(options, sequence_mean ? "seq-mean-token-mean" : "token-mean");
  if (options.policy_loss == "sapo" && mode != "seq-mean-token-mean")
    throw OptionError({"--loss-agg-mode", "seq-mean-token-mean with --policy-loss sapo", mode,
                       "leave --loss-agg-mode out, or choose another --policy-loss"});
  return mode;
}

std::string value_loss_agg_mode(const Options& options) { return given_mode(options, "token-mean"); }

std::int64_t count_loss_tokens(const Rollout& rollout) {
  return std::count_if(rollout.loss_mask.begin(), rollout.loss_mask.end(), [](std::uint8_t m) { return m != 0; });
}

std::vector<double> compute_token_weights(std::span<const Rollout> batch, const std::string& mode,
                                          double loss_scale_factor) {
  const double rollouts = static_cast<double>(batch.size());
  std::int64_t loss_tokens = 0;
  std::int32_t longest = 0;
  for (const Rollout& rollout : batch) {
    loss_tokens += count_loss_tokens(rollout);
    longest = std::max(longest, rollout.response_length());
  }
  const double scale = loss_scale_factor > 0 ? loss_scale_factor : std::max<double>(longest, 1);

  std::vector<double> weights;
  weights.reserve(batch.size());
  for (const Rollout& rollout : batch) {
    double weight = 1;  // token-sum
    if (mode == "token-mean")
      weight = loss_tokens > 0 ? 1.0 / static_cast<double>(loss_tokens) : 0.0;
    else if (mode == "seq-mean-token-sum")
      weight = 1.0 / rollouts;
    else if (mode == "seq-mean-token-sum-norm")
      weight = 1.0 / rollouts / scale;
    else if (mode == "seq-mean-token-mean")
      weight = 1.0 / rollouts / (static_cast<double>(count_loss_tokens(rollout)) + kTokenMeanEpsilon);
    weights.push_back(weight);
  }
  return weights;
}

}  // namespace espalier
