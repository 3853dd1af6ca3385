// Whether a CPU's sums have a defined order (docs/mathematics.md, section 18), so that the bits of a row's
// results depend on the row, on what it sees and on the weights alone: own products instead of the library's, and
// attention that threads do not divide over keys. --products says it, and where it says auto the environment variable
// ESPALIER_PRODUCTS, "own" or "library".
#pragma once

#include <cstdint>
#include <optional>

namespace espalier {

// The value of the environment variable. OptionError for any other value.
std::optional<bool> defined_sums_by_environment();

// As it was set; before that what the variable says, or true.
bool defined_sums();
// From now on, for the whole process. Not to be called while an operation runs.
void set_defined_sums(bool defined);

// Buffers that a thread keeps after its first own product.
inline constexpr std::int64_t kOwnProductBytes = 1280 << 10;

}  // namespace espalier
