// The objective of a mini-batch, token by token. Equations: docs/objectives.md, (19) is the whole loss.
#include "espalier/objective/objective.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "espalier/base/error.h"
#include "espalier/objective/compensated_sum.h"
#include "espalier/objective/denominator.h"
#include "espalier/objective/kl.h"
#include "espalier/objective/policy_loss.h"
#include "espalier/objective/rollout_weights.h"
#include "espalier/program/step_kind.h"

namespace espalier {

namespace {

// What of the rollout's own log-probs enters a token's loss as a constant.
struct RolloutConstants {
  double mean_log_ratio = 0;   // of lp - old
  double sum_log_ratio = 0;    // of lp - old and the log of the token's weight, each clamped (vespo)
  double sequence_weight = 1;  // --rollout-is sequence
  double mean_kl = 0;          // of k3_unbiased, beside its ratio
  double mean_gradient = 0;    // of the policy loss, where the rollout's tokens share one ratio
  bool off_policy = false;     // --off-policy-threshold
};

void require_series(const Rollout& rollout, const std::vector<double>& series, const char* field,
                    const std::string& option, const char* remedy) {
  if (rollout.response_ids.empty()) return;
  if (series.empty()) throw InputError({rollout.where, text_of("a field ", field, ", for ", option), "none", remedy});
  ESPALIER_INTERNAL_EQ(series.size(), rollout.response_ids.size(), rollout.where, " ", field);
}

}  // namespace

struct Objective::State {
  std::span<const Rollout> rollouts;
  std::span<const std::vector<double>> advantages;
  PolicySettings policy;
  KlType kl_type;
  RolloutWeights correction;
  double off_policy_threshold = 0, kl_coefficient = 0, entropy_coefficient = 0;
  std::vector<double> token_weight;     // [rollouts], of policy loss and KL
  std::vector<double> entropy_weight;   // [rollouts]
  std::vector<double> sequence_weight;  // [rollouts], where old log-probs are recorded and --rollout-is is sequence
  bool needs_whole_rollout = false;
  MiniBatchTotals totals;

  CompensatedSum policy_sum, kl_sum, entropy_sum;
  std::int64_t loss_tokens = 0, clipped_tokens = 0;

  void check_fields(const Options& options) const;
  void prepare_sequence_weights();
  RolloutConstants constants_of(std::int32_t rollout, std::span<const double> logprob) const;
  double token_factor(const Rollout& rollout, std::int32_t position, double old, double sequence_weight) const;
  double weight_of(const Rollout& rollout, std::int32_t position, double old, double advantage,
                   const RolloutConstants& constants) const;
  double mean_gradient_of(std::int32_t rollout, std::span<const double> logprob,
                          const RolloutConstants& constants) const;
  KlTerm kl_part(double logprob, double ref, const Ratio& ratio, double mean_kl) const;
  TokenGradient add(std::int32_t rollout, std::int32_t position, double logprob, double entropy,
                    const RolloutConstants& constants);
};

void Objective::State::check_fields(const Options& options) const {
  ESPALIER_INTERNAL_EQ(rollouts.size(), advantages.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    ESPALIER_INTERNAL_EQ(advantages[i].size(), rollout.response_ids.size(), rollout.where);
    ESPALIER_INTERNAL_EQ(rollout.loss_mask.size(), rollout.response_ids.size(), rollout.where);
    if (kl_coefficient != 0)
      require_series(rollout, rollout.ref_logprobs, "ref_logprobs", text_of("--kl-loss-coef ", options.kl_loss_coef),
                     "add it (espalier score --as ref_logprobs), or set --kl-loss-coef 0");
    if (correction.level != RolloutCorrection::none)
      require_series(rollout, rollout.rollout_logprobs, "rollout_logprobs",
                     text_of("--rollout-is ", options.rollout_is),
                     "record the sampler's log-probs, or set --rollout-is none");
    if (!rollout.old_logprobs.empty()) ESPALIER_INTERNAL_EQ(rollout.old_logprobs.size(), rollout.response_ids.size());
  }
}

void Objective::State::prepare_sequence_weights() {
  sequence_weight.assign(rollouts.size(), 1.0);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    if (rollout.old_logprobs.empty()) continue;  // the weight then holds the current log-probs
    double log_ratio = 0;
    for (std::size_t t = 0; t < rollout.old_logprobs.size(); ++t)
      if (rollout.loss_mask[t]) log_ratio += rollout.old_logprobs[t] - rollout.rollout_logprobs[t];
    sequence_weight[i] = correction.weight(log_ratio);
  }
}

RolloutConstants Objective::State::constants_of(std::int32_t index, std::span<const double> logprob) const {
  constexpr double kLogBound = 20;
  const Rollout& rollout = rollouts[index];
  const bool has_old = !rollout.old_logprobs.empty(), has_sampled = !rollout.rollout_logprobs.empty();
  RolloutConstants constants;
  double tokens = 0, log_ratio = 0, mismatch = 0, fallen = 0, kl = 0;
  for (std::size_t t = 0; t < logprob.size(); ++t) {
    if (!rollout.loss_mask[t]) continue;
    const double old = has_old ? rollout.old_logprobs[t] : logprob[t];
    const double sampled = has_sampled ? rollout.rollout_logprobs[t] : old;
    tokens += 1;
    log_ratio += logprob[t] - old;
    mismatch += old - sampled;
    fallen += sampled - logprob[t];
    constants.sum_log_ratio += std::clamp(logprob[t] - old, -kLogBound, kLogBound);
    if (correction.level == RolloutCorrection::token)
      constants.sum_log_ratio += std::clamp(std::log(correction.weight(old - sampled)), std::log(1e-8), kLogBound);
    if (kl_type.estimator == KlEstimator::k3_unbiased && kl_coefficient != 0)
      kl += kl_term(kl_type, logprob[t], rollout.ref_logprobs[t]).value;
  }
  if (tokens == 0) return constants;
  constants.mean_log_ratio = log_ratio / tokens;
  constants.mean_kl = kl / tokens;
  constants.off_policy = fallen / tokens > off_policy_threshold;
  if (correction.level == RolloutCorrection::sequence)
    constants.sequence_weight = has_old ? sequence_weight[index] : correction.weight(mismatch);
  if (policy.shares_ratio()) constants.mean_gradient = mean_gradient_of(index, logprob, constants);
  return constants;
}

// d / d lp_t of sum_u w_u f_u(s) with one ratio s = exp(mean of lp - old): the mean of w_u f_u'(s) s, for every token.
double Objective::State::mean_gradient_of(std::int32_t index, std::span<const double> logprob,
                                          const RolloutConstants& constants) const {
  const Rollout& rollout = rollouts[index];
  double sum = 0, tokens = 0;
  for (std::int32_t t = 0; t < rollout.response_length(); ++t) {
    if (!rollout.loss_mask[t]) continue;
    const double old = rollout.old_logprobs.empty() ? logprob[t] : rollout.old_logprobs[t];
    const double advantage = advantages[index][t];
    const PolicyToken token{logprob[t], old, advantage, constants.mean_log_ratio, constants.sum_log_ratio};
    sum += weight_of(rollout, t, old, advantage, constants) * policy_term(policy, token).gradient;
    tokens += 1;
  }
  return sum / tokens;
}

double Objective::State::token_factor(const Rollout& rollout, std::int32_t position, double old,
                                      double sequence) const {
  if (policy.loss == PolicyLoss::vespo) return 1.0;  // its own weight holds the correction
  switch (correction.level) {
    case RolloutCorrection::token:
      return correction.weight(old - rollout.rollout_logprobs[position]);
    case RolloutCorrection::sequence:
      return sequence;
    case RolloutCorrection::none:
      break;
  }
  return 1.0;
}

// What a token's policy loss is multiplied by.
double Objective::State::weight_of(const Rollout& rollout, std::int32_t position, double old, double advantage,
                                   const RolloutConstants& constants) const {
  if (constants.off_policy && advantage < 0) return 0;
  return token_factor(rollout, position, old, constants.sequence_weight);
}

KlTerm Objective::State::kl_part(double logprob, double ref, const Ratio& ratio, double mean_kl) const {
  const KlTerm kl = kl_term(kl_type, logprob, ref);
  if (kl_type.estimator != KlEstimator::k3_unbiased) return kl;
  // d (r k) / d lp: a token's own ratio meets its own k, a rollout's meets the mean of all.
  return {ratio.value * kl.value,
          ratio.value * kl.gradient + ratio.gradient * (policy.by_sequence() ? mean_kl : kl.value)};
}

TokenGradient Objective::State::add(std::int32_t index, std::int32_t position, double logprob, double entropy,
                                    const RolloutConstants& constants) {
  const Rollout& rollout = rollouts[index];
  if (!rollout.loss_mask[position]) return {};
  const double old = rollout.old_logprobs.empty() ? logprob : rollout.old_logprobs[position];
  const double advantage = advantages[index][position];
  const PolicyToken token{logprob, old, advantage, constants.mean_log_ratio, constants.sum_log_ratio};
  const PolicyTerm policy_part = policy_term(policy, token);
  const double factor = weight_of(rollout, position, old, advantage, constants);
  const double weight = token_weight[index];

  TokenGradient gradient;
  policy_sum.add(weight * factor * policy_part.value);
  gradient.logprob = weight * (policy.shares_ratio() ? constants.mean_gradient : factor * policy_part.gradient);
  if (kl_coefficient != 0) {
    const KlTerm kl = kl_part(logprob, rollout.ref_logprobs[position], ratio_of(policy, token), constants.mean_kl);
    kl_sum.add(weight * kl.value);
    gradient.logprob += kl_coefficient * weight * kl.gradient;
  }
  entropy_sum.add(entropy_weight[index] * entropy);
  if (entropy_coefficient != 0) gradient.entropy = -entropy_coefficient * entropy_weight[index];
  loss_tokens += 1;
  clipped_tokens += policy_part.clipped;
  return gradient;
}

Objective::Objective(std::span<const Rollout> rollouts, std::span<const std::vector<double>> advantages,
                     const Options& options)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.rollouts = rollouts;
  state.advantages = advantages;
  state.policy = PolicySettings::from(options);
  state.kl_type = kl_type_of(options.kl_loss_type);
  state.correction = RolloutWeights::from(options);
  state.off_policy_threshold = options.off_policy_threshold;
  state.kl_coefficient = options.kl_loss_coef;
  state.entropy_coefficient = options.entropy_coeff;
  state.totals = MiniBatchTotals::of(rollouts);
  AggregationDivisors divisors = AggregationDivisors::from(options, rollouts, policy_aggregation(options));
  state.token_weight = compute_token_weights(rollouts, state.totals, policy_aggregation(options), divisors);
  divisors.loss_tokens = divisors.items_scale = 0;  // those of the policy loss alone
  state.entropy_weight = options.entropy_agg_mode == Aggregation::of_the_loss
                             ? state.token_weight
                             : compute_token_weights(rollouts, state.totals, options.entropy_agg_mode, divisors);
  state.check_fields(options);
  state.needs_whole_rollout = espalier::needs_whole_rollout(options, rollouts);
  if (state.correction.level == RolloutCorrection::sequence) state.prepare_sequence_weights();
}

Objective::~Objective() = default;

bool Objective::needs_whole_rollout() const { return state_->needs_whole_rollout; }
TokenGradient Objective::add_token(std::int32_t rollout, std::int32_t position, double logprob, double entropy) {
  ESPALIER_INTERNAL(!state_->needs_whole_rollout, "add_token where only add_rollout may be used");
  RolloutConstants constants;
  if (state_->correction.level == RolloutCorrection::sequence)
    constants.sequence_weight = state_->sequence_weight[rollout];
  return state_->add(rollout, position, logprob, entropy, constants);
}

void Objective::add_edges(std::span<const LossEdge> edges, std::span<const double> logprob,
                          std::span<const double> entropy, std::span<double> grad_logprob,
                          std::span<double> grad_entropy) {
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const TokenGradient token = add_token(edges[e].rollout, edges[e].position, logprob[e], entropy[e]);
    grad_logprob[e] = token.logprob;
    grad_entropy[e] = token.entropy;
  }
}

void Objective::add_rollout(std::int32_t rollout, std::span<const double> logprob, std::span<const double> entropy,
                            std::span<double> grad_logprob, std::span<double> grad_entropy) {
  const std::size_t tokens = state_->rollouts[rollout].response_ids.size();
  ESPALIER_INTERNAL(logprob.size() == tokens && entropy.size() == tokens && grad_logprob.size() == tokens &&
                        grad_entropy.size() == tokens,
                    "series of ", logprob.size(), ", ", entropy.size(), ", ", grad_logprob.size(), ", ",
                    grad_entropy.size(), " for ", tokens, " response tokens");
  const RolloutConstants constants = state_->constants_of(rollout, logprob);
  for (std::size_t t = 0; t < tokens; ++t) {
    const TokenGradient gradient =
        state_->add(rollout, static_cast<std::int32_t>(t), logprob[t], entropy[t], constants);
    grad_logprob[t] = gradient.logprob;
    grad_entropy[t] = gradient.entropy;
  }
}

LossParts Objective::parts() const {
  const State& state = *state_;
  LossParts parts;
  parts.pg_loss = state.policy_sum.value();
  parts.kl_loss = state.kl_sum.value();
  parts.entropy = state.entropy_sum.value();
  parts.loss = parts.pg_loss - state.entropy_coefficient * parts.entropy + state.kl_coefficient * parts.kl_loss;
  parts.loss_tokens = state.loss_tokens;
  if (state.totals.loss_tokens > 0)
    parts.clip_fraction = static_cast<double>(state.clipped_tokens) / static_cast<double>(state.totals.loss_tokens);
  return parts;
}

}  // namespace espalier
