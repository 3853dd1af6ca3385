// Deliberate faults, so that tests can show that the tests would notice them: `if (ESPALIER_MUTATION(mask_leak)) ...`.
//
// In every ordinary build the macro is the constant false and the line is gone. Only the mutation tests define
// ESPALIER_MUTATIONS, for copies of their own of the files that have such lines; it then asks which fault is switched
// on. A fault is one line, at the place where a person would have made the mistake. The list:
// tests/mutation/faults.cpp.
#pragma once

#ifdef ESPALIER_MUTATIONS
namespace espalier::mutation {
// Whether the fault of this name is switched on. Defined by the tests; called from one thread.
bool active(const char* name);
}  // namespace espalier::mutation
#define ESPALIER_MUTATION(name) ::espalier::mutation::active(#name)
#else
#define ESPALIER_MUTATION(name) false
#endif
