// Advantages from rewards, over a whole file or one step's records. Equations: docs/objectives.md (1) to (8).
// R reward, V value, m loss mask, gamma and lam discounts; "g" a group: equal `group` where given, else equal prompts.
// Statistics count trajectories, returns run through the turns of one; a rollout without `trajectory` is one by itself.
// Source: verl 0.9, register_adv_est; its defaults for groups of one.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>

#include "espalier/base/error.h"
#include "espalier/objective/objective.h"
#include "espalier/objective/value_loss.h"
#include "espalier/options/token_rules.h"
#include "espalier/rollout/mini_batches.h"
#include "espalier/rollout/trajectories.h"

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

// The rollouts of a unit, apart from their tokens. Rewards and groups: one per trajectory.
struct Unit {
  // `judged`: tokens get advantages elsewhere (rules_give_advantages), so that rollouts without a reward need none.
  explicit Unit(std::span<const Rollout> all, bool judged = false)
      : rollouts(all), trajectories(trajectories_of(all)), rewards(rewards_of(all, trajectories)) {
    const std::vector<std::int64_t> of = group_of(all);
    for (const auto& turns : trajectories.turns) group.push_back(of[static_cast<std::size_t>(turns.front())]);
    const bool some = judged || std::ranges::any_of(rewards, [](const auto& reward) { return reward.has_value(); });
    for (std::size_t i = 0; i < rollouts.size(); ++i)
      estimates.push_back(!is_settled(rollouts[i]) && (reward_of(i) || !some));
  }

  const Rollout& at(std::int64_t index) const { return rollouts[static_cast<std::size_t>(index)]; }
  const std::optional<double>& reward_of(std::size_t rollout) const {
    return rewards[static_cast<std::size_t>(trajectories.of[rollout])];
  }
  std::int64_t group_of_rollout(std::size_t rollout) const {
    return group[static_cast<std::size_t>(trajectories.of[rollout])];
  }

  std::span<const Rollout> rollouts;
  Trajectories trajectories;
  std::vector<std::optional<double>> rewards;
  std::vector<std::int64_t> group;
  // One per rollout: its advantages are estimated. Otherwise they are recorded, or 0 because nobody judged it while
  // others were judged (TRL: unscorable completions), or while a rule gives its tokens advantages.
  std::vector<std::uint8_t> estimates;
};

// Estimators of returns go from turn to turn; behind a fork there are several next turns.
void refuse_branches(const Unit& unit, const std::vector<std::int64_t>& turns, const char* option) {
  if (branches_of(unit.rollouts, turns).size() == 1) return;
  throw UnsupportedError(
      {unit.at(turns.front()).where, text_of("trajectories without branches, for ", option),
       text_of("trajectory ", unit.at(turns.front()).trajectory, ", whose records name branches"),
       text_of("record advantage or returns, or choose another --adv-estimator: ", name_of(Estimator::grpo), ", ",
               name_of(Estimator::dr_grpo), ", ", name_of(Estimator::rloo), " and ",
               name_of(Estimator::reinforce_plus_plus_baseline), " count a trajectory once")});
}

void require_values(const Rollout& rollout) {
  if (rollout.values.size() != rollout.response_ids.size())
    throw InputError({rollout.where, "a field values with one number per response token, for --adv-estimator gae",
                      rollout.values.empty() ? text_of("none") : text_of(rollout.values.size(), " numbers"),
                      "give --critic DIR, add values (espalier score --critic DIR --values), or choose another "
                      "--adv-estimator"});
}

void check_fields(const Unit& unit, Estimator estimator) {
  for (const auto& turns : unit.trajectories.turns) {
    const std::optional<double>& reward = unit.reward_of(static_cast<std::size_t>(turns.front()));
    bool estimates = false;
    for (const std::int64_t index : turns) {
      const Rollout& rollout = unit.at(index);
      if (is_settled(rollout)) {
        ESPALIER_INTERNAL_EQ(rollout.advantages.size(), rollout.response_ids.size(), rollout.where);
        continue;
      }
      if (!unit.estimates[static_cast<std::size_t>(index)] && estimator != Estimator::given &&
          estimator != Estimator::gae)
        continue;
      estimates = true;
      if (estimator == Estimator::given)
        throw InputError({rollout.where, "a field advantage, for --adv-estimator given", "none",
                          "add advantage (a number or one per response token), or choose another --adv-estimator"});
      if (!reward)
        throw InputError({rollout.where,
                          text_of("a field reward or advantage, for --adv-estimator ", name_of(estimator)), "neither",
                          "add reward (a number), or advantage with --adv-estimator given"});
    }
    // A turn's estimate runs through all later turns, those with an advantage of their own included.
    if (estimates && estimator == Estimator::gae)
      for (const std::int64_t index : turns) require_values(unit.at(index));
  }
}

struct GroupStatistics {
  std::int64_t count = 0, members = 0;  // rewards; trajectories
  double mean = 0, deviation = 1;
};

// Mean and unbiased standard deviation of each group's rewards. A group of one has (0, 1) (verl), or its reward and 0
// under --group-of-one zero. So has a group of which one was judged, since it compares nothing. Differences are taken
// from the group's first reward, so equal rewards have exactly their own value as mean and 0 as deviation.
std::vector<GroupStatistics> compute_group_statistics(const Unit& unit, LoneReward lone) {
  std::int64_t groups = 0;
  for (std::int64_t g : unit.group) groups = std::max(groups, g + 1);
  std::vector<GroupStatistics> statistics(groups);
  std::vector<double> first(groups), shifted_sum(groups), square_sum(groups);
  for (std::size_t i = 0; i < unit.rewards.size(); ++i) {
    const std::int64_t g = unit.group[i];
    ++statistics[g].members;
    if (!unit.rewards[i]) continue;
    if (statistics[g].count++ == 0) first[g] = *unit.rewards[i];
    shifted_sum[g] += *unit.rewards[i] - first[g];
  }
  for (std::int64_t g = 0; g < groups; ++g)
    if (statistics[g].count == 1 && (lone == LoneReward::zero || statistics[g].members > 1))
      statistics[g].mean = first[g], statistics[g].deviation = 0;
  for (std::int64_t g = 0; g < groups; ++g)
    if (statistics[g].count > 1)
      statistics[g].mean = first[g] + shifted_sum[g] / static_cast<double>(statistics[g].count);
  for (std::size_t i = 0; i < unit.rewards.size(); ++i) {
    if (!unit.rewards[i]) continue;
    const double difference = *unit.rewards[i] - statistics[unit.group[i]].mean;
    square_sum[unit.group[i]] += difference * difference;
  }
  for (std::int64_t g = 0; g < groups; ++g)
    if (statistics[g].count > 1)
      statistics[g].deviation = std::sqrt(square_sum[g] / static_cast<double>(statistics[g].count - 1));
  return statistics;
}

// Unbiased standard deviation of all rewards; 0 for fewer than two. Differences are taken from the first.
double batch_deviation(const std::vector<std::optional<double>>& rewards) {
  double count = 0, first = 0, shifted = 0, squares = 0;
  for (const auto& reward : rewards)
    if (reward) {
      if (count == 0) first = *reward;
      count += 1, shifted += *reward - first;
    }
  if (count < 2) return 0;
  const double mean = first + shifted / count;
  for (const auto& reward : rewards)
    if (reward) squares += (*reward - mean) * (*reward - mean);
  return std::sqrt(squares / (count - 1));
}

double outcome_advantage(Estimator estimator, double reward, const GroupStatistics& group, double epsilon) {
  const double centred = reward - group.mean;
  if (centred == 0) return 0;  // also where deviation and epsilon are 0
  if (estimator == Estimator::grpo) return centred / (group.deviation + epsilon);
  if (estimator == Estimator::rloo && group.count > 1)
    return centred * static_cast<double>(group.count) / static_cast<double>(group.count - 1);
  return centred;
}

// Goes backwards over the loss tokens of a trajectory, last turn first: visit(rollout, token, earned), where `earned`
// is the reward of the turns that end between this loss token and the next.
template <class Visit>
void visit_backwards(const Unit& unit, const std::vector<std::int64_t>& turns, Visit&& visit) {
  double earned = 0;
  for (std::size_t k = turns.size(); k-- > 0;) {
    const auto i = static_cast<std::size_t>(turns[k]);
    const Rollout& rollout = unit.rollouts[i];
    if (rollout.token_rewards.empty()) earned += rollout.reward.value_or(0);
    for (std::size_t t = rollout.loss_mask.size(); t-- > 0;) {
      if (!rollout.token_rewards.empty()) earned += rollout.token_rewards[t];
      if (!rollout.loss_mask[t]) continue;
      visit(i, t, earned);
      earned = 0;
    }
  }
}

// The reward-to-go of each loss token of a trajectory; masked tokens are passed over as if they were not there.
void compute_returns(const Unit& unit, const std::vector<std::int64_t>& turns, double gamma, Series& out) {
  double running = 0;
  visit_backwards(unit, turns, [&](std::size_t i, std::size_t t, double earned) {
    running = earned + gamma * running;
    out[i][t] = running;
  });
}

// Generalised advantage estimation over the loss tokens of a trajectory, before whitening.
void compute_gae(const Unit& unit, const std::vector<std::int64_t>& turns, double gamma, double lam, Series& out) {
  double next_value = 0, running = 0;
  visit_backwards(unit, turns, [&](std::size_t i, std::size_t t, double earned) {
    const double value = unit.rollouts[i].values[t];
    running = earned + gamma * next_value - value + gamma * lam * running;
    next_value = value;
    out[i][t] = running;
  });
}

// (x - mean) / sqrt(var + 1e-8) over the loss tokens of the rollouts whose advantages are estimated here, each counted
// by its share. The mean is taken from differences to the first number, so equal numbers become exactly 0: the root
// would make 1e4 of their rounding.
void whiten(const Unit& unit, Series& series) {
  const auto for_each_loss_token = [&](auto&& body) {
    for (std::size_t i = 0; i < unit.rollouts.size(); ++i) {
      if (!unit.estimates[i]) continue;
      for (std::size_t t = 0; t < series[i].size(); ++t)
        if (unit.rollouts[i].loss_mask[t]) body(series[i][t], unit.rollouts[i].loss_share(t));
    }
  };
  double count = 0, first = 0, shifted_sum = 0, squares = 0;
  bool any = false;
  for_each_loss_token([&](double x, double share) {
    if (!std::exchange(any, true)) first = x;
    count += share, shifted_sum += share * (x - first);
  });
  if (!any) return;
  const double mean = first + shifted_sum / count;
  for_each_loss_token([&](double x, double share) { squares += share * (x - mean) * (x - mean); });
  const double variance = count > 1 ? squares / (count - 1) : 0.0;
  const double scale = 1.0 / std::sqrt(variance + kWhitenEpsilon);
  for_each_loss_token([&](double& x, double) { x = (x - mean) * scale; });
}

[[noreturn]] void refuse_target(const Rollout& rollout, const char* missing) {
  throw InputError({rollout.where, "a field returns, or reward and values, for --critic", missing, "add one of them"});
}

}  // namespace

void check_value_targets(std::span<const Rollout> rollouts) {
  const Unit unit(rollouts);
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    if (!rollouts[i].response_ids.empty() && rollouts[i].returns.empty() && !unit.reward_of(i))
      refuse_target(rollouts[i], "no reward");
}

std::vector<std::vector<double>> compute_value_targets(std::span<const Rollout> rollouts, const Options& options) {
  check_value_targets(rollouts);
  const Unit unit(rollouts);
  Series targets(rollouts.size());
  for (const auto& turns : unit.trajectories.turns) {
    const auto asks = [&](std::int64_t index) {
      return unit.at(index).returns.empty() && !unit.at(index).response_ids.empty();
    };
    for (const std::int64_t index : turns)
      targets[static_cast<std::size_t>(index)].assign(unit.at(index).response_ids.size(), 0.0);
    if (std::ranges::any_of(turns, asks)) {
      refuse_branches(unit, turns, "--critic without recorded returns");
      for (const std::int64_t index : turns)
        if (unit.at(index).values.size() != unit.at(index).response_ids.size())
          refuse_target(unit.at(index), "no values");
      compute_gae(unit, turns, options.gamma, options.lam, targets);
    }
    for (const std::int64_t index : turns) {
      std::vector<double>& target = targets[static_cast<std::size_t>(index)];
      if (!asks(index))
        target = unit.at(index).returns;
      else
        for (std::size_t t = 0; t < target.size(); ++t) target[t] += unit.at(index).values[t];
    }
  }
  return targets;
}

std::int64_t count_unjudged(std::span<const Rollout> rollouts) {
  const Unit unit(rollouts);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < rollouts.size(); ++i) count += !unit.estimates[i] && !is_settled(rollouts[i]);
  return count;
}

std::vector<std::vector<double>> compute_advantages(std::span<const Rollout> rollouts, const Options& options) {
  const Estimator estimator = options.adv_estimator;
  const Unit unit(rollouts, rules_give_advantages(options));
  check_fields(unit, estimator);

  std::vector<GroupStatistics> statistics = compute_group_statistics(unit, options.group_of_one);
  if (options.adv_std == DeviationOf::batch) {
    const double deviation = batch_deviation(unit.rewards);
    for (GroupStatistics& of : statistics) of.deviation = deviation;
  }
  Series series(rollouts.size());
  for (std::size_t i = 0; i < rollouts.size(); ++i) series[i].assign(rollouts[i].response_ids.size(), 0.0);
  for (const auto& turns : unit.trajectories.turns) {
    if (std::ranges::none_of(turns,
                             [&](std::int64_t index) { return unit.estimates[static_cast<std::size_t>(index)]; }))
      continue;
    if (estimator == Estimator::reinforce_plus_plus || estimator == Estimator::gae)
      refuse_branches(unit, turns, text_of("--adv-estimator ", name_of(estimator)).c_str());
    if (estimator == Estimator::reinforce_plus_plus) {
      compute_returns(unit, turns, options.gamma, series);
    } else if (estimator == Estimator::gae) {
      compute_gae(unit, turns, options.gamma, options.lam, series);
    } else {
      const auto first = static_cast<std::size_t>(turns.front());
      const double advantage = outcome_advantage(estimator, *unit.reward_of(first),
                                                 statistics[unit.group_of_rollout(first)], options.adv_epsilon);
      for (const std::int64_t index : turns)
        for (std::size_t t = 0; t < unit.at(index).loss_mask.size(); ++t)
          if (unit.at(index).loss_mask[t]) series[static_cast<std::size_t>(index)][t] = advantage;
    }
  }
  for (std::size_t i = 0; i < rollouts.size(); ++i)
    if (is_settled(rollouts[i])) series[i] = rollouts[i].advantages;
  if (whitens(estimator)) whiten(unit, series);
  return series;
}

}  // namespace espalier
