// The peak rate of all threads' multiply-add units: fused products in registers, nothing read or written.
#pragma once

#include "espalier/base/compiled_sets.h"

namespace espalier {
namespace bench {

struct FmaChains {
  int products;               // of a round, in all lanes of all chains
  float (*run)(long rounds);  // their sum, so that they are not left out
};

// Seconds of one float32 FLOP, all threads at work; 0 where the CPU has no fused products.
double peak_seconds_per_flop(double (*clock)() = nullptr);

}  // namespace bench

#define ESPALIER_FMA_CHAINS(set) \
  namespace set {                \
  bench::FmaChains fma_chains(); \
  }
ESPALIER_EACH_SET(ESPALIER_FMA_CHAINS)
#undef ESPALIER_FMA_CHAINS

}  // namespace espalier
