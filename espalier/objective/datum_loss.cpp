#include "espalier/objective/datum_loss.h"

#include <algorithm>
#include <limits>

#include "espalier/base/error.h"
#include "espalier/objective/policy_loss.h"

namespace espalier {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The policy loss that has the formula: no dual clip and no bound of the log-ratio, which these losses do not know.
PolicySettings settings_of(const DatumTerms& terms, std::size_t position) {
  PolicySettings out;
  out.dual_clip = out.log_ratio_bound = kInfinity;
  const auto bound = [&](const std::vector<double>& bounds) { return bounds[bounds.size() == 1 ? 0 : position]; };
  switch (terms.kind) {
    case DatumLossKind::cross_entropy:
      out.loss = PolicyLoss::reinforce;
      return out;
    case DatumLossKind::importance_sampling:
      out.ratio_low = 0, out.ratio_high = kInfinity;
      return out;
    case DatumLossKind::cispo:
      out.loss = PolicyLoss::cispo;
      break;
    case DatumLossKind::gspo:
      out.loss = PolicyLoss::gspo;
      break;
    case DatumLossKind::ppo:
    case DatumLossKind::dro:
      break;
  }
  if (terms.kind == DatumLossKind::dro) return out;
  out.ratio_low = bound(terms.ratio_low), out.ratio_high = bound(terms.ratio_high);
  return out;
}

// -(lp A - beta/2 (lp - q)^2).
PolicyTerm dro_term(double beta, const PolicyToken& token) {
  const double moved = token.logprob - token.old_logprob;
  return {-(token.logprob * token.advantage - 0.5 * beta * moved * moved), beta * moved - token.advantage, false};
}

double mean_log_ratio(const DatumTerms& terms, std::span<const double> logprob) {
  double sum = 0, count = 0;
  for (std::size_t i = 0; i < logprob.size(); ++i)
    if (terms.in_mean[i]) sum += logprob[i] - terms.old_logprob[i], count += 1;
  return count > 0 ? sum / count : 0;
}

}  // namespace

DatumLoss::DatumLoss(std::span<const DatumTerms> terms) : terms_(terms), sums_(terms.size()) {
  needs_whole_rollout_ = std::ranges::any_of(terms, [](const DatumTerms& t) { return t.kind == DatumLossKind::gspo; });
}

// The derivative with respect to the log-prob.
double DatumLoss::add(std::int32_t rollout, std::int32_t position, double logprob, double mean) {
  const DatumTerms& terms = terms_[static_cast<std::size_t>(rollout)];
  const auto at = static_cast<std::size_t>(position);
  const double weight = terms.weight[at];
  if (weight == 0 && terms.kind != DatumLossKind::dro) return 0;
  const double old = terms.old_logprob.empty() ? logprob : terms.old_logprob[at];
  const PolicyToken token{logprob, old, weight, mean};
  const PolicyTerm term =
      terms.kind == DatumLossKind::dro ? dro_term(terms.beta, token) : policy_term(settings_of(terms, at), token);
  Sum& sum = sums_[static_cast<std::size_t>(rollout)];
  sum.loss.add(term.value);
  sum.clipped += term.clipped;
  return term.gradient;
}

void DatumLoss::add_edges(std::span<const LossEdge> edges, std::span<const double> logprob, std::span<const double>,
                          std::span<double> grad_logprob, std::span<double> grad_entropy) {
  ESPALIER_INTERNAL(!needs_whole_rollout_, "add_edges where only add_rollout may be used");
  for (std::size_t e = 0; e < edges.size(); ++e) {
    grad_logprob[e] = add(edges[e].rollout, edges[e].position, logprob[e], 0);
    grad_entropy[e] = 0;
  }
}

void DatumLoss::add_rollout(std::int32_t rollout, std::span<const double> logprob, std::span<const double>,
                            std::span<double> grad_logprob, std::span<double> grad_entropy) {
  const DatumTerms& terms = terms_[static_cast<std::size_t>(rollout)];
  const double mean = terms.kind == DatumLossKind::gspo ? mean_log_ratio(terms, logprob) : 0;
  for (std::size_t t = 0; t < logprob.size(); ++t) {
    grad_logprob[t] = add(rollout, static_cast<std::int32_t>(t), logprob[t], mean);
    grad_entropy[t] = 0;
  }
}

}  // namespace espalier
