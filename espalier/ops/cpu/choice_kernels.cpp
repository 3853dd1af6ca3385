// compute_weights for one instruction set. Contract: choice_kernels.h.
#include "espalier/ops/cpu/choice_kernels.h"

#include "espalier/base/simd.h"

namespace espalier::ESPALIER_SIMD {
namespace {

template <class A>
void row_weights(const A* logit, std::int64_t n, double max_logit, double inverse, double* weight, double* run_sum) {
  const DoubleVector offset = broadcast(max_logit), factor = broadcast(inverse);
  for (std::int64_t begin = 0; begin < n; begin += kWeightRun) {
    const std::int64_t count = n - begin < kWeightRun ? n - begin : kWeightRun;
    DoubleVector total{};
    for_lanes<double>(count, [&](std::int64_t v, int lanes) {
      double row[kLanes<double>] = {};
      for (int lane = 0; lane < lanes; ++lane) row[lane] = static_cast<double>(logit[begin + v + lane]);
      double* at = weight + begin + v;
      store_some(at, exp((load(row) - offset) * factor), lanes);
      total += load_some(at, lanes);
    });
    run_sum[begin / kWeightRun] = sum(total);
  }
}

}  // namespace

void row_weights_float(const float* logit, std::int64_t n, double max_logit, double inverse, double* weight,
                       double* run_sum) {
  row_weights(logit, n, max_logit, inverse, weight, run_sum);
}
void row_weights_double(const double* logit, std::int64_t n, double max_logit, double inverse, double* weight,
                        double* run_sum) {
  row_weights(logit, n, max_logit, inverse, weight, run_sum);
}

}  // namespace espalier::ESPALIER_SIMD
