#include "espalier/ops/cpu/expert_kernels.h"

#include <algorithm>
#include <vector>

namespace espalier::moe {
namespace {
constexpr std::int64_t kParallelFrom = 16384;  // elements below which a second thread costs more than it saves
}

void sort_by_expert(const RouterShape& shape, const std::int32_t* choice_RK, std::int32_t* begin_E1,
                    std::int32_t* row_S, std::int32_t* slot_S) {
  const std::int64_t slots = shape.rows * shape.chosen;
  std::fill(begin_E1, begin_E1 + shape.experts + 1, 0);
  for (std::int64_t s = 0; s < slots; ++s) ++begin_E1[choice_RK[s] + 1];
  for (std::int64_t e = 1; e <= shape.experts; ++e) begin_E1[e] += begin_E1[e - 1];
  std::vector<std::int32_t> next(begin_E1, begin_E1 + shape.experts);
  for (std::int64_t s = 0; s < slots; ++s) {
    const std::int32_t at = next[static_cast<std::size_t>(choice_RK[s])]++;
    slot_S[at] = static_cast<std::int32_t>(s);
    row_S[at] = static_cast<std::int32_t>(s / shape.chosen);
  }
}

template <class T>
void add_expert_rows(const ExpertRange& range, std::int64_t width, const T* y_NM, const accumulator_t<T>* weight_S,
                     accumulator_t<T>* into_RM) {
  using A = accumulator_t<T>;
#pragma omp parallel for schedule(static) if (range.count * width > kParallelFrom)
  for (std::int64_t i = 0; i < range.count; ++i) {
    const A weight = weight_S ? weight_S[range.slot[i]] : A{1};
    const T* y = y_NM + i * width;
    A* into = into_RM + range.row[i] * width;
#pragma omp simd
    for (std::int64_t m = 0; m < width; ++m) into[m] += weight * static_cast<A>(y[m]);
  }
}

template <class T>
void weigh_expert_gradient(const ExpertRange& range, std::int64_t width, std::int64_t inner, const T* act_NF,
                           const T* bias_M, const accumulator_t<T>* weight_S, T* grad_y_NM, T* grad_act_NF,
                           accumulator_t<T>* grad_weight_S) {
  using A = accumulator_t<T>;
#pragma omp parallel for schedule(static) if (range.count * (width + inner) > kParallelFrom)
  for (std::int64_t i = 0; i < range.count; ++i) {
    const T* act = act_NF + i * inner;
    T *grad_y = grad_y_NM + i * width, *grad_act = grad_act_NF + i * inner;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t f = 0; f < inner; ++f) sum += static_cast<A>(act[f]) * static_cast<A>(grad_act[f]);
    if (bias_M != nullptr) {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t m = 0; m < width; ++m) sum += static_cast<A>(bias_M[m]) * static_cast<A>(grad_y[m]);
    }
    grad_weight_S[range.slot[i]] = sum;
    const A weight = weight_S[range.slot[i]];
#pragma omp simd
    for (std::int64_t m = 0; m < width; ++m) grad_y[m] = T(static_cast<A>(grad_y[m]) * weight);
#pragma omp simd
    for (std::int64_t f = 0; f < inner; ++f) grad_act[f] = T(static_cast<A>(grad_act[f]) * weight);
  }
}

template <class T>
void round_sum(std::int64_t count, const T* base, const accumulator_t<T>* sum, T* out) {
  using A = accumulator_t<T>;
#pragma omp parallel for simd schedule(static) if (count > kParallelFrom)
  for (std::int64_t i = 0; i < count; ++i) out[i] = T((base ? static_cast<A>(base[i]) : A{0}) + sum[i]);
}

#define ESPALIER_INSTANTIATE(T)                                                                              \
  template void add_expert_rows<T>(const ExpertRange&, std::int64_t, const T*, const accumulator_t<T>*,      \
                                   accumulator_t<T>*);                                                       \
  template void weigh_expert_gradient<T>(const ExpertRange&, std::int64_t, std::int64_t, const T*, const T*, \
                                         const accumulator_t<T>*, T*, T*, accumulator_t<T>*);                \
  template void round_sum<T>(std::int64_t, const T*, const accumulator_t<T>*, T*);
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::moe
