#include "espalier/objective/policy_loss.h"

#include <algorithm>
#include <cmath>

#include "espalier/base/error.h"
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

PolicyTerm vanilla_term(const PolicySettings& settings, double ratio, double advantage) {
  PolicyTerm term = clipped_term(settings, ratio, advantage);
  if (advantage < 0) {
    const double bound = -advantage * settings.dual_clip;
    term.gradient *= 1.0 - share_of_maximum(term.value, bound);
    term.value = std::min(term.value, bound);
  }
  return term;
}

PolicyTerm sapo_term(double ratio, double advantage) {
  const double temperature = advantage > 0 ? kSapoTemperaturePositive : kSapoTemperatureNegative;
  const double gate = 1.0 / (1.0 + std::exp(-temperature * (ratio - 1.0)));
  return {-advantage * gate * 4.0 / temperature, -advantage * 4.0 * gate * (1.0 - gate), false};
}
}  // namespace

PolicyLoss parse_policy_loss(const std::string& name) {
  if (name == "vanilla") return PolicyLoss::vanilla;
  if (name == "gspo") return PolicyLoss::gspo;
  if (name == "cispo") return PolicyLoss::cispo;
  if (name == "sapo") return PolicyLoss::sapo;
  if (name == "gpg") return PolicyLoss::gpg;
  if (name == "reinforce") return PolicyLoss::reinforce;
  throw OptionError({"--policy-loss", "vanilla, gspo, cispo, sapo, gpg or reinforce", name, "choose one of these"});
}

PolicySettings PolicySettings::from(const Options& options) {
  return {parse_policy_loss(options.policy_loss), 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high,
          options.clip_ratio_c};
}

PolicyTerm policy_term(const PolicySettings& settings, double logprob, double old_logprob, double advantage) {
  const double log_ratio = logprob - old_logprob;
  const double ratio = std::exp(std::clamp(log_ratio, -kLogRatioBound, kLogRatioBound));
  const double ratio_gradient = std::abs(log_ratio) <= kLogRatioBound ? ratio : 0.0;
  PolicyTerm term;
  switch (settings.loss) {
    case PolicyLoss::gpg:
    case PolicyLoss::reinforce:
      return {-advantage * logprob, -advantage, false};
    case PolicyLoss::cispo: {
      const double weight = std::clamp(ratio, settings.ratio_low, settings.ratio_high);
      return {-weight * advantage * logprob, -weight * advantage, weight != ratio};
    }
    case PolicyLoss::vanilla:
      term = vanilla_term(settings, ratio, advantage);
      break;
    case PolicyLoss::sapo:
      term = sapo_term(ratio, advantage);
      break;
    case PolicyLoss::gspo:
      ESPALIER_INTERNAL(false, "gspo needs the mean log-ratio of its rollout");
  }
  term.gradient *= ratio_gradient;
  return term;
}

PolicyTerm gspo_term(const PolicySettings& settings, double mean_log_ratio, double advantage) {
  const double ratio = std::exp(std::min(mean_log_ratio, kGspoLogRatioBound));
  PolicyTerm term = clipped_term(settings, ratio, advantage);
  term.gradient *= mean_log_ratio <= kGspoLogRatioBound ? ratio : 0.0;
  return term;
}

}  // namespace espalier
