// Prints the instruction levels that this processor has, one a line, the one that is chosen by default last: what
// tools/run_tests.py repeats tests under.
#include <iostream>

#include "espalier/base/instruction_set.h"

int main() {
  for (const espalier::InstructionLevel& level : espalier::kInstructionLevels)
    if (processor_has(level)) std::cout << level.name << '\n';
}
