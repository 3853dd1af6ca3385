// Spreads the blocks of a flat buffer over the threads, and picks the instruction set.
#include "espalier/ops/cpu/adamw_kernels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"
#include "espalier/ops/cpu/adamw_ranges.h"

namespace espalier {
namespace {

// Elements of one block; a block's lanes hold few enough terms that the order of blocks is what keeps sums accurate.
constexpr std::int64_t kBlock = 16384;
// Below this many elements a second thread costs more than it saves.
constexpr std::int64_t kParallelFrom = 4 * kBlock;

template <class T>
AdamWRanges<T> ranges() {
  return ESPALIER_FOR_SET(adamw_ranges<T>)();
}

template <class T>
AdamWFactors<T> factors_of(const AdamWStep& step) {
  const auto t = static_cast<double>(step.step);
  const double correction1 = 1 - std::pow(step.beta1, t);
  const double correction2 = 1 - std::pow(step.beta2, t);
  return {.grad_scale = static_cast<T>(step.grad_scale),
          .decay = static_cast<T>(1 - step.lr * step.weight_decay),
          .lerp_weight = static_cast<T>(1 - step.beta1),
          .beta2 = static_cast<T>(step.beta2),
          .one_minus_beta2 = static_cast<T>(1 - step.beta2),
          .correction2_root = static_cast<T>(std::sqrt(correction2)),
          .eps = static_cast<T>(step.eps),
          .minus_step_size = static_cast<T>(-(step.lr / correction1))};
}

}  // namespace

template <class T>
double sum_of_squares(std::int64_t count, const T* x) {
  const AdamWRanges<T> kernels = ranges<T>();
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> sums(static_cast<std::size_t>(blocks));
  double* const sum_of_block = sums.data();
#pragma omp parallel for schedule(static) if (count >= kParallelFrom)
  for (std::int64_t block = 0; block < blocks; ++block)
    sum_of_block[block] = kernels.sum_of_squares(std::min(kBlock, count - block * kBlock), x + block * kBlock);
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

template <class T>
void adamw(std::int64_t count, T* p, const T* grad, T* m, T* v, const AdamWStep& step, bfloat16* rounded) {
  ESPALIER_INTERNAL(step.step >= 1, "step ", step.step);
  const AdamWRanges<T> kernels = ranges<T>();
  const AdamWFactors<T> factors = factors_of<T>(step);
  const std::int64_t blocks = (count + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) if (count >= kParallelFrom)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t begin = block * kBlock;
    kernels.adamw(std::min(kBlock, count - begin), p + begin, grad + begin, m + begin, v + begin, factors,
                  rounded == nullptr ? nullptr : rounded + begin);
  }
}

template double sum_of_squares(std::int64_t, const float*);
template double sum_of_squares(std::int64_t, const double*);
template void adamw(std::int64_t, float*, const float*, float*, float*, const AdamWStep&, bfloat16*);
template void adamw(std::int64_t, double*, const double*, double*, double*, const AdamWStep&, bfloat16*);

}  // namespace espalier
