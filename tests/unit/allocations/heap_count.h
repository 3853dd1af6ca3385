// Requests of this process to the heap: every malloc, calloc, realloc and aligned allocation, of libraries too, because
// the program's own definitions of these functions come before the C library's.
#pragma once

#include <cstdint>
#include <vector>

namespace espalier::testing {

struct HeapCount {
  std::int64_t calls = 0, bytes = 0;
  std::vector<std::int64_t> large;  // sizes of blocks of at least kLargeBytes, in order; the first kMostLarge
};
inline constexpr std::int64_t kLargeBytes = 64 << 10, kMostLarge = 1024;

// False under a sanitizer, which counts for itself.
bool heap_is_counted();

// From here on / until here; one at a time.
void start_counting();
HeapCount stop_counting();

}  // namespace espalier::testing
