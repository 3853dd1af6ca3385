#include "espalier/ops/cpu/router_kernels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace espalier::moe {
namespace {

constexpr std::int64_t kParallelFrom = 16384;  // logits below which a second thread costs more than it saves

// Overwrites p with softmax(logits); returns log sum exp.
template <class T>
accumulator_t<T> softmax(std::int64_t experts, const T* logits, accumulator_t<T>* p) {
  using A = accumulator_t<T>;
  A largest = static_cast<A>(logits[0]);
  for (std::int64_t e = 1; e < experts; ++e) largest = std::max(largest, static_cast<A>(logits[e]));
  A sum = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    p[e] = std::exp(static_cast<A>(logits[e]) - largest);
    sum += p[e];
  }
  for (std::int64_t e = 0; e < experts; ++e) p[e] /= sum;
  return largest + std::log(sum);
}

// Overwrites p with the scores of the logits; returns log sum exp.
template <class T>
accumulator_t<T> scores_of(const RouterShape& shape, const T* logits, accumulator_t<T>* p) {
  using A = accumulator_t<T>;
  const A lse = softmax(shape.experts, logits, p);
  for (std::int64_t e = 0; shape.sigmoid && e < shape.experts; ++e)
    p[e] = 1 / (1 + std::exp(-static_cast<A>(logits[e])));
  return lse;
}

// The largest entries by falling value, ties to the lower index. Overwrites score. Not-a-number is below all, so that
// experts are distinct whatever the logits are.
template <class A>
void take_largest(std::int64_t experts, std::int64_t chosen, A* score, std::int32_t* choice) {
  constexpr A kLeast = std::numeric_limits<A>::lowest();
  for (std::int64_t e = 0; e < experts; ++e)
    if (!(score[e] > kLeast)) score[e] = kLeast;
  for (std::int64_t j = 0; j < chosen; ++j) {
    std::int64_t best = 0;
    for (std::int64_t e = 1; e < experts; ++e)
      if (score[e] > score[best]) best = e;
    choice[j] = static_cast<std::int32_t>(best);
    score[best] = -std::numeric_limits<A>::infinity();
  }
}

// Scores of experts outside of the best groups go below all. A group's own score: the sum of its two largest where
// scores are sigmoids, else its largest.
template <class A>
void keep_best_groups(const RouterShape& shape, A* score) {
  if (shape.groups == 1) return;
  const std::int64_t size = shape.experts / shape.groups;
  std::vector<A> of_group;
  for (std::int64_t g = 0; g < shape.groups; ++g) {
    std::vector<A> own(score + g * size, score + (g + 1) * size);
    const auto kept = static_cast<std::ptrdiff_t>(std::min<std::int64_t>(shape.sigmoid ? 2 : 1, size));
    std::partial_sort(own.begin(), own.begin() + kept, own.end(), std::greater<>());
    of_group.push_back(std::accumulate(own.begin(), own.begin() + kept, A{0}));
  }
  std::vector<std::int32_t> best(static_cast<std::size_t>(shape.top_groups));
  take_largest(shape.groups, shape.top_groups, of_group.data(), best.data());
  for (std::int64_t g = 0; g < shape.groups; ++g)
    if (std::find(best.begin(), best.end(), g) == best.end())
      std::fill_n(score + g * size, size, std::numeric_limits<A>::lowest());
}

// dL/dw -> dL/dp of the chosen, in place.
template <class A>
void through_weights(const RouterShape& shape, const A* p, const std::int32_t* choice, A* grad) {
  for (std::int64_t j = 0; j < shape.chosen; ++j) grad[j] *= static_cast<A>(shape.scaling);
  if (!shape.renormalise) return;
  A sum = 0, product = 0;
  for (std::int64_t j = 0; j < shape.chosen; ++j) sum += p[choice[j]];
  for (std::int64_t j = 0; j < shape.chosen; ++j) product += grad[j] * p[choice[j]] / sum;
  for (std::int64_t j = 0; j < shape.chosen; ++j) grad[j] = (grad[j] - product) / sum;
}

// One row of router_backward; scratch [2 E + k].
template <class T>
PenaltySums row_backward(const RouterShape& shape, const T* logits, const std::int32_t* choice,
                         const accumulator_t<T>* grad_weight, const double* probability, double z, T* grad_logits,
                         accumulator_t<T>* scratch) {
  using A = accumulator_t<T>;
  const std::int64_t E = shape.experts, k = shape.chosen;
  A *p = scratch, *grad_p = scratch + E, *grad_chosen = scratch + 2 * E;
  const A lse = scores_of(shape, logits, p);
  PenaltySums sums;
  for (std::int64_t e = 0; e < E; ++e) {
    grad_p[e] = probability ? static_cast<A>(probability[e]) : A{0};
    if (probability) sums.aux += probability[e] * static_cast<double>(p[e]);
  }
  sums.z = z * static_cast<double>(lse) * static_cast<double>(lse);
  std::copy(grad_weight, grad_weight + k, grad_chosen);
  through_weights(shape, p, choice, grad_chosen);
  for (std::int64_t j = 0; j < k; ++j) grad_p[choice[j]] += grad_chosen[j];
  if (shape.sigmoid) {
    for (std::int64_t e = 0; e < E; ++e) grad_logits[e] = T(p[e] * (1 - p[e]) * grad_p[e]);
    return sums;
  }
  A mean = 0;
  for (std::int64_t e = 0; e < E; ++e) mean += p[e] * grad_p[e];
  const A from_lse = static_cast<A>(2 * z) * lse;
  for (std::int64_t e = 0; e < E; ++e) grad_logits[e] = T(p[e] * (grad_p[e] - mean + from_lse));
  return sums;
}

}  // namespace

template <class T>
void choose_experts(const RouterShape& shape, const T* logits_RE, const std::int32_t* given_RK, std::int32_t* choice_RK,
                    accumulator_t<T>* weight_RK, const accumulator_t<T>* correction_E) {
  using A = accumulator_t<T>;
  const std::int64_t E = shape.experts, k = shape.chosen;
#pragma omp parallel if (shape.rows * E > kParallelFrom)
  {
    std::vector<A> p(static_cast<std::size_t>(E)), score(p.size());
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      std::int32_t* choice = choice_RK + r * k;
      A* weight = weight_RK + r * k;
      scores_of(shape, logits_RE + r * E, p.data());
      if (given_RK != nullptr && given_RK[r * k] >= 0) {
        std::copy(given_RK + r * k, given_RK + (r + 1) * k, choice);
      } else {
        for (std::int64_t e = 0; e < E; ++e)
          score[static_cast<std::size_t>(e)] = p[static_cast<std::size_t>(e)] + (correction_E ? correction_E[e] : A{0});
        keep_best_groups(shape, score.data());
        take_largest(E, k, score.data(), choice);
      }
      A sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += p[static_cast<std::size_t>(choice[j])];
      for (std::int64_t j = 0; j < k; ++j) {
        const A value = p[static_cast<std::size_t>(choice[j])];
        weight[j] = static_cast<A>(T(static_cast<A>(shape.scaling) * (shape.renormalise ? value / sum : value)));
      }
    }
  }
}

template <class T>
PenaltySums router_backward(const RouterShape& shape, const T* logits_RE, const std::int32_t* choice_RK,
                            const accumulator_t<T>* grad_weight_RK, const RowPenalty& penalty, T* grad_logits_RE) {
  using A = accumulator_t<T>;
  const std::int64_t E = shape.experts, k = shape.chosen;
  std::vector<PenaltySums> of_row(static_cast<std::size_t>(shape.rows));
#pragma omp parallel if (shape.rows * E > kParallelFrom)
  {
    std::vector<A> scratch(static_cast<std::size_t>(2 * E + k));
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      const std::int64_t group = penalty.group_R ? penalty.group_R[r] : 0;
      of_row[static_cast<std::size_t>(r)] =
          row_backward(shape, logits_RE + r * E, choice_RK + r * k, grad_weight_RK + r * k,
                       penalty.probability_GE ? penalty.probability_GE + group * E : nullptr,
                       penalty.z_G ? penalty.z_G[group] : 0.0, grad_logits_RE + r * E, scratch.data());
    }
  }
  PenaltySums sums;
  for (const PenaltySums& row : of_row) sums.aux += row.aux, sums.z += row.z;
  return sums;
}

template <class T>
void scale_by_expert(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                     const T* scale_E, accumulator_t<T>* out_S) {
  for (std::int64_t s = 0; s < slots; ++s) out_S[s] = weight_S[s] * static_cast<accumulator_t<T>>(scale_E[choice_S[s]]);
}

template <class T>
void scale_by_expert_backward(std::int64_t slots, const accumulator_t<T>* weight_S, const std::int32_t* choice_S,
                              const T* scale_E, accumulator_t<T>* grad_S, accumulator_t<T>* grad_scale_E) {
  for (std::int64_t s = 0; s < slots; ++s) {
    if (grad_scale_E != nullptr) grad_scale_E[choice_S[s]] += grad_S[s] * weight_S[s];
    grad_S[s] *= static_cast<accumulator_t<T>>(scale_E[choice_S[s]]);
  }
}

#define ESPALIER_INSTANTIATE(T)                                                                                        \
  template void choose_experts<T>(const RouterShape&, const T*, const std::int32_t*, std::int32_t*, accumulator_t<T>*, \
                                  const accumulator_t<T>*);                                                            \
  template PenaltySums router_backward<T>(const RouterShape&, const T*, const std::int32_t*, const accumulator_t<T>*,  \
                                          const RowPenalty&, T*);                                                      \
  template void scale_by_expert<T>(std::int64_t, const accumulator_t<T>*, const std::int32_t*, const T*,               \
                                   accumulator_t<T>*);                                                                 \
  template void scale_by_expert_backward<T>(std::int64_t, const accumulator_t<T>*, const std::int32_t*, const T*,      \
                                            accumulator_t<T>*, accumulator_t<T>*);
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::moe
