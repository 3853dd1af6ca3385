#include "bench/fma_peak.h"

#include <omp.h>

#include "bench/spread.h"
#include "espalier/base/instruction_set.h"

namespace espalier::bench {

double peak_seconds_per_flop(double (*clock)()) {
  if (instruction_set() == InstructionSet::baseline) return 0;
  constexpr long kRounds = 1'500'000;
  const FmaChains chains = ESPALIER_FOR_SET(fma_chains)();
  float sum = 0;
  const double seconds = seconds_of(
      [&] {
#pragma omp parallel reduction(+ : sum)
        sum += chains.run(kRounds);
      },
      clock ? clock : now);
  [[maybe_unused]] const volatile float kept = sum;
  return seconds / (2.0 * chains.products * static_cast<double>(kRounds) * omp_get_max_threads());
}

}  // namespace espalier::bench
