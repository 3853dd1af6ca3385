// Matrices of float numbers on tensor cores: each number is the sum of two bfloat16, high and low, each a tile in
// shared memory whose pieces are placed as in tiles.h. A product of two such matrices is three: high high, high low,
// low high.
//
// Error: bfloat16 rounds to nearest with 8 bits, so |x - high| <= 2^-9 |x| and x = high + low + r with |r| <= 2^-18
// |x|. A product of two numbers leaves out low low and both r, each at most 2^-18 |a b| (and 2^-26 of it more):
//   |sum computed - sum a b| <= (3 2^-18 + (3 n + 1) 2^-24) sum |a b|,  n numbers in float32
// A factor that is bfloat16 itself has no low: two products, and 2^-18 in the place of 3 2^-18.
#pragma once

#include "espalier/ops/cuda/tiles.h"

namespace espalier::cuda {

constexpr int kSplitThreads = 256;  // eight warps

// R rows of W numbers.
template <int W, int R>
struct SplitTile {
  static constexpr int kWidth = W, kRows = R, kLow = W * R * 2, kBytes = 2 * kLow;
  unsigned char* at;

  __device__ __forceinline__ static int offset(int row, int column) {
    return piece_at<W>(row, column / 8) + column % 8 * 2;
  }
  // Two neighbours, the first in an even column.
  __device__ __forceinline__ void set_two(int row, int column, float x, float y) const {
    const int to = offset(row, column);
    *reinterpret_cast<unsigned*>(at + to) = packed(x, y);
    *reinterpret_cast<unsigned*>(at + kLow + to) = packed(x - rounded<bfloat16>(x), y - rounded<bfloat16>(y));
  }
  __device__ __forceinline__ void set(int row, int column, float x) const {
    const int to = offset(row, column);
    *reinterpret_cast<bfloat16*>(at + to) = narrowed<bfloat16>(x);
    *reinterpret_cast<bfloat16*>(at + kLow + to) = narrowed<bfloat16>(x - rounded<bfloat16>(x));
  }
  __device__ __forceinline__ float get(int row, int column) const {
    const int from = offset(row, column);
    return widened(*reinterpret_cast<const bfloat16*>(at + from)) +
           widened(*reinterpret_cast<const bfloat16*>(at + kLow + from));
  }
};

// The same two numbers to a matrix in global memory: its high numbers [rows, width], then the low ones.
__device__ __forceinline__ void store_two(bfloat16* high, std::int64_t low, std::int64_t at, float x, float y) {
  *reinterpret_cast<unsigned*>(high + at) = packed(x, y);
  *reinterpret_cast<unsigned*>(high + low + at) = packed(x - rounded<bfloat16>(x), y - rounded<bfloat16>(y));
}

// One number to such a matrix, and from it.
__device__ __forceinline__ void store_one(bfloat16* high, std::int64_t low, std::int64_t at, float x) {
  high[at] = narrowed<bfloat16>(x);
  high[low + at] = narrowed<bfloat16>(x - rounded<bfloat16>(x));
}
__device__ __forceinline__ float load_one(const bfloat16* high, std::int64_t low, std::int64_t at) {
  return widened(high[at]) + widened(high[low + at]);
}

// Starts to copy a matrix of that form. All threads call.
template <class Tile>
__device__ __forceinline__ void fetch_split(const Tile& tile, const bfloat16* from) {
  constexpr int kPieces = Tile::kWidth / 8, kOfPlane = Tile::kRows * kPieces;
  const SharedPlace to = place_of(tile.at);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kOfPlane; i += kSplitThreads) {
    const int in_plane = i % kOfPlane;
    cp_async<16>(to + i / kOfPlane * Tile::kLow + piece_at<Tile::kWidth>(in_plane / kPieces, in_plane % kPieces),
                 from + i * 8, true);
  }
}

// How a factor stands in its tile: as it is multiplied, or turned.
enum class Stored { plain, turned };

// Adds to 16 rows (from m on) and 16 kPairs columns (from n on) of a product, its terms those from `first` to `end`: a
// [rows, terms], b [terms, columns]. kHigh: all numbers of a are bfloat16.
template <Stored of_a, Stored of_b, int kPairs, bool kHigh = false, class TileA, class TileB>
__device__ __forceinline__ void add_product(float (&sum)[2 * kPairs][4], const TileA& a, int m, const TileB& b, int n,
                                            int end, int first = 0) {
  constexpr bool kTurnedA = of_a == Stored::turned, kTurnedB = of_b == Stored::turned;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int half = lane % 16, upper = lane / 16, mixed = upper * 8 + lane % 8, odd = lane / 8 % 2;
  const SharedPlace at_a = place_of(a.at), at_b = place_of(b.at);
#pragma unroll
  for (int k = first; k < end; k += 16) {
    const int of_lane_a =
        kTurnedA ? piece_at<TileA::kWidth>(k + mixed, m / 8 + odd) : piece_at<TileA::kWidth>(m + half, k / 8 + upper);
    unsigned high_a[4], low_a[4];
    ldmatrix_x4<kTurnedA>(high_a, at_a + of_lane_a);
    if constexpr (!kHigh) ldmatrix_x4<kTurnedA>(low_a, at_a + TileA::kLow + of_lane_a);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int column = n + 16 * pair;
      const int of_lane_b = kTurnedB ? piece_at<TileB::kWidth>(column + mixed, k / 8 + odd)
                                     : piece_at<TileB::kWidth>(k + half, column / 8 + upper);
      unsigned high_b[4], low_b[4];
      ldmatrix_x4<!kTurnedB>(high_b, at_b + of_lane_b);
      ldmatrix_x4<!kTurnedB>(low_b, at_b + TileB::kLow + of_lane_b);
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        float(&to)[4] = sum[2 * pair + two];
        if constexpr (!kHigh) mma_16816(to, low_a, high_b[2 * two], high_b[2 * two + 1]);
        mma_16816(to, high_a, low_b[2 * two], low_b[2 * two + 1]);
        mma_16816(to, high_a, high_b[2 * two], high_b[2 * two + 1]);
      }
    }
  }
}

// Calls body(row, column, x of that column, x of the next) for a lane's numbers of a product: x may be changed.
template <int kTiles, class Body>
__device__ __forceinline__ void for_each_two(float (&sum)[kTiles][4], int m, int n, Body body) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      body(m + lane / 4 + 8 * r, n + 8 * tile + lane % 4 * 2, sum[tile][2 * r], sum[tile][2 * r + 1]);
}
// A lane's numbers of a product from a matrix in float with rows of kWidth, and to it.
template <int kWidth, int kTiles>
__device__ __forceinline__ void load_floats(float (&sum)[kTiles][4], int m, int n, const float* from) {
  for_each_two(sum, m, n,
               [&](int i, int j, float& x, float& y) { x = from[i * kWidth + j], y = from[i * kWidth + j + 1]; });
}
template <int kWidth, int kTiles>
__device__ __forceinline__ void store_floats(float (&sum)[kTiles][4], int m, int n, float* to) {
  for_each_two(sum, m, n, [&](int i, int j, float x, float y) { to[i * kWidth + j] = x, to[i * kWidth + j + 1] = y; });
}

}  // namespace espalier::cuda
