// Common parts of the products of chunks: the lanes' parts of products of 64 rows, and decays.
#pragma once

#include "espalier/ops/cuda/delta_chunks.h"
#include "espalier/ops/cuda/delta_rows.h"
#include "espalier/ops/cuda/split_tiles.h"

namespace espalier::cuda {

constexpr int kChunk = kChunkRows, kBlockWidth = kValueBlock;
using ValueTile = SplitTile<kBlockWidth, kChunk>;  // 32 value channels of a chunk's rows
using SquareTile = SplitTile<kChunk, kChunk>;
template <int D>
using KeyTile = SplitTile<D, kChunk>;
template <int D>
using StateTile = SplitTile<kBlockWidth, D>;

// Numbers of a tile in global memory, of both planes.
constexpr std::int64_t kValueNumbers = 2 * kChunk * kBlockWidth;
template <int D>
inline constexpr std::int64_t kKeyNumbers = 2 * kChunk* D;
template <int D>
inline constexpr std::int64_t kStateNumbers = 2 * D* kBlockWidth;

// Rows as states meet them: with decays of channels gamma Q, gamma K and w K; else Q and K, and products or other
// factors are multiplied by gamma and w.
template <int D>
__device__ __forceinline__ const bfloat16* queries_from_start(const ChunkPass& pass, std::int64_t tile,
                                                              std::int64_t key_tile) {
  return pass.channels ? pass.from_start_q + tile * kKeyNumbers<D> : pass.q + key_tile * kKeyNumbers<D>;
}
template <int D>
__device__ __forceinline__ const bfloat16* keys_from_start(const ChunkPass& pass, std::int64_t tile,
                                                           std::int64_t key_tile) {
  return pass.channels ? pass.from_start_k + tile * kKeyNumbers<D> : pass.k + key_tile * kKeyNumbers<D>;
}
template <int D>
__device__ __forceinline__ const bfloat16* keys_to_end(const ChunkPass& pass, std::int64_t tile,
                                                       std::int64_t key_tile) {
  return pass.channels ? pass.to_end_k + tile * kKeyNumbers<D> : pass.k + key_tile * kKeyNumbers<D>;
}

// Eight warps share a product of 64 rows: each has 16 rows and half of the columns.
struct WarpPart {
  int m, half;
  __device__ __forceinline__ WarpPart()
      : m(static_cast<int>(threadIdx.x) / 32 % 4 * 16), half(static_cast<int>(threadIdx.x) / 128) {}
};

template <int kTiles>
__device__ __forceinline__ void clear(float (&sum)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[tile][i] = 0;
}

// G of a chunk's rows, summed in double: differences of neighbours keep their digits.
__device__ __forceinline__ void sum_decays(const float* log_decay, double (&sums)[kChunk]) {
  if (threadIdx.x < kChunk) {
    double sum = 0;
    for (unsigned i = 0; i <= threadIdx.x; ++i) sum += static_cast<double>(log_decay[i]);
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
}
__device__ __forceinline__ float decay_between(const double (&sums)[kChunk], int later, int earlier) {
  return std::exp(static_cast<float>(sums[later] - sums[earlier]));
}

// P = D Q K^T from the lanes' numbers of Q K^T.
template <int kTiles>
__device__ __forceinline__ void store_seen(float (&of_pairs)[kTiles][4], int m, int n, const double (&sums)[kChunk],
                                           const SquareTile& seen) {
  for_each_two(of_pairs, m, n, [&](int i, int j, float x, float y) {
    seen.set_two(i, j, i < j ? 0.f : decay_between(sums, i, j) * x, i <= j ? 0.f : decay_between(sums, i, j + 1) * y);
  });
}

// A number of grad_o; 0 behind a chunk's rows and a head's channels.
struct GradRows {
  const bfloat16* at;  // of the chunk's first row and the head
  std::int64_t stride, rows, width;

  __device__ __forceinline__ GradRows(const DeltaShape& s, const bfloat16* grad_o_TV, const ChunkRows& chunk,
                                      std::int64_t head)
      : at(grad_o_TV + (chunk.first * s.value_heads + head) * s.value_dim),
        stride(s.value_heads * s.value_dim),
        rows(chunk.rows),
        width(s.value_dim) {}
  // Fills a tile with a block of value channels, rows times `factor` (null: 1). All threads call.
  __device__ __forceinline__ void load(const ValueTile& tile, std::int64_t block, const float* factor) const {
    for (int i = static_cast<int>(threadIdx.x); i < kChunk * kBlockWidth; i += kSplitThreads) {
      const int row = i / kBlockWidth, c = i % kBlockWidth;
      const std::int64_t column = block * kBlockWidth + c;
      const float x = row < rows && column < width ? widened(at[row * stride + column]) : 0.f;
      tile.set(row, c, factor != nullptr ? factor[row] * x : x);
    }
  }
};

}  // namespace espalier::cuda
