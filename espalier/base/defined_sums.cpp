#include "espalier/base/defined_sums.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "espalier/base/error.h"

namespace espalier {
namespace {

bool said_by_environment() {
  constexpr const char* kVariable = "ESPALIER_PRODUCTS";
  const char* const value = std::getenv(kVariable);
  const std::string_view name = value ? value : "";
  if (name != "" && name != "library" && name != "own")
    throw OptionError({kVariable, "library or own", std::string(name), "unset it to use the library"});
  return name == "own";
}

std::atomic<bool>& chosen() {
  static std::atomic<bool> defined = said_by_environment();
  return defined;
}

}  // namespace

bool defined_sums() { return chosen().load(std::memory_order_relaxed); }

void force_defined_sums(bool defined) { chosen().store(defined, std::memory_order_relaxed); }

}  // namespace espalier
