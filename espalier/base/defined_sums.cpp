#include "espalier/base/defined_sums.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "espalier/base/error.h"

namespace espalier {
namespace {

std::atomic<bool>& chosen() {
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

bool defined_sums() { return chosen().load(std::memory_order_relaxed); }

void set_defined_sums(bool defined) { chosen().store(defined, std::memory_order_relaxed); }

}  // namespace espalier
