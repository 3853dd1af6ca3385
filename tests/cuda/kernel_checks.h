// Checks of the emulated kernels, one at a time: operations_test.cpp runs all of them, kernel_mutants.cpp
// runs them on changed kernels until one answer is wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace espalier::testing {

struct KernelCheck {
  enum class Kind {
    answer,        // the CPU's in float64
    orders,        // the same bits in four orders of threads
    instructions,  // of tensor cores: as many as the formula has
  };
  Kind kind;
  std::string group, name;
  std::function<std::string()> problem;  // empty where there is none; a second call remembers the CPU's answer
};

std::vector<KernelCheck> kernel_checks();
// The checks of chunk_checks.cpp; kernel_checks() calls it.
void add_chunk_checks(std::vector<KernelCheck>& checks);

}  // namespace espalier::testing
