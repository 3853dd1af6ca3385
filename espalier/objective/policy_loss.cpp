#include "espalier/objective/policy_loss.h"

#include <algorithm>
#include <cmath>

#include "espalier/objective/share_of_maximum.h"

namespace espalier {

namespace {
constexpr double kSequenceLogRatioBound = 10;

// max(-A min(r, cap), -A clip(r)) and its derivative with respect to r.
PolicyTerm clipped_term(const PolicySettings& settings, double ratio, double advantage) {
  const double plain = -advantage * std::min(ratio, settings.ratio_cap);
  const double clipped = -advantage * std::clamp(ratio, settings.ratio_low, settings.ratio_high);
  const double share = share_of_maximum(plain, clipped);
  const bool uncapped = ratio <= settings.ratio_cap;
  const bool inside = ratio >= settings.ratio_low && ratio <= settings.ratio_high;
  return {std::max(plain, clipped), -advantage * ((uncapped ? share : 0.0) + (inside ? 1.0 - share : 0.0)),
          clipped > plain};
}

// -A min(r, c) lp for a valid token, with the ratio and the choice of tokens held constant (verl: dppo_tv, dppo_kl).
PolicyTerm truncated_term(const PolicySettings& settings, const PolicyToken& token, bool valid) {
  if (!valid) return {0, 0, true};
  const double weight = std::min(ratio_of(settings, token).value, settings.dual_clip);
  return {-weight * token.advantage * token.logprob, -weight * token.advantage, false};
}
}  // namespace

PolicyTerm vanilla_term(const PolicySettings& settings, const PolicyToken& token) {
  const Ratio ratio = ratio_of(settings, token);
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
  const Ratio ratio = ratio_of(settings, token);
  PolicyTerm term = clipped_term(settings, ratio.value, token.advantage);
  term.gradient *= ratio.gradient;
  return term;
}

PolicyTerm cispo_term(const PolicySettings& settings, const PolicyToken& token) {
  const Ratio ratio = ratio_of(settings, token);
  const double weight = std::clamp(ratio.value, settings.ratio_low, settings.ratio_high);
  return {-weight * token.advantage * token.logprob, -weight * token.advantage, weight != ratio.value};
}

PolicyTerm sapo_term(const PolicySettings& settings, const PolicyToken& token) {
  const Ratio ratio = ratio_of(settings, token);
  const double advantage = token.advantage;
  const double temperature = advantage > 0 ? settings.tau_positive : settings.tau_negative;
  const double gate = 1.0 / (1.0 + std::exp(-temperature * (ratio.value - 1.0)));
  return {-advantage * gate * 4.0 / temperature, -advantage * 4.0 * gate * (1.0 - gate) * ratio.gradient, false};
}

// -phi(w) A lp with phi(w) = w^k exp(lambda (1 - w)) held constant; w is clamped to [1e-8, e^20].
PolicyTerm vespo_term(const PolicySettings& settings, const PolicyToken& token) {
  const double log_w = std::clamp(token.sum_log_ratio, std::log(1e-8), 20.0);
  const bool gains = token.advantage >= 0;
  const double k = settings.vespo[gains ? 0 : 2], lambda = std::max(settings.vespo[gains ? 1 : 3], 1e-4);
  const double phi = std::exp(lambda + k * log_w - lambda * std::exp(log_w));
  const double weight = std::isfinite(phi) ? phi : 0.0;
  return {-weight * token.advantage * token.logprob, -weight * token.advantage, false};
}

// A token is valid while its probability has not moved too far to the side that A pushes towards.
PolicyTerm dppo_tv_term(const PolicySettings& settings, const PolicyToken& token) {
  const double moved = std::exp(token.logprob) - std::exp(token.old_logprob);
  return truncated_term(settings, token,
                        token.advantage > 0 ? moved <= settings.clip_high : moved >= -settings.clip_low);
}

// The same by the KL of two outcomes, this token or another one.
PolicyTerm dppo_kl_term(const PolicySettings& settings, const PolicyToken& token) {
  constexpr double kEpsilon = 1e-8;  // verl's
  const double now = std::exp(token.logprob), old = std::exp(token.old_logprob);
  const double kl =
      old * (token.old_logprob - token.logprob) + (1 - old) * std::log((1 - old + kEpsilon) / (1 - now + kEpsilon));
  return truncated_term(
      settings, token,
      token.advantage > 0 ? kl <= settings.clip_high || now <= old : kl <= settings.clip_low || now >= old);
}

// prime-rl's: -f A r for a valid token, plus kl_tau (log r)^2 for every token; r is the ratio to the sampler, f
// --adv-tau.
PolicyTerm dppo_term(const PolicySettings& settings, const PolicyToken& token) {
  const double log_ratio = token.logprob - token.old_logprob;
  const double moved = std::exp(token.logprob) - std::exp(token.old_logprob);
  const bool valid = token.advantage > 0 ? moved <= settings.dppo_high : moved >= -settings.dppo_low;
  const double gain = valid ? -settings.advantage_factor * token.advantage * std::exp(log_ratio) : 0.0;
  return {gain + settings.kl_tau * log_ratio * log_ratio, gain + 2 * settings.kl_tau * log_ratio, !valid};
}

// -f A r for a ratio to the sampler within the bounds, which are compared as logarithms.
PolicyTerm icepop_term(const PolicySettings& settings, const PolicyToken& token) {
  const double log_ratio = token.logprob - token.old_logprob;
  if (log_ratio < std::log(settings.icepop_low) || log_ratio > std::log(settings.icepop_high)) return {0, 0, true};
  const double gain = -settings.advantage_factor * token.advantage * std::exp(log_ratio);
  return {gain, gain, false};
}

// The score function.
PolicyTerm reinforce_term(const PolicySettings&, const PolicyToken& token) {
  return {-token.advantage * token.logprob, -token.advantage, false};
}

PolicyTerm gpg_term(const PolicySettings& settings, const PolicyToken& token) {
  return reinforce_term(settings, token);
}

PolicySettings PolicySettings::from(const Options& options) {
  PolicySettings out;
  out.loss = options.policy_loss;
  out.ratio_low = 1.0 - options.clip_ratio_low;
  out.ratio_high = 1.0 + options.clip_ratio_high;
  out.dual_clip = options.clip_ratio_c;
  out.ratio_cap = options.ratio_cap;
  out.log_ratio_bound = options.log_ratio_bound;
  out.level = options.ratio_level;
  out.clip_low = options.clip_ratio_low, out.clip_high = options.clip_ratio_high;
  out.dppo_low = options.dppo_mask_low, out.dppo_high = options.dppo_mask_high;
  out.icepop_low = options.icepop_ratio_low, out.icepop_high = options.icepop_ratio_high;
  out.kl_tau = options.kl_tau, out.advantage_factor = options.adv_tau;
  out.tau_positive = options.tau_pos;
  out.tau_negative = options.tau_neg;
  std::ranges::copy(parse_numbers("--vespo-weights", options.vespo_weights), out.vespo.begin());
  return out;
}

Ratio ratio_of(const PolicySettings& settings, const PolicyToken& token) {
  const bool by_sequence = settings.by_sequence();
  const double bound = settings.log_ratio_bound;
  const double above = by_sequence && std::isfinite(bound) ? kSequenceLogRatioBound : bound;
  const double below = by_sequence ? -std::numeric_limits<double>::infinity() : -bound;
  const double log_ratio = by_sequence ? token.mean_log_ratio : token.logprob - token.old_logprob;
  const double ratio = std::exp(std::clamp(log_ratio, below, above));
  return {ratio, log_ratio >= below && log_ratio <= above ? ratio : 0.0};
}

PolicyTerm policy_term(const PolicySettings& settings, const PolicyToken& token) {
  switch (settings.loss) {
#define ESPALIER_POLICY_LOSS(name, ...) \
  case PolicyLoss::name:                \
    return name##_term(settings, token);
#include "espalier/options/policy_losses.def"
  }
  return {};
}

}  // namespace espalier
