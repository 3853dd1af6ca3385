#include "espalier/objective/pair_loss.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "espalier/base/error.h"

namespace espalier {
namespace {

double log_sigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }
double sigmoid(double x) { return std::exp(log_sigmoid(x)); }

struct Curve {
  double value, slope;  // l, dl/dd
};

Curve curve_of(const Options& options, double d) {
  const double beta = options.dpo_beta, e = options.label_smoothing, x = beta * d;
  const Curve right{-log_sigmoid(x), -beta * sigmoid(-x)}, wrong{-log_sigmoid(-x), beta * sigmoid(x)};
  switch (options.dpo_loss) {
    case DpoLoss::sigmoid:
      return {(1 - e) * right.value + e * wrong.value, (1 - e) * right.slope + e * wrong.slope};
    case DpoLoss::robust:
      return {((1 - e) * right.value - e * wrong.value) / (1 - 2 * e),
              ((1 - e) * right.slope - e * wrong.slope) / (1 - 2 * e)};
    case DpoLoss::hinge:
      return {std::max(0.0, 1 - x), x < 1 ? -beta : 0.0};
    case DpoLoss::ipo:
      return {std::pow(d - 1 / (2 * beta), 2), 2 * (d - 1 / (2 * beta))};
  }
  return {};
}

struct Pair {
  std::ptrdiff_t chosen = -1, rejected = -1;  // places in the mini-batch
};

std::vector<Pair> pairs_of(std::span<const Rollout> rollouts) {
  std::map<std::int64_t, Pair> found;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const PairPlace& place = rollouts[i].pair;
    if (place.pair < 0)
      throw InputError({rollouts[i].where, "a pair of answers (chosen_ids and rejected_ids) with --objective dpo",
                        "a record of one response", "give pairs, or leave --objective out"});
    (place.chosen ? found[place.pair].chosen : found[place.pair].rejected) = static_cast<std::ptrdiff_t>(i);
  }
  std::vector<Pair> out;
  for (const auto& [number, pair] : found) {
    ESPALIER_INTERNAL(pair.chosen >= 0 && pair.rejected >= 0, "half of pair ", number, " is in another mini-batch");
    out.push_back(pair);
  }
  return out;
}

double tokens_of_answer(const Rollout& rollout) {
  return static_cast<double>(std::ranges::count(rollout.loss_mask, std::uint8_t{1}));
}

}  // namespace

PairTerm pair_term(const Options& options, const OfAnswers& policy, const OfAnswers& reference,
                   const OfAnswers& tokens) {
  const bool means = options.dpo_loss == DpoLoss::ipo;
  const double chosen_by = means ? std::max(tokens.chosen, 1.0) : 1,
               rejected_by = means ? std::max(tokens.rejected, 1.0) : 1;
  const double d =
      (policy.chosen - reference.chosen) / chosen_by - (policy.rejected - reference.rejected) / rejected_by;
  const Curve curve = curve_of(options, d);
  return {curve.value, {curve.slope / chosen_by, -curve.slope / rejected_by}};
}

double sum_of_answer(const Rollout& rollout, std::span<const double> logprobs) {
  double sum = 0;
  for (std::size_t t = 0; t < logprobs.size(); ++t)
    if (rollout.loss_mask[t] != 0) sum += logprobs[t];
  return sum;
}

LinearPairs linear_pairs(std::span<const Rollout> rollouts, std::span<const std::vector<double>> logprobs,
                         std::span<const double> reference, const Options& options) {
  const std::vector<Pair> pairs = pairs_of(rollouts);
  const double share = 1 / static_cast<double>(pairs.size());
  LinearPairs out;
  out.advantages.resize(rollouts.size());
  for (const Pair& pair : pairs) {
    const auto c = static_cast<std::size_t>(pair.chosen), r = static_cast<std::size_t>(pair.rejected);
    const OfAnswers policy{sum_of_answer(rollouts[c], logprobs[c]), sum_of_answer(rollouts[r], logprobs[r])};
    const OfAnswers its = options.reference_free ? OfAnswers{} : OfAnswers{reference[c], reference[r]};
    const PairTerm term =
        pair_term(options, policy, its, {tokens_of_answer(rollouts[c]), tokens_of_answer(rollouts[r])});
    out.advantages[c].assign(rollouts[c].response_ids.size(), -share * term.gradient.chosen);
    out.advantages[r].assign(rollouts[r].response_ids.size(), -share * term.gradient.rejected);
    const OfAnswers reward{options.dpo_beta * (policy.chosen - its.chosen),
                           options.dpo_beta * (policy.rejected - its.rejected)};
    out.means.loss += share * term.loss;
    out.means.reward.chosen += share * reward.chosen;
    out.means.reward.rejected += share * reward.rejected;
    out.means.margin += share * (reward.chosen - reward.rejected);
    out.means.accuracy += reward.chosen > reward.rejected ? share : 0;
    out.means.logprob.chosen += share * policy.chosen;
    out.means.logprob.rejected += share * policy.rejected;
  }
  return out;
}

}  // namespace espalier
