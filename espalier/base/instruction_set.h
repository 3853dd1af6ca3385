// Which of the compiled versions of a kernel runs: the widest that this processor has.
//
// Asked once; tests may hold the choice to a narrower set.
#pragma once

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

}  // namespace espalier
