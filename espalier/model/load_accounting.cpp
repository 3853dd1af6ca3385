#include "espalier/model/load_accounting.h"

#include <algorithm>
#include <numeric>

#include "espalier/base/error.h"

namespace espalier::moe {

LoadAccounting::LoadAccounting(std::int64_t layers, const RouterShape& shape, std::vector<std::int64_t> lengths,
                               RouterLosses losses, bool keep_rollouts)
    : layers_(layers),
      shape_(shape),
      lengths_(std::move(lengths)),
      tokens_(std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0})),
      losses_(losses),
      keep_rollouts_(keep_rollouts),
      of_mini_batch_(static_cast<std::size_t>(layers * shape.experts)) {
  if (keep_rollouts_ || (losses_.aux_coef != 0 && losses_.scope == AuxScope::rollout))
    of_rollout_.resize(lengths_.size() * of_mini_batch_.size());
}

std::int64_t* LoadAccounting::counts_of(std::int64_t layer, std::int64_t rollout) {
  return of_rollout_.data() + (rollout * layers_ + layer) * shape_.experts;
}
const std::int64_t* LoadAccounting::counts_of(std::int64_t layer, std::int64_t rollout) const {
  return of_rollout_.data() + (rollout * layers_ + layer) * shape_.experts;
}

std::span<const std::int64_t> LoadAccounting::load(std::int64_t layer) const {
  return std::span(of_mini_batch_)
      .subspan(static_cast<std::size_t>(layer * shape_.experts), static_cast<std::size_t>(shape_.experts));
}

void LoadAccounting::count_apart() { not_joined_.resize(of_rollout_.size()); }

std::vector<std::int64_t> LoadAccounting::not_joined(std::span<const std::int32_t> rollouts) const {
  std::vector<std::int64_t> counts;
  if (!counting_ || not_joined_.empty()) return counts;
  const auto width = static_cast<std::size_t>(layers_ * shape_.experts);
  for (const std::int32_t rollout : rollouts) {
    const auto own = std::span(not_joined_).subspan(static_cast<std::size_t>(rollout) * width, width);
    counts.insert(counts.end(), own.begin(), own.end());
  }
  return counts;
}

void LoadAccounting::join(std::span<const std::int32_t> rollouts, std::span<const std::int64_t> sum) {
  if (sum.empty()) return;
  const auto width = static_cast<std::size_t>(layers_ * shape_.experts);
  const std::int64_t* next = sum.data();
  for (const std::int32_t rollout : rollouts) {
    const std::size_t begin = static_cast<std::size_t>(rollout) * width;
    for (std::size_t c = begin; c < begin + width; ++c) {
      of_rollout_[c] += *next++ - not_joined_[c];
      not_joined_[c] = 0;
    }
  }
}

void LoadAccounting::add_choices(std::int64_t layer, std::span<const RowOwners> owners, const std::int32_t* choice_RK) {
  if (!counting_) return;
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(shape_.experts));
  for (const RowOwners& rows : owners) {
    std::fill(chosen.begin(), chosen.end(), 0);
    for (std::int64_t s = rows.begin * shape_.chosen; s < rows.end * shape_.chosen; ++s)
      ++chosen[static_cast<std::size_t>(choice_RK[s])];
    const auto multiplicity = static_cast<std::int64_t>(rows.rollouts.size());
    std::int64_t* of_all = of_mini_batch_.data() + layer * shape_.experts;
    for (std::size_t e = 0; e < chosen.size(); ++e) of_all[e] += multiplicity * chosen[e];
    if (of_rollout_.empty()) continue;
    for (const std::int32_t rollout : rows.rollouts) {
      std::int64_t* counts = counts_of(layer, rollout);
      for (std::size_t e = 0; e < chosen.size(); ++e) counts[e] += chosen[e];
      if (not_joined_.empty()) continue;
      std::int64_t* apart = not_joined_.data() + (counts - of_rollout_.data());
      for (std::size_t e = 0; e < chosen.size(); ++e) apart[e] += chosen[e];
    }
  }
}

void LoadAccounting::take_counts(const LoadAccounting& counted, std::span<const std::int64_t> of) {
  ESPALIER_INTERNAL(counted.keep_rollouts_ && counted.layers_ == layers_ && of.size() == lengths_.size());
  ESPALIER_INTERNAL_EQ(counted.shape_.experts, shape_.experts);
  ESPALIER_INTERNAL_EQ(counted.shape_.chosen, shape_.chosen);
  const auto width = static_cast<std::size_t>(layers_ * shape_.experts);
  std::fill(of_mini_batch_.begin(), of_mini_batch_.end(), 0);
  for (std::size_t i = 0; i < of.size(); ++i) {
    ESPALIER_INTERNAL_EQ(counted.lengths_.at(static_cast<std::size_t>(of[i])), lengths_[i]);
    const auto counts = std::span(counted.of_rollout_).subspan(static_cast<std::size_t>(of[i]) * width, width);
    for (std::size_t c = 0; c < width; ++c) of_mini_batch_[c] += counts[c];
    if (!of_rollout_.empty()) std::ranges::copy(counts, of_rollout_.begin() + static_cast<std::ptrdiff_t>(i * width));
  }
  counting_ = false;
}

// probability_e += factor f_e / T
void LoadAccounting::add_share(const std::int64_t* counts, std::int64_t tokens, double factor,
                               double* probability_E) const {
  const std::int64_t E = shape_.experts;
  ESPALIER_INTERNAL_EQ(std::accumulate(counts, counts + E, std::int64_t{0}), shape_.chosen * tokens,
                       "choices counted before a backward that needs all of them");
  const double scale = factor / (static_cast<double>(shape_.chosen * tokens) * static_cast<double>(tokens));
  for (std::int64_t e = 0; e < E; ++e) probability_E[e] += scale * static_cast<double>(counts[e]);
}

void LoadAccounting::add_owner_terms(std::int64_t layer, const RowOwners& owners, double* probability_E) const {
  const double weight = losses_.aux_coef * static_cast<double>(shape_.experts);
  const double rollouts = static_cast<double>(lengths_.size());
  if (losses_.scope == AuxScope::minibatch) {
    add_share(load(layer).data(), tokens_, weight * static_cast<double>(owners.rollouts.size()), probability_E);
    return;
  }
  for (const std::int32_t rollout : owners.rollouts)
    add_share(counts_of(layer, rollout), lengths_[static_cast<std::size_t>(rollout)], weight / rollouts, probability_E);
}

// The weight of one row in a mean over logical tokens: of the mini-batch, or of each rollout, averaged over rollouts.
double LoadAccounting::share_of_mean(const RowOwners& owners) const {
  if (losses_.scope == AuxScope::minibatch)
    return static_cast<double>(owners.rollouts.size()) / static_cast<double>(tokens_);
  double share = 0;
  for (const std::int32_t rollout : owners.rollouts)
    share += 1 / static_cast<double>(lengths_[static_cast<std::size_t>(rollout)]);
  return share / static_cast<double>(lengths_.size());
}

LoadAccounting::Penalty LoadAccounting::penalty(std::int64_t layer, std::span<const RowOwners> owners) const {
  Penalty out;
  if (losses_.aux_coef != 0) out.probability_GE.resize(owners.size() * static_cast<std::size_t>(shape_.experts));
  for (std::size_t g = 0; g < owners.size(); ++g) {
    out.group_R.resize(static_cast<std::size_t>(owners[g].end), static_cast<std::int32_t>(g));
    if (losses_.aux_coef != 0)
      add_owner_terms(layer, owners[g], out.probability_GE.data() + g * static_cast<std::size_t>(shape_.experts));
    if (losses_.z_coef != 0) out.z_G.push_back(losses_.z_coef * share_of_mean(owners[g]));
  }
  return out;
}

}  // namespace espalier::moe
