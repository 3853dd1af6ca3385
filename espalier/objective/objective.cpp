// The objective of a mini-batch, token by token. Equations: docs/objectives.md, (19) is the whole loss.
#include "espalier/objective/objective.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "espalier/base/error.h"
#include "espalier/objective/compensated_sum.h"
#include "espalier/objective/denominator.h"
#include "espalier/objective/kl.h"
#include "espalier/objective/loss_sequences.h"
#include "espalier/objective/policy_loss.h"
#include "espalier/objective/rollout_weights.h"
#include "espalier/objective/token_rules.h"
#include "espalier/program/step_kind.h"
#include "espalier/rollout/record_data.h"

namespace espalier {

namespace {

// Calls visit(rollout, position, log-prob, share) for the loss tokens of `members`.
template <class LogprobOf, class Visit>
void for_each_loss_token(std::span<const Rollout> rollouts, std::span<const std::int32_t> members, LogprobOf logprob_of,
                         Visit visit) {
  for (const std::int32_t index : members) {
    const Rollout& rollout = rollouts[static_cast<std::size_t>(index)];
    const std::span<const double> logprob = logprob_of(index);
    for (std::size_t t = 0; t < logprob.size(); ++t)
      if (rollout.loss_mask[t]) visit(index, t, logprob[t], rollout.loss_share(t));
  }
}

}  // namespace

struct Objective::State {
  explicit State(const Options& options) : rules(options) {}

  std::span<const Rollout> rollouts;
  std::span<const std::vector<double>> advantages;
  PolicySettings policy;
  KlType kl_type;
  RolloutWeights correction;
  TokenRules rules;
  double off_policy_threshold = 0, kl_coefficient = 0, entropy_coefficient = 0;
  LossSequences sequences;
  std::vector<double> token_weight;      // [rollouts], of policy loss and KL
  std::vector<double> entropy_weight;    // [rollouts]
  std::vector<double> sampler_weight;    // [sequences], where it depends on recorded log-probs alone
  std::vector<SequenceConstants> known;  // [sequences], after settle_sequences
  bool needs_whole_rollout = false, needs_sequences = false;
  std::int64_t all_loss_tokens = 0;

  CompensatedSum policy_sum, kl_sum, entropy_sum;
  std::array<CompensatedSum, kTokenRules> rule_sums;
  std::int64_t loss_tokens = 0, clipped_tokens = 0;

  void check_fields(const Options& options) const;
  void prepare_sampler_weights();

  const Rollout& at(std::int32_t rollout) const { return rollouts[static_cast<std::size_t>(rollout)]; }
  double old_of(std::int32_t rollout, std::size_t position, double logprob) const {
    return at(rollout).old_logprobs.empty() ? logprob : at(rollout).old_logprobs[position];
  }
  // The sampler's log-prob; `absent` where it was not recorded.
  double sampled_of(std::int32_t rollout, std::size_t position, double absent) const {
    return at(rollout).sampled_logprob(position, absent);
  }
  double sampler_weight_of(double log_ratio_sum, double tokens) const;
  // The token's part after all rules; `reports` may be null.
  TokenPart part_of(std::int32_t rollout, std::size_t position, double logprob, const SequenceConstants& constants,
                    TokenRules::Reports* reports = nullptr) const;
  // The constants of a sequence, or of a part of it; logprob_of(rollout) is its log-probs.
  template <class LogprobOf>
  SequenceConstants constants_of(std::span<const std::int32_t> members, LogprobOf logprob_of) const;
  template <class LogprobOf>
  void add_mean_gradients(std::span<const std::int32_t> members, LogprobOf logprob_of, double tokens,
                          SequenceConstants& constants) const;
  TokenGradient add(std::int32_t rollout, std::int32_t position, double logprob, double entropy,
                    const SequenceConstants& constants);
};

void Objective::State::check_fields(const Options& options) const {
  ESPALIER_INTERNAL_EQ(rollouts.size(), advantages.size());
  require_series(rollouts, options);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    ESPALIER_INTERNAL_EQ(advantages[i].size(), rollout.response_ids.size(), rollout.where);
    ESPALIER_INTERNAL_EQ(rollout.loss_mask.size(), rollout.response_ids.size(), rollout.where);
    for (const SeriesRow& series : series_rows())
      if (const auto& values = rollout.*series.values; !values.empty())
        ESPALIER_INTERNAL_EQ(values.size(), rollout.response_ids.size(), rollout.where, " ", series.name);
  }
}

double Objective::State::sampler_weight_of(double log_ratio_sum, double tokens) const {
  if (correction.level == RolloutCorrection::sequence) return correction.weight(log_ratio_sum);
  return tokens == 0 || correction.keeps(log_ratio_sum / tokens) ? 1 : 0;
}

// Weights of sequences whose old log-probs are all recorded; the others follow from the current log-probs. Tokens
// that --rollout-rs rejected still belong to their sequence here, as in verl.
void Objective::State::prepare_sampler_weights() {
  sampler_weight.assign(sequences.rollouts.size(), 1.0);
  for (std::size_t s = 0; s < sequences.rollouts.size(); ++s) {
    double log_ratio = 0, tokens = 0;
    for (const std::int32_t index : sequences.rollouts[s]) {
      const Rollout& rollout = at(index);
      for (std::size_t t = 0; t < rollout.old_logprobs.size(); ++t) {
        const double share = rollout.silence_of(t) == Silenced::rejected ? 1 : rollout.loss_share(t);
        if (share == 0) continue;
        log_ratio += share * (rollout.old_logprobs[t] - sampled_of(index, t, rollout.old_logprobs[t]));
        tokens += share;
      }
    }
    sampler_weight[s] = sampler_weight_of(log_ratio, tokens);
  }
}

TokenPart Objective::State::part_of(std::int32_t rollout, std::size_t position, double logprob,
                                    const SequenceConstants& constants, TokenRules::Reports* reports) const {
  const double other =
      policy.compares_sampler() ? sampled_of(rollout, position, logprob) : old_of(rollout, position, logprob);
  TokenPart part{{logprob, other, advantages[static_cast<std::size_t>(rollout)][position], constants.mean_log_ratio,
                  constants.sum_log_ratio, &at(rollout), position}};
  rules.apply(constants, part, reports);
  return part;
}

template <class LogprobOf>
SequenceConstants Objective::State::constants_of(std::span<const std::int32_t> members, LogprobOf logprob_of) const {
  constexpr double kLogBound = 20;
  SequenceConstants constants;
  double tokens = 0, log_ratio = 0, mismatch = 0, fallen = 0;
  bool all_have_old = true;
  for (const std::int32_t index : members)
    all_have_old &= !at(index).old_logprobs.empty() || at(index).response_ids.empty();
  for_each_loss_token(rollouts, members, logprob_of, [&](std::int32_t i, std::size_t t, double logprob, double share) {
    const double old = old_of(i, t, logprob), sampled = sampled_of(i, t, old);
    tokens += share;
    log_ratio += share * (logprob - old);
    mismatch += share * (old - sampled);
    fallen += share * (sampled - logprob);
    constants.sum_log_ratio += share * std::clamp(logprob - old, -kLogBound, kLogBound);
    if (correction.level == RolloutCorrection::token)
      constants.sum_log_ratio +=
          share * std::clamp(std::log(correction.weight(old - sampled)), std::log(1e-8), kLogBound);
  });
  if (tokens == 0) return constants;
  constants.mean_log_ratio = log_ratio / tokens;
  constants.off_policy = fallen / tokens > off_policy_threshold;
  if (correction.by_sequence())
    constants.sampler_weight =
        all_have_old ? sampler_weight[static_cast<std::size_t>(sequences.of[static_cast<std::size_t>(members[0])])]
                     : sampler_weight_of(mismatch, tokens);
  add_mean_gradients(members, logprob_of, tokens, constants);
  return constants;
}

// d / d lp_t of sum_u w_u f_u(s) with one ratio s = exp(mean of lp - old): the mean of w_u f_u'(s) s, for every token.
// w_u: the token's weight in the mini-batch's loss, its share and its importance weight.
template <class LogprobOf>
void Objective::State::add_mean_gradients(std::span<const std::int32_t> members, LogprobOf logprob_of, double tokens,
                                          SequenceConstants& constants) const {
  const bool by_kl = kl_type.estimator == KlEstimator::k3_unbiased && kl_coefficient != 0 && policy.by_sequence();
  if (!by_kl && !policy.shares_ratio()) return;
  double ratio_sum = 0, kl_sum_of = 0;
  for_each_loss_token(rollouts, members, logprob_of, [&](std::int32_t i, std::size_t t, double logprob, double share) {
    const double weight = token_weight[static_cast<std::size_t>(i)] * share;
    if (by_kl) kl_sum_of += weight * kl_term(kl_type, logprob, at(i).ref_logprobs[t]).value;
    if (!policy.shares_ratio()) return;
    const TokenPart part = part_of(i, t, logprob, constants);
    ratio_sum += weight * part.factor * policy_term(policy, part.token).gradient;
  });
  constants.kl_gradient = kl_sum_of / tokens;
  constants.ratio_gradient = ratio_sum / tokens;
}

TokenGradient Objective::State::add(std::int32_t index, std::int32_t position, double logprob, double entropy,
                                    const SequenceConstants& constants) {
  const auto i = static_cast<std::size_t>(index), t = static_cast<std::size_t>(position);
  const Rollout& rollout = rollouts[i];
  if (!rollout.loss_mask[t]) return {};
  const double share = rollout.loss_share(t), weight = token_weight[i] * share;
  TokenRules::Reports reports{};
  const TokenPart part = part_of(index, t, logprob, constants, &reports);
  const PolicyTerm term = policy_term(policy, part.token);

  TokenGradient gradient;
  policy_sum.add(weight * part.factor * term.value);
  gradient.logprob = policy.shares_ratio() ? share * constants.ratio_gradient : weight * part.factor * term.gradient;
  for (std::size_t rule = 0; rule < kTokenRules; ++rule) rule_sums[rule].add(reports[rule]);
  if (kl_coefficient != 0) {
    KlTerm kl = kl_term(kl_type, logprob, rollout.ref_logprobs[t]);
    kl = {weight * kl.value, weight * kl.gradient};
    if (kl_type.estimator == KlEstimator::k3_unbiased) {
      // d (r k) / d lp: a token's own ratio meets its own k, a sequence's meets the mean of all.
      const Ratio ratio = ratio_of(policy, part.token);
      const double met = policy.by_sequence() ? share * constants.kl_gradient : kl.value;
      kl = {ratio.value * kl.value, ratio.value * kl.gradient + ratio.gradient * met};
    }
    kl_sum.add(kl.value);
    gradient.logprob += kl_coefficient * kl.gradient;
  }
  entropy_sum.add(entropy_weight[i] * share * entropy);
  if (entropy_coefficient != 0) gradient.entropy = -entropy_coefficient * entropy_weight[i] * share;
  loss_tokens += 1;
  clipped_tokens += term.clipped;
  return gradient;
}

Objective::Objective(std::span<const Rollout> rollouts, std::span<const std::vector<double>> advantages,
                     const Options& options)
    : state_(std::make_unique<State>(options)) {
  State& state = *state_;
  state.rollouts = rollouts;
  state.advantages = advantages;
  state.policy = PolicySettings::from(options);
  state.kl_type = kl_type_of(options.kl_loss_type);
  state.correction = RolloutWeights::from(options);
  state.off_policy_threshold = options.off_policy_threshold;
  state.kl_coefficient = options.kl_loss_coef;
  state.entropy_coefficient = options.entropy_coeff;
  state.sequences = LossSequences::from(options, rollouts);
  state.all_loss_tokens = count_loss_tokens(rollouts);
  AggregationDivisors divisors = AggregationDivisors::from(options, rollouts, policy_aggregation(options));
  state.token_weight = compute_token_weights(rollouts, state.sequences, policy_aggregation(options), divisors);
  divisors.loss_tokens = divisors.items_scale = 0;  // the policy loss alone has them
  state.entropy_weight = options.entropy_agg_mode == Aggregation::of_the_loss
                             ? state.token_weight
                             : compute_token_weights(rollouts, state.sequences, options.entropy_agg_mode, divisors);
  state.check_fields(options);
  state.needs_sequences = espalier::needs_sequence_pass(options, rollouts);
  state.needs_whole_rollout = !state.needs_sequences && espalier::needs_whole_rollout(options, rollouts);
  if (state.correction.by_sequence()) state.prepare_sampler_weights();
}

Objective::~Objective() = default;

bool Objective::needs_whole_rollout() const { return state_->needs_whole_rollout; }
bool Objective::needs_sequences() const { return state_->needs_sequences; }

void Objective::settle_sequences(std::span<const std::vector<double>> logprobs) {
  State& state = *state_;
  ESPALIER_INTERNAL_EQ(logprobs.size(), state.rollouts.size());
  const auto logprob_of = [&](std::int32_t rollout) {
    return std::span<const double>(logprobs[static_cast<std::size_t>(rollout)]);
  };
  state.known.clear();
  for (const auto& members : state.sequences.rollouts) state.known.push_back(state.constants_of(members, logprob_of));
}

TokenGradient Objective::add_token(std::int32_t rollout, std::int32_t position, double logprob, double entropy) {
  ESPALIER_INTERNAL(!state_->needs_whole_rollout, "add_token where only add_rollout may be used");
  ESPALIER_INTERNAL(!state_->needs_sequences || !state_->known.empty(), "add_token before settle_sequences");
  const auto sequence = static_cast<std::size_t>(state_->sequences.of[static_cast<std::size_t>(rollout)]);
  if (!state_->known.empty()) return state_->add(rollout, position, logprob, entropy, state_->known[sequence]);
  SequenceConstants constants;
  if (state_->correction.by_sequence()) constants.sampler_weight = state_->sampler_weight[sequence];
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
  const std::int32_t alone[] = {rollout};
  const SequenceConstants constants = state_->needs_whole_rollout
                                          ? state_->constants_of(alone, [&](std::int32_t) { return logprob; })
                                          : SequenceConstants{};
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto position = static_cast<std::int32_t>(t);
    const TokenGradient gradient = state_->needs_whole_rollout
                                       ? state_->add(rollout, position, logprob[t], entropy[t], constants)
                                       : add_token(rollout, position, logprob[t], entropy[t]);
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
  for (std::size_t rule = 0; rule < kTokenRules; ++rule) parts.rules[rule].holds = state.rules.holds(rule);
  if (state.all_loss_tokens == 0) return parts;
  const auto tokens = static_cast<double>(state.all_loss_tokens);
  parts.clip_fraction = static_cast<double>(state.clipped_tokens) / tokens;
  for (std::size_t rule = 0; rule < kTokenRules; ++rule)
    parts.rules[rule].mean = state.rule_sums[rule].value() / tokens;
  return parts;
}

}  // namespace espalier
