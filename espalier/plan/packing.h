// First-fit decreasing: which blocks of rows go together into one wave.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

// Indices of `rows` for each bin; in a bin, and among bins, ascending. A block larger than `capacity` has a bin of its
// own. Once the number of bins is known, the largest bin is made as small as that number allows: waves of equal size
// need less memory than full ones and a remainder. Where so many ranks share the bins there is a multiple of `ranks` of
// them, if there are blocks enough and they come out even. O(n log n) a pass. Deterministic.
std::vector<std::vector<std::int32_t>> pack_blocks(std::span<const std::int64_t> rows, std::int64_t capacity,
                                                   std::int64_t ranks = 1);

}  // namespace espalier
