// Which of the three compiled versions of a kernel runs: the widest that this processor has.
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

// The one of three functions that was compiled for the set in use, called:
//   const Table table = call_for_set(baseline::make_table, avx2::make_table, avx512::make_table);
template <class Table>
Table call_for_set(Table (*baseline)(), Table (*avx2)(), Table (*avx512)()) {
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return avx512();
    case InstructionSet::avx2:
      return avx2();
    case InstructionSet::baseline:
      break;
  }
  return baseline();
}

}  // namespace espalier
