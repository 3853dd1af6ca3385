// True if a CPU's sums have a defined order (docs/mathematics.md, section 18), so that the bits of a row's results
// depend only on the row, its visible rows and the weights: own products replace the library's, and attention does not
// split keys over threads. Chosen by --products; with auto by the environment variable ESPALIER_PRODUCTS, "own" or
// "library"; without either by the dtype of the run.
#pragma once

#include <cstdint>
#include <optional>

#include "espalier/base/dtype.h"

namespace espalier {

// The value of the environment variable. OptionError for any other value.
std::optional<bool> defined_sums_by_environment();

// Sets the value for the whole process, for a run in `dtype`. said: the choice of --products; empty: that of the
// environment, then of the dtype. By dtype the library multiplies bfloat16 if the processor has tiles for it (AMX),
// several times as fast, and own products do everything else. Must not be called while an operation runs. OptionError
// for a wrong value of the variable.
void choose_defined_sums(std::optional<bool> said, DType dtype);
// Sets the value itself, for runs in any dtype.
void set_defined_sums(bool defined);

// The value in force; before it is set, the environment variable's, or true.
bool defined_sums();
// The value that the same choice gives a run in another dtype.
bool defined_sums(DType dtype);

// Bytes of the buffers that a thread keeps after its first own product.
inline constexpr std::int64_t kOwnProductBytes = 1280 << 10;

}  // namespace espalier
