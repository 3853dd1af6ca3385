// Random damage to a text, for readers that must end in an answer.
#pragma once

#include <string>

#include "espalier/base/random.h"

namespace espalier::serve {

// One to four bytes changed, added or cut; never empty.
inline std::string damaged(std::string bytes, Random& random) {
  for (std::int64_t changes = random.integer(1, 4); changes > 0; --changes) {
    const auto at = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(bytes.size()) - 1));
    if (random.chance(0.3))
      bytes.erase(at, static_cast<std::size_t>(random.integer(1, 5)));
    else if (random.chance(0.3))
      bytes.insert(at, 1, static_cast<char>(random.integer(0, 255)));
    else
      bytes[at] = static_cast<char>(random.integer(0, 255));
    if (bytes.empty()) bytes = "x";
  }
  return bytes;
}

}  // namespace espalier::serve
