#include "espalier/objective/policy_loss.h"

#include <algorithm>
#include <cmath>

#include "espalier/objective/share_of_maximum.h"

namespace espalier {

namespace {
constexpr double kLogRatioBound = 20;
constexpr double kGspoLogRatioBound = 10;
constexpr double kSapoTemperaturePositive = 1.0, kSapoTemperatureNegative = 1.05;

// max(-A r, -A clip(r)) and its derivative with respect to r.
PolicyTerm clipped_term(const PolicySettings& settings, double ratio, double advantage) {
  const double plain = -advantage * ratio;
  const double clipped = -advantage * std::clamp(ratio, settings.ratio_low, settings.ratio_high);
  const double share = share_of_maximum(plain, clipped);
  const bool inside = ratio >= settings.ratio_low && ratio <= settings.ratio_high;
  return {std::max(plain, clipped), -advantage * (share + (inside ? 1.0 - share : 0.0)), clipped > plain};
}

// r = exp(clamp(lp - old)) and its derivative with respect to lp.
struct Ratio {
  double value, gradient;

  explicit Ratio(const PolicyToken& token) {
    const double log_ratio = token.logprob - token.old_logprob;
    value = std::exp(std::clamp(log_ratio, -kLogRatioBound, kLogRatioBound));
    gradient = std::abs(log_ratio) <= kLogRatioBound ? value : 0.0;
  }
};

PolicyTerm vanilla_term(const PolicySettings& settings, const PolicyToken& token) {
  const Ratio ratio(token);
  PolicyTerm term = clipped_term(settings, ratio.value, token.advantage);
  if (token.advantage < 0) {
    const double bound = -token.advantage * settings.dual_clip;
    term.gradient *= 1.0 - share_of_maximum(term.value, bound);
    term.value = std::min(term.value, bound);
  }
  term.gradient *= ratio.gradient;
  return term;
}

PolicyTerm gspo_term(const PolicySettings& settings, const PolicyToken& token) {
  const double ratio = std::exp(std::min(token.mean_log_ratio, kGspoLogRatioBound));
  PolicyTerm term = clipped_term(settings, ratio, token.advantage);
  term.gradient *= token.mean_log_ratio <= kGspoLogRatioBound ? ratio : 0.0;
  return term;
}

PolicyTerm cispo_term(const PolicySettings& settings, const PolicyToken& token) {
  const Ratio ratio(token);
  const double weight = std::clamp(ratio.value, settings.ratio_low, settings.ratio_high);
  return {-weight * token.advantage * token.logprob, -weight * token.advantage, weight != ratio.value};
}

PolicyTerm sapo_term(const PolicySettings&, const PolicyToken& token) {
  const Ratio ratio(token);
  const double advantage = token.advantage;
  const double temperature = advantage > 0 ? kSapoTemperaturePositive : kSapoTemperatureNegative;
  const double gate = 1.0 / (1.0 + std::exp(-temperature * (ratio.value - 1.0)));
  return {-advantage * gate * 4.0 / temperature, -advantage * 4.0 * gate * (1.0 - gate) * ratio.gradient, false};
}

// The score function: gpg, reinforce.
PolicyTerm score_term(const PolicySettings&, const PolicyToken& token) {
  return {-token.advantage * token.logprob, -token.advantage, false};
}
}  // namespace

PolicySettings PolicySettings::from(const Options& options) {
  return {options.policy_loss, 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high, options.clip_ratio_c};
}

PolicyTerm policy_term(const PolicySettings& settings, const PolicyToken& token) {
  switch (settings.loss) {
#define ESPALIER_POLICY_LOSS(name, term, sees, by_default, allowed) \
  case PolicyLoss::name:                                            \
    return term(settings, token);
#include "espalier/options/policy_losses.def"
  }
  return {};
}

}  // namespace espalier
