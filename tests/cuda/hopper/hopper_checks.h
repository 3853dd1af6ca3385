// Checks of the emulated kernels for compute capability 9.0, in the form of kernel_checks.h.
#pragma once

#include "tests/cuda/kernel_checks.h"

namespace espalier::testing {

// Groups: "Hopper" has the attention cases of selftest in bfloat16, "HopperTiles" the tiles that are multiplied.
std::vector<KernelCheck> hopper_checks();

}  // namespace espalier::testing
