#include "espalier/base/defined_sums.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "espalier/base/error.h"
#include "espalier/base/instruction_set.h"

namespace espalier {
namespace {

enum class Choice { own, library, by_dtype };

Choice choice_of(std::optional<bool> own) {
  if (!own) return Choice::by_dtype;
  return *own ? Choice::own : Choice::library;
}

std::atomic<Choice>& chosen() {
  static std::atomic<Choice> choice = choice_of(defined_sums_by_environment().value_or(true));
  return choice;
}
std::atomic<bool>& in_force() {
  static std::atomic<bool> defined = defined_sums_by_environment().value_or(true);
  return defined;
}

}  // namespace

std::optional<bool> defined_sums_by_environment() {
  constexpr const char* kVariable = "ESPALIER_PRODUCTS";
  const char* const value = std::getenv(kVariable);
  const std::string_view name = value ? value : "";
  if (name == "" || name == "auto") return std::nullopt;
  if (name != "library" && name != "own")
    throw OptionError({kVariable, "own, library or auto", std::string(name), "unset it, or give --products"});
  return name == "own";
}

void choose_defined_sums(std::optional<bool> said, DType dtype) {
  const std::optional<bool> by_environment = defined_sums_by_environment();  // a wrong value is reported in any case
  chosen().store(choice_of(said ? said : by_environment), std::memory_order_relaxed);
  in_force().store(defined_sums(dtype), std::memory_order_relaxed);
}

void set_defined_sums(bool defined) {
  chosen().store(choice_of(defined), std::memory_order_relaxed);
  in_force().store(defined, std::memory_order_relaxed);
}

bool defined_sums() { return in_force().load(std::memory_order_relaxed); }

bool defined_sums(DType dtype) {
  switch (chosen().load(std::memory_order_relaxed)) {
    case Choice::own:
      return true;
    case Choice::library:
      return false;
    case Choice::by_dtype:
      return dtype != DType::bfloat16 || bfloat16_products() != Bfloat16Products::tiles;
  }
  return true;
}

}  // namespace espalier
