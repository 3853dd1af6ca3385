#include "espalier/options/memory_budget.h"

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/base/units.h"
#include "espalier/options/options.h"

namespace espalier {

std::string Budget::text() const {
  if (given || bytes == 0) return format_bytes(bytes);
  return text_of(format_bytes(bytes), ": ", format_bytes(held), " held, and ", format_bytes(beside_held() + margin),
                 " free less a tenth");
}

Budget given_budget(const Options& options) {
  if (options.memory_budget.empty()) return {};
  const std::int64_t bytes = parse_bytes(options.memory_budget, "--memory-budget");
  if (bytes == 0)
    throw OptionError({"--memory-budget", "at least a byte", "0", "Leave it out to use the free memory, less a tenth"});
  return {.bytes = bytes, .given = true};
}

Budget automatic_budget(std::int64_t held_bytes, std::int64_t free_bytes, std::int64_t sharing_processes) {
  constexpr std::int64_t kLeast = 1 << 20;
  const std::int64_t free = free_bytes / sharing_processes, margin = free / 10;
  return {.bytes = held_bytes + std::max(free - margin, kLeast), .held = held_bytes, .margin = margin};
}

}  // namespace espalier
