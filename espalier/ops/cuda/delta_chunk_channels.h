// Rows of a chunk with decays of channels. No decay between two rows is a quotient, which strong decays would make
// infinite: each is a product of the decays of rows, all at most 1. A chunk has four strips of 16 rows. Between rows i
// and j of one strip the product runs along its rows. For row j of strip b and row i of a later strip a it is
//   left_i step_(a-1) ... step_(b+1) right_j
// with left_i from the first row of i's strip to i, right_j from j to the first row of the next strip, and step_a from
// the first row of strip a to that of the next; behind the last strip stands the chunk's last row. left K, left Q and
// right K are tiles for tensor cores, and steps multiply their sums.
#pragma once

#include "espalier/ops/cuda/delta_chunk_tiles.h"

namespace espalier::cuda {

constexpr int kStripRows = 16, kStrips = kChunk / kStripRows;

// Calls body(strip, channel) for all strips and channels, each on a thread of its own; a warp is within a strip.
template <int D, class Body>
__device__ __forceinline__ void for_each_strip(Body body) {
  static_assert(D % 32 == 0);
  for (int item = static_cast<int>(threadIdx.x); item < kStrips * D; item += kSplitThreads) body(item / D, item % D);
}

// The product of the decays of rows first ... last of a channel, each `stride` behind the other.
__device__ __forceinline__ float decay_of_rows(const float* of_channel, int first, int last, int stride) {
  float product = 1;
  for (int row = first; row <= last; ++row) product *= of_channel[row * stride];
  return product;
}

// left times `rows` (high and low numbers in global memory). All threads call.
template <int D>
__device__ __forceinline__ void fill_left(const KeyTile<D>& tile, const bfloat16* rows, const float* decay) {
  for_each_strip<D>([&](int strip, int c) {
    float left = 1;
    for (int i = 0; i < kStripRows; ++i) {
      const int row = strip * kStripRows + i;
      if (i > 0) left *= decay[row * D + c];
      tile.set(row, c, left * load_one(rows, kChunk * D, row * D + c));
    }
  });
}
// right times `rows`, and times the steps between for the strip that is `strips` behind. All threads call.
template <int D>
__device__ __forceinline__ void fill_right(const KeyTile<D>& tile, const bfloat16* rows, const float* decay,
                                           int strips) {
  for_each_strip<D>([&](int strip, int c) {
    if (strip + strips >= kStrips) return;
    const int next = (strip + 1) * kStripRows;
    float right = decay_of_rows(decay + c, next, next + (strips - 1) * kStripRows, D);
    for (int row = next - 1; row >= next - kStripRows; --row) {
      tile.set(row, c, right * load_one(rows, kChunk * D, row * D + c));
      right *= decay[row * D + c];
    }
  });
}

}  // namespace espalier::cuda
