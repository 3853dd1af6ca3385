// Data in flight to or from a store (saved/spill_queue.h): bytes of a chunk, and how many chunks there are.
#pragma once

#include <algorithm>
#include <cstdint>

namespace espalier {

inline constexpr std::int64_t kSpillChunkBytes = std::int64_t{1} << 20;
inline constexpr std::int64_t kFewestSpillChunks = 2, kMostSpillChunks = 64;

// An eighth of the offloaded bytes, within these bounds.
inline std::int64_t chunks_in_flight(std::int64_t stored_bytes) {
  return std::clamp(stored_bytes / (8 * kSpillChunkBytes), kFewestSpillChunks, kMostSpillChunks);
}

}  // namespace espalier
