// Packs blocks of rows into waves, first-fit decreasing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

// The indices of `rows` in each bin, ascending in a bin; bins in the order of their first blocks. A block larger than
// `capacity` has its own bin. The largest bin is about as small as the number of bins allows: waves of equal size need
// less memory than full waves and a remainder. If several ranks share the bins, their number is a multiple of `ranks`,
// provided that there are enough blocks and the bins come out even. O(n log n) per pass. Deterministic.
std::vector<std::vector<std::int32_t>> pack_blocks(std::span<const std::int64_t> rows, std::int64_t capacity,
                                                   std::int64_t ranks = 1);

}  // namespace espalier
