// The room of attention by matrix products on a GPU (ops/cuda/wide_attention.h), for heads of more elements than the
// other kernels take. It holds the scores of some rows of a head with all keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "espalier/device/buffers.h"

namespace espalier {

struct WideRoom {
  // Tests lower it, so that small problems run in several blocks.
  static inline std::int64_t most_bytes = std::int64_t{256} << 20;

  std::int64_t rows = 0;     // of queries at a time
  std::int64_t columns = 0;  // of their scores: keys of the path, then own keys, each side a multiple of 8
  std::int64_t row_bytes = 0;

  // Scores in the accumulator dtype and weights in the run's, both twice with gradients; a row of results.
  static WideRoom of(ElementBytes bytes, std::int64_t queries, std::int64_t path_rows, std::int64_t own_rows,
                     std::int64_t width, bool gradients) {
    WideRoom room;
    room.columns = padded(path_rows) + padded(own_rows);
    room.row_bytes =
        (gradients ? 2 : 1) * room.columns * (bytes.accumulator + bytes.activation) + width * bytes.accumulator;
    room.rows = std::clamp<std::int64_t>(most_bytes / room.row_bytes, 1, std::max<std::int64_t>(queries, 1));
    return room;
  }
  // Rows of weights that begin at multiples of 16 bytes suit tensor cores.
  static std::int64_t padded(std::int64_t keys) { return (keys + 7) / 8 * 8; }

  std::int64_t bytes() const { return rows * row_bytes; }
};

}  // namespace espalier
