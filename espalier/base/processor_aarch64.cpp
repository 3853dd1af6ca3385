// Says which of the instruction sets in compiled_sets.h every aarch64 processor has.
#include "espalier/base/instruction_set.h"

namespace espalier {

bool processor_has(InstructionSet set) { return set == InstructionSet::neon; }

bool processor_fuses() { return true; }

bool processor_has(Bfloat16Products products) { return products == Bfloat16Products::converted; }

}  // namespace espalier
