// Which of the compiled versions of a kernel runs: the widest that this processor has, or the one that the environment
// variable ESPALIER_INSTRUCTION_SET names, so that one machine can test what others will run.
//
// Asked once; tests may hold the choice to a narrower set. The libraries (ATen, oneDNN, MKL) choose for themselves, by
// variables of their own that they read when they are loaded: tools/run_tests.py sets them beside ours.
#pragma once

#include <string>
#include <string_view>

namespace espalier {

enum class InstructionSet { baseline, avx2, avx512 };
inline constexpr InstructionSet kInstructionSets[] = {InstructionSet::baseline, InstructionSet::avx2,
                                                      InstructionSet::avx512};

bool processor_has(InstructionSet set);
const char* name_of(InstructionSet set);

// The set in use: the widest the processor has, or what was forced.
InstructionSet instruction_set();
// For tests. InternalError where the processor lacks the set. Not to be called while a kernel runs.
void force_instruction_set(InstructionSet set);

// The one of three functions that was compiled for the set in use:
//   function_for_set(baseline::row_sums, avx2::row_sums, avx512::row_sums)(row, n);
template <class Function>
Function* function_for_set(Function* baseline, Function* avx2, Function* avx512) {
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return avx512;
    case InstructionSet::avx2:
      return avx2;
    case InstructionSet::baseline:
      break;
  }
  return baseline;
}

// How kernels multiply bfloat16 where the set in use is avx512; always with float32 sums.
//   converted: as float32 numbers; dot: by the AVX512_BF16 instructions; tiles: by those of AMX_BF16;
//   emulated_tiles: as tiles, the AMX instructions written out in C++ (slow: for tests).
enum class Bfloat16Products { converted, dot, emulated_tiles, tiles };
inline constexpr Bfloat16Products kBfloat16Products[] = {Bfloat16Products::converted, Bfloat16Products::dot,
                                                         Bfloat16Products::emulated_tiles, Bfloat16Products::tiles};

// tiles: also asks the system, once, to let this process use them.
bool processor_has(Bfloat16Products products);
const char* name_of(Bfloat16Products products);

// tiles, else dot, else converted, by what the processor has, or what was forced; converted below avx512.
Bfloat16Products bfloat16_products();
// For tests, as force_instruction_set.
void force_bfloat16_products(Bfloat16Products products);

// A choice of both by the name that ESPALIER_INSTRUCTION_SET takes.
struct InstructionLevel {
  const char* name;
  InstructionSet set;
  Bfloat16Products products;
};
// Narrowest first; what the processor has and is not emulated is chosen from the end.
inline constexpr InstructionLevel kInstructionLevels[] = {
    {"baseline", InstructionSet::baseline, Bfloat16Products::converted},
    {"avx2", InstructionSet::avx2, Bfloat16Products::converted},
    {"avx512", InstructionSet::avx512, Bfloat16Products::converted},
    {"emulated_amx_bf16", InstructionSet::avx512, Bfloat16Products::emulated_tiles},
    {"avx512_bf16", InstructionSet::avx512, Bfloat16Products::dot},
    {"amx_bf16", InstructionSet::avx512, Bfloat16Products::tiles}};

bool processor_has(const InstructionLevel& level);
// The levels that this processor has: "baseline, avx2".
std::string instruction_levels();

// The level of that name; OptionError where there is none or the processor lacks it.
const InstructionLevel& instruction_level(std::string_view name);
// The level of ESPALIER_INSTRUCTION_SET, by default the widest; OptionError as above. Both choices above start from
// it, so that a program asks here first, where an error can still be reported.
const InstructionLevel& instruction_level();

}  // namespace espalier
