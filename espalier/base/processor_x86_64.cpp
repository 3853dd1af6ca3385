// Asks an x86-64 processor which of the instruction sets in compiled_sets.h it has.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "espalier/base/instruction_set.h"

namespace espalier {
namespace {

// A bit of CPUID for features that Clang's __builtin_cpu_supports does not know. The bit says nothing about the system:
// whether it saves the registers is asked apart.
struct ProcessorBit {
  unsigned leaf;
  enum Register { eax, ebx, ecx, edx } where;
  int bit;
};
constexpr ProcessorBit kF16c{1, ProcessorBit::ecx, 29};
constexpr ProcessorBit kAmxTile{7, ProcessorBit::edx, 24}, kAmxBf16{7, ProcessorBit::edx, 22};

bool processor_sets(const ProcessorBit& feature) {
  unsigned registers[4] = {};
  return __get_cpuid_count(feature.leaf, 0, &registers[0], &registers[1], &registers[2], &registers[3]) != 0 &&
         (registers[feature.where] >> feature.bit & 1u) != 0;
}

// Linux keeps the state of tiles only for processes that asked for it (arch_prctl, ARCH_REQ_XCOMP_PERM); the
// permission is the process's, for threads of before and after.
bool system_grants_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

}  // namespace

bool processor_has(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return true;
    case InstructionSet::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && processor_sets(kF16c);
    case InstructionSet::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
    case InstructionSet::neon:
      return false;
  }
  return false;
}

bool processor_fuses() { return __builtin_cpu_supports("fma") != 0; }

bool processor_has(Bfloat16Products products) {
  const bool dot = processor_has(InstructionSet::avx512) && __builtin_cpu_supports("avx512bf16");
  switch (products) {
    case Bfloat16Products::converted:
      return true;
    case Bfloat16Products::dot:
    case Bfloat16Products::emulated_tiles:
      return dot;
    case Bfloat16Products::tiles:
      return dot && processor_sets(kAmxTile) && processor_sets(kAmxBf16) && system_grants_tiles();
  }
  return false;
}

}  // namespace espalier
