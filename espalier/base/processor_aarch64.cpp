// What an aarch64 processor has, of the sets of compiled_sets.h.
#include "espalier/base/instruction_set.h"

namespace espalier {

bool processor_has(InstructionSet set) { return set == InstructionSet::neon; }

bool processor_fuses() { return true; }

bool processor_has(Bfloat16Products products) { return products == Bfloat16Products::converted; }

}  // namespace espalier
