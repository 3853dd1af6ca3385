// The choice among the compiled versions of a kernel: the widest that this processor supports, or the one named by the
// environment variable ESPALIER_INSTRUCTION_SET, so that one machine can test the versions of others.
//
// Decided once; tests may force a narrower set. The libraries (ATen, oneDNN, MKL) decide by their own variables, which
// they read when they are loaded: tools/run_tests.py sets them too.
#pragma once

#include <string>
#include <string_view>

#include "espalier/base/compiled_sets.h"

namespace espalier {

// baseline: what every x86-64 has, without fused multiply-adds, which all others have.
enum class InstructionSet { baseline, avx2, avx512, neon };
// The compiled ones, narrowest first.
inline constexpr InstructionSet kInstructionSets[] = {
#define ESPALIER_ELEMENT(set) InstructionSet::set,
    ESPALIER_EACH_SET(ESPALIER_ELEMENT)
#undef ESPALIER_ELEMENT
};

bool processor_has(InstructionSet set);
// True if a function marked ESPALIER_FUSING may be called.
bool processor_fuses();
const char* name_of(InstructionSet set);

// The set in use: the widest the processor has, or what was forced.
InstructionSet instruction_set();
// For tests. InternalError if the processor lacks the set. Must not be called while a kernel runs.
void force_instruction_set(InstructionSet set);

// The function of this name that was compiled for the set in use:
//   ESPALIER_FOR_SET(row_sums)(row, n);
#define ESPALIER_FOR_SET(...)                                         \
  [] {                                                                \
    switch (::espalier::instruction_set()) {                          \
      ESPALIER_EACH_SET(ESPALIER_RETURN_FUNCTION_OF_SET, __VA_ARGS__) \
      default:                                                        \
        __builtin_unreachable();                                      \
    }                                                                 \
  }()
#define ESPALIER_RETURN_FUNCTION_OF_SET(set, ...) \
  case ::espalier::InstructionSet::set:           \
    return set::__VA_ARGS__;

// How kernels multiply bfloat16 with avx512, always with float32 sums; converted with every other set.
//   converted: as float32 numbers; dot: by the AVX512_BF16 instructions; tiles: by the AMX_BF16 instructions;
//   emulated_tiles: as tiles, the AMX instructions written out in C++ (slow: for tests).
enum class Bfloat16Products { converted, dot, emulated_tiles, tiles };
inline constexpr Bfloat16Products kBfloat16Products[] = {Bfloat16Products::converted, Bfloat16Products::dot,
                                                         Bfloat16Products::emulated_tiles, Bfloat16Products::tiles};

// For tiles it also requests the system's permission, once.
bool processor_has(Bfloat16Products products);
const char* name_of(Bfloat16Products products);

// The best that the processor has (tiles, else dot, else converted), or the forced one; converted below avx512.
Bfloat16Products bfloat16_products();
// For tests, as force_instruction_set.
void force_bfloat16_products(Bfloat16Products products);

// A choice of both, by its name in ESPALIER_INSTRUCTION_SET.
struct InstructionLevel {
  const char* name;
  InstructionSet set;
  Bfloat16Products products;
};
// Narrowest first; the default is the last one that the processor has and that is not emulated.
inline constexpr InstructionLevel kInstructionLevels[] = {
#define ESPALIER_ELEMENT(name, set, products) {name, InstructionSet::set, Bfloat16Products::products},
    ESPALIER_EACH_LEVEL(ESPALIER_ELEMENT)
#undef ESPALIER_ELEMENT
};

bool processor_has(const InstructionLevel& level);
// The levels that this processor has: "baseline, avx2".
std::string instruction_levels();

// The level of that name; OptionError if there is none or the processor lacks it.
const InstructionLevel& instruction_level(std::string_view name);
// The level of ESPALIER_INSTRUCTION_SET, by default the widest; OptionError as above. Both choices above start from it,
// so a program calls it first, while an error can still be reported.
const InstructionLevel& instruction_level();

}  // namespace espalier
