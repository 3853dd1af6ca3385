// Whether a CPU's sums have a defined order (docs/mathematics.md, section 18), so that the bits of a row's results
// depend only on the row, its visible rows and the weights: own products replace the library's, and attention does not
// split keys over threads. Set by --products; with auto by the environment variable ESPALIER_PRODUCTS, "own" or
// "library".
#pragma once

#include <cstdint>
#include <optional>

namespace espalier {

// The value of the environment variable. OptionError for any other value.
std::optional<bool> defined_sums_by_environment();

// The value that was set; before that the variable's, or true.
bool defined_sums();
// Sets it for the whole process. Must not be called while an operation runs.
void set_defined_sums(bool defined);

// Bytes of the buffers that a thread keeps after its first own product.
inline constexpr std::int64_t kOwnProductBytes = 1280 << 10;

}  // namespace espalier
