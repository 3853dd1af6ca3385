// The peak rate of all threads' multiply-add units: fused products in registers, nothing read or written.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include "bench/spread.h"
#include "espalier/base/instruction_set.h"

namespace espalier::bench {

// Twelve chains are more than the latency times the number of units of any x86-64 core so far.
inline constexpr int kChains = 12;
inline constexpr long kFmaRounds = 1'500'000;

__attribute__((target("avx512f"))) inline float fma_chains_avx512() {
  const __m512 factor = _mm512_set1_ps(0.999999f), term = _mm512_set1_ps(1e-6f);
  __m512 x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = _mm512_set1_ps(static_cast<float>(i));
  for (long round = 0; round < kFmaRounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) x[i] = _mm512_fmadd_ps(x[i], factor, term);
  for (int i = 1; i < kChains; ++i) x[0] += x[i];
  return x[0][0];
}

__attribute__((target("avx2,fma"))) inline float fma_chains_avx2() {
  const __m256 factor = _mm256_set1_ps(0.999999f), term = _mm256_set1_ps(1e-6f);
  __m256 x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = _mm256_set1_ps(static_cast<float>(i));
  for (long round = 0; round < kFmaRounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) x[i] = _mm256_fmadd_ps(x[i], factor, term);
  for (int i = 1; i < kChains; ++i) x[0] += x[i];
  return x[0][0];
}

// Seconds of one float32 FLOP, all threads at work; 0 where the CPU has no fused products.
inline double peak_seconds_per_flop(double (*clock)() = now) {
  const InstructionSet set = instruction_set();
  if (set == InstructionSet::baseline) return 0;
  const bool wide = set == InstructionSet::avx512;
  float sum = 0;
  const double seconds = seconds_of(
      [&] {
#pragma omp parallel reduction(+ : sum)
        sum += wide ? fma_chains_avx512() : fma_chains_avx2();
      },
      clock);
  [[maybe_unused]] const volatile float kept = sum;  // so that the chains are not left out
  return seconds / (2.0 * kChains * (wide ? 16 : 8) * static_cast<double>(kFmaRounds) * omp_get_max_threads());
}

}  // namespace espalier::bench
