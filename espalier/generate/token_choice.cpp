#include "espalier/generate/token_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace espalier {
namespace {

template <class A>
double weight_of(A logit, double max_logit, double inverse) {
  return std::exp((static_cast<double>(logit) - max_logit) * inverse);
}

// Shortens `kept`, tokens in any order, to the fewest likeliest whose weights reach top_p of all. They are sorted in
// growing pieces: of a peaked distribution only the first piece.
template <class A, class Before>
void keep_top_p(std::span<const A> logits, const ChoiceRule& rule, double max_logit, const Before& before,
                std::vector<std::int32_t>& kept) {
  constexpr std::size_t kFirstPiece = 64, kGrowth = 4;
  const double inverse = rule.inverse_temperature();
  double total = 0, reached = 0;
  for (const std::int32_t id : kept) total += weight_of(logits[static_cast<std::size_t>(id)], max_logit, inverse);
  for (std::size_t sorted = 0; sorted < kept.size();) {
    const std::size_t end = std::min(kept.size(), std::max(kFirstPiece, kGrowth * sorted));
    const auto begin = kept.begin();
    std::partial_sort(begin + static_cast<std::ptrdiff_t>(sorted), begin + static_cast<std::ptrdiff_t>(end), kept.end(),
                      before);
    for (; sorted < end; ++sorted) {
      reached += weight_of(logits[static_cast<std::size_t>(kept[sorted])], max_logit, inverse);
      if (reached >= rule.top_p * total) return kept.resize(sorted + 1);
    }
  }
}

}  // namespace

template <class A>
void compute_kept(std::span<const A> logits, const ChoiceRule& rule, double max_logit,
                  std::vector<std::int32_t>& kept) {
  const auto vocabulary = static_cast<std::int64_t>(logits.size());
  const bool cut_k = rule.top_k >= 1 && rule.top_k < vocabulary, cut_p = rule.top_p < 1;
  kept.clear();
  if (!cut_k && !cut_p) return;
  kept.resize(logits.size());
  std::iota(kept.begin(), kept.end(), 0);
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const A first = logits[static_cast<std::size_t>(a)], second = logits[static_cast<std::size_t>(b)];
    return first > second || (first == second && a < b);
  };
  if (cut_k) {
    std::nth_element(kept.begin(), kept.begin() + (rule.top_k - 1), kept.end(), before);
    kept.resize(static_cast<std::size_t>(rule.top_k));
  }
  if (cut_p) keep_top_p(logits, rule, max_logit, before, kept);
  std::sort(kept.begin(), kept.end());
}

template <class A>
TokenChoice choose_token(std::span<const A> logits, const HeadRowSums& sums, const ChoiceRule& rule, double uniform,
                         ChoiceScratch& scratch) {
  const double inverse = rule.inverse_temperature();
  const auto chosen = [&](std::size_t id) {
    return TokenChoice{static_cast<std::int32_t>(id), token_logprob(static_cast<double>(logits[id]), inverse, sums)};
  };
  if (rule.temperature == 0)
    return chosen(static_cast<std::size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  compute_kept(logits, rule, sums.max_raw, scratch.kept);
  const std::size_t count = scratch.kept.empty() ? logits.size() : scratch.kept.size();
  const auto id_of = [&](std::size_t i) {
    return scratch.kept.empty() ? i : static_cast<std::size_t>(scratch.kept[i]);
  };
  scratch.weight.resize(count);
  double total = 0;
  for (std::size_t i = 0; i < count; ++i)
    total += scratch.weight[i] = weight_of(logits[id_of(i)], sums.max_raw, inverse);
  double left = uniform * total;
  std::size_t last = 0;  // that has weight: where rounding leaves a rest
  for (std::size_t i = 0; i < count; ++i) {
    if (!(scratch.weight[i] > 0)) continue;
    last = i;
    left -= scratch.weight[i];
    if (left < 0) break;
  }
  return chosen(id_of(last));
}

#define ESPALIER_INSTANTIATE(A)                                                                             \
  template void compute_kept<A>(std::span<const A>, const ChoiceRule&, double, std::vector<std::int32_t>&); \
  template TokenChoice choose_token<A>(std::span<const A>, const HeadRowSums&, const ChoiceRule&, double,   \
                                       ChoiceScratch&)
ESPALIER_INSTANTIATE(float);
ESPALIER_INSTANTIATE(double);
#undef ESPALIER_INSTANTIATE

}  // namespace espalier
