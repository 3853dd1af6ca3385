// Whether a CPU's sums have a defined order (docs/mathematics.md, section 18), so that the bits of a row's
// results depend on the row, on what it sees and on the weights alone: own products instead of the library's, and
// attention that threads do not divide over keys. The environment variable ESPALIER_PRODUCTS says it: "own", or
// "library", which is also what counts where it is absent.
#pragma once

#include <cstdint>

namespace espalier {

// OptionError where the variable has another value.
bool defined_sums();
// For tests. Not to be called while an operation runs.
void force_defined_sums(bool defined);

// What a thread keeps from its first own product on.
inline constexpr std::int64_t kOwnProductBytes = 1280 << 10;

}  // namespace espalier
