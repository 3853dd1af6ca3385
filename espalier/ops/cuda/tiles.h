// Tiles of rows of one head in shared memory, and the common parts of the tiled attention kernels.
//
// Rows of a tile have D elements, a multiple of 32. Their 16-byte pieces are stored in a different order in each of
// eight rows, so that ldmatrix, which reads the same piece of eight rows at a time, meets each bank once. Rows of an
// odd number of 64 bytes start at alternating halves of the banks, so four orders, each for two rows, are enough.
#pragma once

#include "espalier/ops/cuda/ptx.h"

namespace espalier::cuda {

constexpr int kTileThreads = 128;  // four warps
constexpr int kTileKeys = 64;      // own keys whose subtree ends and depths are summed up (TileFacts)

template <int D>
__device__ __forceinline__ bfloat16* piece_at(bfloat16* tile, int row, int piece) {
  static_assert(D % 32 == 0);
  return tile + row * D + (D % 64 == 0 ? piece ^ (row & 7) : piece ^ (row / 2 & 3)) * 8;
}

// Starts to copy rows [first, first + kRows) of a head; rows from `rows` on are zeros.
template <int D, int kRows>
__device__ __forceinline__ void fetch_tile(bfloat16* tile, const bfloat16* data, std::int64_t stride,
                                           std::int64_t first, std::int64_t rows) {
  constexpr int kPieces = D / 8;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPieces; i += kTileThreads) {
    const int r = i / kPieces, p = i % kPieces;
    const bool inside = first + r < rows;
    cp_async_16(piece_at<D>(tile, r, p), data + (inside ? (first + r) * stride : 0) + p * 8, inside);
  }
}

}  // namespace espalier::cuda
