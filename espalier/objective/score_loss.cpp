#include "espalier/objective/score_loss.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "espalier/base/error.h"

namespace espalier {
namespace {

using Answers = std::vector<std::size_t>;  // places in the mini-batch

double rank_of(const PairPlace& place) { return place.score ? *place.score : place.chosen ? 1 : 0; }

std::vector<Answers> sets_of(std::span<const Rollout> rollouts) {
  std::map<std::int64_t, Answers> found;
  for (std::size_t i = 0; i < rollouts.size(); ++i) {
    if (rollouts[i].pair.pair < 0)
      throw InputError({rollouts[i].where, "a pair, or a list of scored answers, with --objective reward",
                        "a record of one response", "give chosen_ids and rejected_ids, or answers"});
    found[rollouts[i].pair.pair].push_back(i);
  }
  std::vector<Answers> sets;
  for (auto& [number, answers] : found) {
    ESPALIER_INTERNAL(answers.size() > 1, "a part of set ", number, " is in another mini-batch");
    sets.push_back(std::move(answers));
  }
  return sets;
}

// -log( e^(r_a - m) / (e^(r_a - m) + sum over `lower` of e^(r_b)) ); adds `weight` times its derivative to `slope`.
double choice_loss(std::size_t a, double margin, const Answers& lower, std::span<const double> scores, double weight,
                   std::vector<double>& slope) {
  const double own = scores[a] - margin;
  double largest = own;
  for (const std::size_t b : lower) largest = std::max(largest, scores[b]);
  double sum = std::exp(own - largest), rest = own == largest ? 0 : sum;  // rest: without one of the largest
  bool left_out = own == largest;
  for (const std::size_t b : lower) {
    const double term = std::exp(scores[b] - largest);
    sum += term;
    if (scores[b] == largest && !left_out)
      left_out = true;
    else
      rest += term;
  }
  double lower_share = 0;
  for (const std::size_t b : lower) {
    const double share = std::exp(scores[b] - largest) / sum;
    slope[b] += weight * share;
    lower_share += share;
  }
  slope[a] -= weight * lower_share;
  return largest - own + std::log1p(rest);
}

struct Comparisons {
  double accuracy = 0, margin = 0;
  std::int64_t pairs = 0;
};

}  // namespace

void end_with_scores(std::span<Rollout> rollouts) {
  for (Rollout& rollout : rollouts) {
    rollout.response_ids.push_back(0);
    rollout.loss_mask.assign(rollout.response_ids.size(), 0);
    rollout.loss_mask.back() = 1;
  }
}

ScoreLoss score_loss(std::span<const Rollout> rollouts, std::span<const double> scores, const Options& options) {
  ESPALIER_INTERNAL_EQ(scores.size(), rollouts.size());
  const std::vector<Answers> sets = sets_of(rollouts);
  const double share = 1 / static_cast<double>(sets.size()), center = options.center_rewards_coefficient;
  ScoreLoss out;
  out.slope.assign(rollouts.size(), 0);
  std::int64_t ranked = 0;
  for (const Answers& answers : sets) {
    Comparisons set;
    for (const std::size_t a : answers) {
      const PairPlace& place = rollouts[a].pair;
      Answers lower;
      for (const std::size_t b : answers)
        if (rank_of(rollouts[b].pair) < rank_of(place)) lower.push_back(b);
      if (lower.empty()) continue;
      out.means.loss += share * choice_loss(a, place.margin, lower, scores, share, out.slope);
      for (const std::size_t b : lower) {
        set.accuracy += scores[a] > scores[b] ? 1 : 0;
        set.margin += scores[a] - scores[b];
        ++set.pairs;
      }
    }
    if (set.pairs > 0) {
      out.means.accuracy += set.accuracy / static_cast<double>(set.pairs);
      out.means.margin += set.margin / static_cast<double>(set.pairs);
      ++ranked;
    }
    if (center == 0) continue;
    const auto K = static_cast<double>(answers.size());
    const double each = share * center / (K * (K - 1) / 2);
    for (std::size_t i = 0; i < answers.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) {
        const double sum = scores[answers[i]] + scores[answers[j]];
        out.means.loss += each * sum * sum;
        out.slope[answers[i]] += 2 * each * sum, out.slope[answers[j]] += 2 * each * sum;
      }
  }
  if (ranked > 0) out.means.accuracy /= static_cast<double>(ranked), out.means.margin /= static_cast<double>(ranked);
  if (scores.empty()) return out;
  const auto [least, most] = std::ranges::minmax(scores);
  out.means.least = least, out.means.most = most;
  for (const double score : scores) out.means.mean += score / static_cast<double>(scores.size());
  return out;
}

void ScoreSlopes::add_edges(std::span<const LossEdge> edges, std::span<const double>, std::span<double> grad_value) {
  for (std::size_t e = 0; e < edges.size(); ++e) grad_value[e] = slope_[static_cast<std::size_t>(edges[e].rollout)];
}

}  // namespace espalier
