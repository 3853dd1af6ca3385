#include "espalier/ops/cpu/token_choice.h"

#include <algorithm>
#include <numeric>

#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/choice_kernels.h"

namespace espalier {

#define ESPALIER_CHOICE_KERNELS(set)                                                                             \
  namespace set {                                                                                                \
  void row_weights_float(const float* logit, std::int64_t n, double max_logit, double inverse, double* weight,   \
                         double* run_sum);                                                                       \
  void row_weights_double(const double* logit, std::int64_t n, double max_logit, double inverse, double* weight, \
                          double* run_sum);                                                                      \
  }
ESPALIER_EACH_SET(ESPALIER_CHOICE_KERNELS)
#undef ESPALIER_CHOICE_KERNELS

namespace {

// Shortens `kept`, tokens in any order, to the fewest likeliest whose weights reach top_p of all. They are sorted in
// growing pieces: of a peaked distribution only the first piece.
template <class Before>
void keep_top_p(std::span<const double> weight, double top_p, const Before& before, std::vector<std::int32_t>& kept) {
  constexpr std::size_t kFirstPiece = 64, kGrowth = 4;
  double total = 0, reached = 0;
  for (const std::int32_t id : kept) total += weight[static_cast<std::size_t>(id)];
  for (std::size_t sorted = 0; sorted < kept.size();) {
    const std::size_t end = std::min(kept.size(), std::max(kFirstPiece, kGrowth * sorted));
    const auto begin = kept.begin();
    std::partial_sort(begin + static_cast<std::ptrdiff_t>(sorted), begin + static_cast<std::ptrdiff_t>(end), kept.end(),
                      before);
    for (; sorted < end; ++sorted) {
      reached += weight[static_cast<std::size_t>(kept[sorted])];
      if (reached >= top_p * total) return kept.resize(sorted + 1);
    }
  }
}

// The first i at which the running sum of the weights passes `left`, which becomes what is left before i. The last i
// with weight where rounding leaves a rest.
std::size_t pass(std::span<const double> weight, double& left) {
  std::size_t last = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    if (!(weight[i] > 0)) continue;
    last = i;
    if (left < weight[i]) break;
    left -= weight[i];
  }
  return last;
}

double sum_of(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

}  // namespace

void compute_weights(const float* logit, std::int64_t n, double max_logit, double inverse, double* weight,
                     double* run_sum) {
  ESPALIER_FOR_SET(row_weights_float)(logit, n, max_logit, inverse, weight, run_sum);
}
void compute_weights(const double* logit, std::int64_t n, double max_logit, double inverse, double* weight,
                     double* run_sum) {
  ESPALIER_FOR_SET(row_weights_double)(logit, n, max_logit, inverse, weight, run_sum);
}

template <class A>
void compute_kept(std::span<const A> logit, std::span<const double> weight, const ChoiceRule& rule,
                  std::vector<std::int32_t>& kept) {
  const auto vocabulary = static_cast<std::int64_t>(logit.size());
  const bool cut_k = rule.top_k >= 1 && rule.top_k < vocabulary, cut_p = rule.top_p < 1;
  kept.clear();
  if (!cut_k && !cut_p) return;
  kept.resize(logit.size());
  std::iota(kept.begin(), kept.end(), 0);
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const A first = logit[static_cast<std::size_t>(a)], second = logit[static_cast<std::size_t>(b)];
    return first > second || (first == second && a < b);
  };
  if (cut_k) {
    std::nth_element(kept.begin(), kept.begin() + (rule.top_k - 1), kept.end(), before);
    kept.resize(static_cast<std::size_t>(rule.top_k));
  }
  if (cut_p) keep_top_p(weight, rule.top_p, before, kept);
  std::sort(kept.begin(), kept.end());
}

template <class A>
TokenChoice choose_token(std::span<const A> logit, const HeadRowSums& sums, const ChoiceRule& rule, double uniform,
                         ChoiceScratch& scratch) {
  const double inverse = rule.inverse_temperature();
  const auto chosen = [&](std::size_t id) {
    return TokenChoice{static_cast<std::int32_t>(id), token_logprob(static_cast<double>(logit[id]), inverse, sums)};
  };
  if (rule.temperature == 0)
    return chosen(static_cast<std::size_t>(std::max_element(logit.begin(), logit.end()) - logit.begin()));
  const std::size_t run = kWeightRun;
  scratch.weight.resize(logit.size());
  scratch.run_sum.resize((logit.size() + run - 1) / run);
  compute_weights(logit.data(), static_cast<std::int64_t>(logit.size()), sums.max_raw, inverse, scratch.weight.data(),
                  scratch.run_sum.data());
  const std::span<const double> weight = scratch.weight;
  compute_kept(logit, weight, rule, scratch.kept);
  if (scratch.kept.empty()) {
    double left = uniform * sum_of(scratch.run_sum);
    const std::size_t begin = run * pass(scratch.run_sum, left);
    return chosen(begin + pass(weight.subspan(begin, std::min(run, weight.size() - begin)), left));
  }
  scratch.kept_weight.clear();
  for (const std::int32_t id : scratch.kept) scratch.kept_weight.push_back(weight[static_cast<std::size_t>(id)]);
  double left = uniform * sum_of(scratch.kept_weight);
  return chosen(static_cast<std::size_t>(scratch.kept[pass(scratch.kept_weight, left)]));
}

#define ESPALIER_INSTANTIATE(A)                                                                           \
  template void compute_kept<A>(std::span<const A>, std::span<const double>, const ChoiceRule&,           \
                                std::vector<std::int32_t>&);                                              \
  template TokenChoice choose_token<A>(std::span<const A>, const HeadRowSums&, const ChoiceRule&, double, \
                                       ChoiceScratch&)
ESPALIER_INSTANTIATE(float);
ESPALIER_INSTANTIATE(double);
#undef ESPALIER_INSTANTIATE

}  // namespace espalier
