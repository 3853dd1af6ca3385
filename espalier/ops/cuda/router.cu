// Routers: a warp has a row, its scores in shared memory.
#include <limits>

#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/head.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
template <class A>
constexpr A kLeast = std::numeric_limits<A>::lowest();

// Overwrites p, the warp's own, with softmax(logits); returns log sum exp. Lanes have the experts lane, lane + 32, ...;
// another lane's are readable after a __syncwarp.
template <class T>
__device__ accumulator_t<T> softmax(std::int64_t experts, const T* logits, int lane, accumulator_t<T>* p) {
  using A = accumulator_t<T>;
  A largest = -INFINITY;
  for (std::int64_t e = lane; e < experts; e += 32) {
    const A x = widened(logits[e]);
    largest = x > largest ? x : largest;
  }
  largest = warp_max(largest);
  A sum = 0;
  for (std::int64_t e = lane; e < experts; e += 32) {
    p[e] = std::exp(widened(logits[e]) - largest);
    sum += p[e];
  }
  sum = warp_sum(sum);
  for (std::int64_t e = lane; e < experts; e += 32) p[e] /= sum;
  return largest + std::log(sum);
}

// Overwrites p with the scores of the logits; returns log sum exp.
template <class T>
__device__ accumulator_t<T> scores_of(const moe::RouterShape& shape, const T* logits, int lane, accumulator_t<T>* p) {
  using A = accumulator_t<T>;
  const A lse = softmax(shape.experts, logits, lane, p);
  for (std::int64_t e = lane; shape.sigmoid && e < shape.experts; e += 32)
    p[e] = A(1) / (A(1) + std::exp(-widened(logits[e])));
  return lse;
}

// The `chosen` largest scores by falling value, ties to the lower expert; not-a-number is below all.
template <class A>
__device__ void take_largest(std::int64_t experts, std::int64_t chosen, const A* scores, int lane,
                             std::int32_t* choice) {
  std::uint64_t taken = 0;  // of this lane's experts
  for (std::int64_t j = 0; j < chosen; ++j) {
    A best = -INFINITY;
    std::int32_t best_expert = 0x7fffffff;
    for (std::int64_t e = lane, i = 0; e < experts; e += 32, ++i) {
      const A score = scores[e] >= kLeast<A> ? scores[e] : kLeast<A>;
      if ((taken >> i & 1) == 0 && score > best) best = score, best_expert = static_cast<std::int32_t>(e);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const A other = __shfl_xor_sync(kWholeWarp, best, lanes);
      const std::int32_t other_expert = __shfl_xor_sync(kWholeWarp, best_expert, lanes);
      if (other > best || (other == best && other_expert < best_expert)) best = other, best_expert = other_expert;
    }
    if (best_expert % 32 == lane) taken |= std::uint64_t{1} << (best_expert / 32);
    if (lane == 0) choice[j] = best_expert;
  }
  __syncwarp();
}

// Scores of experts outside of the best groups go below all. A group's own score, in of_group: the sum of its two
// largest where scores are sigmoids, else its largest.
template <class A>
__device__ void keep_best_groups(const moe::RouterShape& shape, int lane, A* scores, A* of_group, std::int32_t* best) {
  const std::int64_t size = shape.experts / shape.groups;
  for (std::int64_t g = lane; g < shape.groups; g += 32) {
    A first = -INFINITY, second = -INFINITY;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      const A score = scores[e];
      if (score > first)
        second = first, first = score;
      else if (score > second)
        second = score;
    }
    of_group[g] = shape.sigmoid && size > 1 ? first + second : first;
  }
  __syncwarp();  // lanes read others' groups
  take_largest(shape.groups, shape.top_groups, of_group, lane, best);
  for (std::int64_t e = lane; e < shape.experts; e += 32) {
    bool kept = false;
    for (std::int64_t j = 0; j < shape.top_groups; ++j) kept = kept || best[j] == e / size;
    if (!kept) scores[e] = kLeast<A>;
  }
  __syncwarp();  // the groups are read
}

// Shared memory of a warp's row: the scores; where experts are not chosen by them alone what they are chosen by, and
// the groups' own; and whole numbers, the choice of groups before that of experts.
struct RowMemory {
  std::int64_t numbers, whole_numbers;

  static RowMemory of(const moe::RouterShape& shape, bool corrected) {
    const bool grouped = shape.groups > 1;
    return {shape.experts + (corrected || grouped ? shape.experts : 0) + (grouped ? shape.groups : 0),
            shape.chosen + (grouped ? shape.top_groups : 0)};
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    choose_experts_kernel(moe::RouterShape shape, RowMemory memory, const T* logits_RE, const std::int32_t* recorded_RK,
                          const accumulator_t<T>* correction_E, std::int32_t* choice_RK, accumulator_t<T>* weight_RK) {
  using A = accumulator_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp, E = shape.experts, k = shape.chosen;
  if (row >= shape.rows) return;
  A* const p = dynamic_shared<A>() + warp * memory.numbers;
  std::int32_t* const choice =
      reinterpret_cast<std::int32_t*>(dynamic_shared<A>() + kWarps * memory.numbers) + warp * memory.whole_numbers;
  scores_of(shape, logits_RE + row * E, lane, p);
  if (recorded_RK != nullptr && recorded_RK[row * k] >= 0) {
    for (std::int64_t j = lane; j < k; j += 32) choice[j] = recorded_RK[row * k + j];
    __syncwarp();
  } else if (correction_E == nullptr && shape.groups == 1) {
    take_largest(E, k, p, lane, choice);
  } else {
    A* const scores = p + E;
    for (std::int64_t e = lane; e < E; e += 32) scores[e] = p[e] + (correction_E != nullptr ? correction_E[e] : A(0));
    __syncwarp();  // groups are of all lanes' experts
    if (shape.groups > 1) keep_best_groups(shape, lane, scores, scores + E, choice + k);
    take_largest(E, k, scores, lane, choice);
  }
  A sum = 0;
  for (std::int64_t j = 0; j < k; ++j) sum += p[choice[j]];
  for (std::int64_t j = lane; j < k; j += 32) {
    choice_RK[row * k + j] = choice[j];
    const A share = shape.renormalise ? p[choice[j]] / sum : p[choice[j]];
    weight_RK[row * k + j] = rounded<T>(static_cast<A>(shape.scaling) * share);
  }
}

// Penalties of a row go to aux_R and z_R where they are given.
template <class T>
__global__ void __launch_bounds__(kThreads)
    router_backward_kernel(moe::RouterShape shape, const T* logits_RE, const std::int32_t* choice_RK,
                           const accumulator_t<T>* grad_weight_RK, Penalty penalty, T* grad_logits_RE, double* aux_R,
                           double* z_R) {
  using A = accumulator_t<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp, E = shape.experts, k = shape.chosen;
  if (row >= shape.rows) return;
  A *const p = dynamic_shared<A>() + warp * 2 * E, *const grad_p = p + E;
  const A lse = scores_of(shape, logits_RE + row * E, lane, p), scaling = static_cast<A>(shape.scaling);
  const std::int64_t group = penalty.group != nullptr ? penalty.group[row] : 0;
  const double z = penalty.z != nullptr ? penalty.z[group] : 0;
  double aux = 0;
  for (std::int64_t e = lane; e < E; e += 32) {
    const double probability = penalty.probability != nullptr ? penalty.probability[group * E + e] : 0;
    grad_p[e] = static_cast<A>(probability);
    aux += probability * static_cast<double>(p[e]);
  }
  aux = warp_sum(aux);
  if (lane == 0 && aux_R != nullptr) {
    aux_R[row] = aux;
    z_R[row] = z * static_cast<double>(lse) * static_cast<double>(lse);
  }
  __syncwarp();
  const std::int32_t* const choice = choice_RK + row * k;
  const A* const grad = grad_weight_RK + row * k;
  if (lane == 0) {
    A sum = 0, product = 0;
    for (std::int64_t j = 0; j < k; ++j) sum += p[choice[j]];
    for (std::int64_t j = 0; j < k; ++j) product += scaling * grad[j] * p[choice[j]] / sum;
    for (std::int64_t j = 0; j < k; ++j)
      grad_p[choice[j]] += shape.renormalise ? (scaling * grad[j] - product) / sum : scaling * grad[j];
  }
  __syncwarp();
  A mean = 0;
  for (std::int64_t e = lane; e < E; e += 32) mean += p[e] * grad_p[e];
  mean = warp_sum(mean);
  const A from_lse = static_cast<A>(2 * z) * lse;
  for (std::int64_t e = lane; e < E; e += 32)
    grad_logits_RE[row * E + e] =
        narrowed<T>(shape.sigmoid ? p[e] * (A(1) - p[e]) * grad_p[e] : p[e] * (grad_p[e] - mean + from_lse));
}

}  // namespace

template <class T>
void choose_experts(const moe::RouterShape& shape, const T* logits_RE, const std::int32_t* recorded_RK,
                    const accumulator_t<T>* correction_E, std::int32_t* choice_RK, accumulator_t<T>* weight_RK) {
  const RowMemory memory = RowMemory::of(shape, correction_E != nullptr);
  const std::int64_t shared =
      kWarps * (memory.numbers * static_cast<std::int64_t>(sizeof(accumulator_t<T>)) + memory.whole_numbers * 4);
  launch(choose_experts_kernel<T>, {ceil_div(shape.rows, kWarps)}, kThreads, shared, shape, memory, logits_RE,
         recorded_RK, correction_E, choice_RK, weight_RK);
}

template <class T>
void router_backward(const moe::RouterShape& shape, const T* logits_RE, const std::int32_t* choice_RK,
                     const accumulator_t<T>* grad_weight_RK, const Penalty& penalty, T* grad_logits_RE,
                     double* penalties) {
  const Scratch<double> of_row(penalties != nullptr ? 2 * shape.rows : 0);
  double *const aux = penalties != nullptr ? of_row.get() : nullptr, *const z = aux + (aux != nullptr ? shape.rows : 0);
  const std::int64_t shared = kWarps * 2 * shape.experts * static_cast<std::int64_t>(sizeof(accumulator_t<T>));
  launch(router_backward_kernel<T>, {ceil_div(shape.rows, kWarps)}, kThreads, shared, shape, logits_RE, choice_RK,
         grad_weight_RK, penalty, grad_logits_RE, aux, z);
  if (penalties == nullptr) return;
  fill_zero(penalties, 2 * sizeof(double));
  add_sum(shape.rows, aux, penalties);
  add_sum(shape.rows, z, penalties + 1);
}

#define ESPALIER_INSTANTIATE(T)                                                                                  \
  template void choose_experts(const moe::RouterShape&, const T*, const std::int32_t*, const accumulator_t<T>*,  \
                               std::int32_t*, accumulator_t<T>*);                                                \
  template void router_backward(const moe::RouterShape&, const T*, const std::int32_t*, const accumulator_t<T>*, \
                                const Penalty&, T*, double*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
