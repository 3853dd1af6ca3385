// Tiles of rows of one head in shared memory, and the common parts of the tiled attention kernels.
//
// Rows of a tile have D elements, a multiple of 32. Their 16-byte pieces are stored in a different order in each of
// eight rows, so that ldmatrix, which reads the same piece of eight rows at a time, meets each bank once. Rows of an
// odd number of 64 bytes start at alternating halves of the banks, so four orders, each for two rows, are enough.
#pragma once

#include "espalier/ops/cuda/ptx.h"

namespace espalier::cuda {

constexpr int kTileThreads = 128;  // four warps
constexpr int kTileKeys = 64;      // own keys of a tile (TileFacts: the range of their subtree ends and depths)

// Bytes from a tile's begin to a piece of a row.
template <int D>
__device__ __forceinline__ int piece_at(int row, int piece) {
  static_assert(D % 32 == 0);
  return row * D * 2 + (D % 64 == 0 ? piece ^ (row & 7) : piece ^ (row / 2 & 3)) * 16;
}

// Where a lane finds pieces first_piece, first_piece + 2, ... of its row in a tile, and of rows a multiple of eight
// further: pieces change places within 128 (64) bytes, so that a few offsets serve all.
template <int D>
struct LanePieces {
  static constexpr int kOffsets = D % 64 == 0 ? 4 : 2;
  int offset[kOffsets];

  __device__ __forceinline__ LanePieces(int row, int first_piece) {
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) offset[i] = piece_at<D>(row, first_piece + 2 * i);
  }
  // The piece 2 `pair` further, of the row `rows` further.
  __device__ __forceinline__ int at(int rows, int pair) const {
    return offset[pair % kOffsets] + rows * D * 2 + pair / kOffsets * kOffsets * 32;
  }
};

// Starts to copy rows [first, first + kRows) of a head; rows from `rows` on are zeros. Eight (four) neighbouring
// threads copy 128 (64) bytes of a row.
template <int D, int kRows>
__device__ __forceinline__ void fetch_tile(SharedPlace tile, const bfloat16* data, int stride, int first, int rows) {
  constexpr int kWide = D % 64 == 0 ? 8 : 4, kRowsAtOnce = kTileThreads / kWide;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0 && D / 8 % kWide == 0);
  const int row = static_cast<int>(threadIdx.x) / kWide, piece = static_cast<int>(threadIdx.x) % kWide;
  const bfloat16* from = data + static_cast<std::int64_t>(first + row) * stride + piece * 8;
  const SharedPlace to = tile + piece_at<D>(row, piece);
#pragma unroll
  for (int r = 0; r < kRows; r += kRowsAtOnce) {
    const bool inside = first + row + r < rows;
#pragma unroll
    for (int p = 0; p < D / 8; p += kWide) cp_async<16>(to + r * D * 2 + p * 16, from + p * 8, inside);
    from += static_cast<std::int64_t>(kRowsAtOnce) * stride;
  }
}

}  // namespace espalier::cuda
