// The versions of a kernel that this processor can run, one after the other.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include "espalier/base/instruction_set.h"

namespace espalier::testing {

// Runs body once per instruction set of this processor, on `threads` threads; restores both choices.
template <class Body>
void for_each_set(int threads, Body body) {
  const InstructionSet before = instruction_set();
  const int threads_before = omp_get_max_threads();
  omp_set_num_threads(threads);
  for (InstructionSet set : kInstructionSets) {
    if (!processor_has(set)) continue;
    force_instruction_set(set);
    SCOPED_TRACE(name_of(set));
    body();
  }
  force_instruction_set(before);
  omp_set_num_threads(threads_before);
}

}  // namespace espalier::testing
