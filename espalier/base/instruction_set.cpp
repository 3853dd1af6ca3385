#include "espalier/base/instruction_set.h"

#include <atomic>

#include "espalier/base/error.h"

namespace espalier {

bool processor_has(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return true;
    case InstructionSet::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case InstructionSet::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  }
  return false;
}

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return "baseline";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "";
}

namespace {

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set = processor_has(InstructionSet::avx512) ? InstructionSet::avx512
                                           : processor_has(InstructionSet::avx2) ? InstructionSet::avx2
                                                                                 : InstructionSet::baseline;
  return set;
}

}  // namespace

InstructionSet instruction_set() { return chosen().load(std::memory_order_relaxed); }

void force_instruction_set(InstructionSet set) {
  ESPALIER_INTERNAL(processor_has(set), "this processor has no ", name_of(set));
  chosen().store(set, std::memory_order_relaxed);
}

}  // namespace espalier
