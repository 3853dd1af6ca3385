#include "espalier/base/instruction_set.h"

#include <atomic>
#include <cstdlib>
#include <iterator>

#include "espalier/base/error.h"

namespace espalier {

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return "baseline";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::neon:
      return "neon";
  }
  return "";
}

const char* name_of(Bfloat16Products products) {
  switch (products) {
    case Bfloat16Products::converted:
      return "converted";
    case Bfloat16Products::dot:
      return "dot";
    case Bfloat16Products::emulated_tiles:
      return "emulated tiles";
    case Bfloat16Products::tiles:
      return "tiles";
  }
  return "";
}

bool processor_has(const InstructionLevel& level) { return processor_has(level.set) && processor_has(level.products); }

std::string instruction_levels() {
  std::string names;
  for (const InstructionLevel& level : kInstructionLevels)
    if (processor_has(level)) names += (names.empty() ? "" : ", ") + std::string(level.name);
  return names;
}

namespace {

constexpr const char* kVariable = "ESPALIER_INSTRUCTION_SET";

const InstructionLevel& widest_level() {
  const InstructionLevel* level = std::end(kInstructionLevels) - 1;
  while (!processor_has(*level) || level->products == Bfloat16Products::emulated_tiles) --level;
  return *level;
}

}  // namespace

const InstructionLevel& instruction_level(std::string_view name) {
  for (const InstructionLevel& level : kInstructionLevels)
    if (level.name == name && processor_has(level)) return level;
  throw OptionError({kVariable, "an instruction set of this processor: " + instruction_levels(), std::string(name),
                     "unset it to use the widest"});
}

const InstructionLevel& instruction_level() {
  static const InstructionLevel& level = [&]() -> const InstructionLevel& {
    const char* name = std::getenv(kVariable);
    return name && *name ? instruction_level(name) : widest_level();
  }();
  return level;
}

namespace {

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set = instruction_level().set;
  return set;
}
std::atomic<Bfloat16Products>& chosen_products() {
  static std::atomic<Bfloat16Products> products = instruction_level().products;
  return products;
}

}  // namespace

InstructionSet instruction_set() { return chosen().load(std::memory_order_relaxed); }

void force_instruction_set(InstructionSet set) {
  ESPALIER_INTERNAL(processor_has(set), "this processor has no ", name_of(set));
  chosen().store(set, std::memory_order_relaxed);
}

Bfloat16Products bfloat16_products() {
  return instruction_set() == InstructionSet::avx512 ? chosen_products().load(std::memory_order_relaxed)
                                                     : Bfloat16Products::converted;
}

void force_bfloat16_products(Bfloat16Products products) {
  ESPALIER_INTERNAL(processor_has(products), "this processor has no ", name_of(products), " for bfloat16");
  chosen_products().store(products, std::memory_order_relaxed);
}

}  // namespace espalier
