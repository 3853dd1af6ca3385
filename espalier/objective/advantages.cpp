// Advantages from rewards, over a whole file or one step's records. Equations: docs/objectives.md (1) to (8).
// R reward, V value, m loss mask, gamma and lam discounts; "g" a group: equal `group` where given, else equal prompts.
// Source: verl 0.9, register_adv_est; its defaults for groups of one.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "espalier/rollout/mini_batches.h"

namespace espalier {

namespace {

using Series = std::vector<std::vector<double>>;

constexpr double kWhitenEpsilon = 1e-8;

// Estimators whose advantages are whitened over the whole unit.
bool whitens(Estimator estimator) {
  return estimator == Estimator::reinforce_plus_plus || estimator == Estimator::reinforce_plus_plus_baseline ||
         estimator == Estimator::gae;
}

// Advantages are recorded, or there is no token that could have one.
bool is_settled(const Rollout& rollout) { return !rollout.advantages.empty() || rollout.response_ids.empty(); }

void check_fields(const Rollout& rollout, Estimator estimator) {
  if (is_settled(rollout)) {
    ESPALIER_INTERNAL_EQ(rollout.advantages.size(), rollout.response_ids.size(), rollout.where);
    return;
  }
  if (estimator == Estimator::given)
    throw InputError({rollout.where, "a field advantage, for --adv-estimator given", "none",
                      "add advantage (a number or one per response token), or choose another --adv-estimator"});
  if (!rollout.reward)
    throw InputError({rollout.where, text_of("a field reward or advantage, for --adv-estimator ", name_of(estimator)),
                      "neither", "add reward (a number), or advantage with --adv-estimator given"});
  if (estimator == Estimator::gae && rollout.values.size() != rollout.response_ids.size())
    throw InputError({rollout.where, "a field values with one number per response token, for --adv-estimator gae",
                      rollout.values.empty() ? text_of("none") : text_of(rollout.values.size(), " numbers"),
                      "give --critic DIR, add values (espalier score --critic DIR --values), or choose another "
                      "--adv-estimator"});
}

struct GroupStatistics {
  std::int64_t count = 0;
  double mean = 0, deviation = 1;
};

// Mean and unbiased standard deviation of each group's rewards; (0, 1) for a group of one. Differences are taken from
// the group's first reward, so equal rewards have exactly their own value as mean and 0 as deviation.
std::vector<GroupStatistics> compute_group_statistics(std::span<const Rollout> rollouts,
                                                      std::span<const std::int64_t> group) {
  std::int64_t groups = 0;
  for (std::int64_t g : group) groups = std::max(groups, g + 1);
  std::vector<GroupStatistics> statistics(groups);
  std::vector<double> first(groups), shifted_sum(groups), square_sum(groups);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    if (!rollouts[i].reward) continue;
    const std::int64_t g = group[i];
    if (statistics[g].count++ == 0) first[g] = *rollouts[i].reward;
    shifted_sum[g] += *rollouts[i].reward - first[g];
  }
  for (std::int64_t g = 0; g < groups; ++g)
    if (statistics[g].count > 1)
      statistics[g].mean = first[g] + shifted_sum[g] / static_cast<double>(statistics[g].count);
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    if (!rollouts[i].reward) continue;
    const double difference = *rollouts[i].reward - statistics[group[i]].mean;
    square_sum[group[i]] += difference * difference;
  }
  for (std::int64_t g = 0; g < groups; ++g)
    if (statistics[g].count > 1)
      statistics[g].deviation = std::sqrt(square_sum[g] / static_cast<double>(statistics[g].count - 1));
  return statistics;
}

// Unbiased standard deviation of all rewards; 0 for fewer than two. Differences are taken from the first.
double batch_deviation(std::span<const Rollout> rollouts) {
  double count = 0, first = 0, shifted = 0, squares = 0;
  for (const Rollout& rollout : rollouts)
    if (rollout.reward) {
      if (count == 0) first = *rollout.reward;
      count += 1, shifted += *rollout.reward - first;
    }
  if (count < 2) return 0;
  const double mean = first + shifted / count;
  for (const Rollout& rollout : rollouts)
    if (rollout.reward) squares += (*rollout.reward - mean) * (*rollout.reward - mean);
  return std::sqrt(squares / (count - 1));
}

double outcome_advantage(Estimator estimator, double reward, const GroupStatistics& group, double epsilon) {
  const double centred = reward - group.mean;
  if (estimator == Estimator::grpo) return centred / (group.deviation + epsilon);
  if (estimator == Estimator::rloo && group.count > 1)
    return centred * static_cast<double>(group.count) / static_cast<double>(group.count - 1);
  return centred;
}

// The reward-to-go of each loss token; masked tokens are passed over as if they were not there.
void compute_returns(const Rollout& rollout, double gamma, std::vector<double>& out) {
  double running = *rollout.reward;
  for (std::size_t t = out.size(); t-- > 0;) {
    if (!rollout.loss_mask[t]) continue;
    out[t] = running;
    running *= gamma;
  }
}

// Generalised advantage estimation over the loss tokens, before whitening.
void compute_gae(const Rollout& rollout, double gamma, double lam, std::span<double> out) {
  double next_value = 0, running = 0, reward = *rollout.reward;
  for (std::size_t t = out.size(); t-- > 0;) {
    if (!rollout.loss_mask[t]) continue;
    running = reward + gamma * next_value - rollout.values[t] + gamma * lam * running;
    next_value = rollout.values[t];
    reward = 0;
    out[t] = running;
  }
}

// (x - mean) / sqrt(var + 1e-8) over the loss tokens of the rollouts whose advantages are estimated here. The mean is
// taken from differences to the first number, so equal numbers become exactly 0: the root would make 1e4 of their
// rounding.
void whiten(std::span<const Rollout> rollouts, Series& series) {
  const auto for_each_loss_token = [&](auto&& body) {
    for (std::size_t i = 0; i < rollouts.size(); ++i) {
      if (is_settled(rollouts[i])) continue;
      for (std::size_t t = 0; t < series[i].size(); ++t)
        if (rollouts[i].loss_mask[t]) body(series[i][t]);
    }
  };
  double count = 0, first = 0, shifted_sum = 0, squares = 0;
  for_each_loss_token([&](double x) {
    if (count == 0) first = x;
    count += 1, shifted_sum += x - first;
  });
  if (count == 0) return;
  const double mean = first + shifted_sum / count;
  for_each_loss_token([&](double x) { squares += (x - mean) * (x - mean); });
  const double variance = count > 1 ? squares / (count - 1) : 0.0;
  const double scale = 1.0 / std::sqrt(variance + kWhitenEpsilon);
  for_each_loss_token([&](double& x) { x = (x - mean) * scale; });
}

[[noreturn]] void refuse_target(const Rollout& rollout, const char* missing) {
  throw InputError({rollout.where, "a field returns, or reward and values, for --critic", missing, "add one of them"});
}

}  // namespace

void check_value_targets(std::span<const Rollout> rollouts) {
  for (const Rollout& rollout : rollouts)
    if (!rollout.response_ids.empty() && rollout.returns.empty() && !rollout.reward)
      refuse_target(rollout, "no reward");
}

std::vector<std::vector<double>> compute_value_targets(std::span<const Rollout> rollouts, const Options& options) {
  check_value_targets(rollouts);
  Series targets;
  for (const Rollout& rollout : rollouts) {
    targets.push_back(rollout.returns);
    std::vector<double>& target = targets.back();
    if (!target.empty() || rollout.response_ids.empty()) continue;
    if (rollout.values.empty()) refuse_target(rollout, "no values");
    target.assign(rollout.response_ids.size(), 0.0);
    compute_gae(rollout, options.gamma, options.lam, target);
    for (std::size_t t = 0; t < target.size(); ++t) target[t] += rollout.values[t];
  }
  return targets;
}

std::vector<std::vector<double>> compute_advantages(std::span<const Rollout> rollouts, const Options& options) {
  const Estimator estimator = options.adv_estimator;
  for (const Rollout& rollout : rollouts) check_fields(rollout, estimator);

  const std::vector<std::int64_t> group = group_of(rollouts);
  std::vector<GroupStatistics> statistics = compute_group_statistics(rollouts, group);
  if (options.adv_std == DeviationOf::batch) {
    const double deviation = batch_deviation(rollouts);
    for (GroupStatistics& of : statistics) of.deviation = deviation;
  }
  Series series(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    const Rollout& rollout = rollouts[i];
    if (is_settled(rollout)) {
      series[i] = rollout.advantages;
      continue;
    }
    series[i].assign(rollout.response_ids.size(), 0.0);
    if (estimator == Estimator::reinforce_plus_plus) {
      compute_returns(rollout, options.gamma, series[i]);
    } else if (estimator == Estimator::gae) {
      compute_gae(rollout, options.gamma, options.lam, series[i]);
    } else {
      const double advantage = outcome_advantage(estimator, *rollout.reward, statistics[group[i]], options.adv_epsilon);
      for (std::size_t t = 0; t < series[i].size(); ++t)
        if (rollout.loss_mask[t]) series[i][t] = advantage;
    }
  }
  if (whitens(estimator)) whiten(rollouts, series);
  return series;
}

}  // namespace espalier
