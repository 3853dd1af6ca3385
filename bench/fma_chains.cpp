// Chains of fused multiply-adds in registers, compiled once per instruction set for fma_peak.h.
#include "espalier/base/simd.h"

#include "bench/fma_peak.h"

namespace espalier::ESPALIER_SIMD {

bench::FmaChains fma_chains() {
  // More than the latency times the number of units of any core so far, and no more than its registers.
  constexpr int kChains = kVectorRegisters == 32 ? 24 : 12;
  return {kChains * kLanes<float>, [](long rounds) {
            const FloatVector factor = broadcast(0.999999f), term = broadcast(1e-6f);
            FloatVector x[kChains];
            for (int i = 0; i < kChains; ++i) x[i] = broadcast(static_cast<float>(i));
            for (long round = 0; round < rounds; ++round)
#pragma GCC unroll 24
              for (int i = 0; i < kChains; ++i) x[i] = fma(x[i], factor, term);
            for (int i = 1; i < kChains; ++i) x[0] += x[i];
            return sum(x[0]);
          }};
}

}  // namespace espalier::ESPALIER_SIMD
