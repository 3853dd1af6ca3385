// The smallest and largest number of the rows of each tile. A warp has a tile.
#include "espalier/ops/cuda/hopper/tile_facts.h"

namespace espalier::cuda::hopper {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;

__device__ __forceinline__ std::int32_t warp_least(std::int32_t x) { return -warp_max(-x); }

// For tiles of `rows` own rows; rows behind the last one have 0. No number is negative.
__global__ void __launch_bounds__(kThreads)
    key_range_kernel(std::int64_t own_rows, int rows, std::int64_t tiles, const std::int32_t* numbers,
                     std::int32_t* most, std::int32_t* least) {
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (tile >= tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int32_t largest = 0, smallest = 0x7fffffff;
  for (int r = lane; r < rows; r += 32) {
    const std::int64_t row = tile * rows + r;
    const std::int32_t number = row < own_rows ? numbers[row] : 0;
    largest = max(largest, number), smallest = min(smallest, number);
  }
  largest = warp_max(largest), smallest = warp_least(smallest);
  if (lane == 0) most[tile] = largest, least[tile] = smallest;
}

// For tiles of queries the first depths that they see.
__global__ void __launch_bounds__(kThreads) query_range_kernel(Shape shape, int queries, std::int64_t tiles,
                                                               std::int32_t* least_first, std::int32_t* most_first) {
  const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (tile >= tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int32_t largest = -0x7fffffff, smallest = 0x7fffffff;
  for (int r = lane; r < queries; r += 32) {
    const std::int64_t query = tile * queries + r;
    if (query >= shape.query_rows) break;
    const std::int32_t first = first_depth_of(shape, own_row_of(shape, query));
    largest = max(largest, first), smallest = min(smallest, first);
  }
  largest = warp_max(largest), smallest = warp_least(smallest);
  if (lane == 0) most_first[tile] = largest, least_first[tile] = smallest;
}

}  // namespace

Facts::Facts(const Shape& shape, int keys, int queries)
    : windows_(shape.window > 0),
      tiles_(ceil_div(shape.own_rows, keys)),
      query_tiles_(windows_ ? ceil_div(shape.query_rows, queries) : 0),
      memory_(tiles_ * (windows_ ? 4 : 2) + query_tiles_ * 2) {
  const Blocks blocks{ceil_div(tiles_, kWarps)};
  std::int32_t* const ends = memory_.get();
  facts_.most_end = ends, facts_.least_end = ends + tiles_;
  launch(key_range_kernel, blocks, kThreads, 0, shape.own_rows, keys, tiles_, shape.subtree_end, ends, ends + tiles_);
  if (!windows_) return;
  std::int32_t *const depths = ends + 2 * tiles_, *const first = depths + 2 * tiles_;
  facts_.most_depth = depths, facts_.least_depth = depths + tiles_;
  facts_.least_first = first, facts_.most_first = first + query_tiles_;
  launch(key_range_kernel, blocks, kThreads, 0, shape.own_rows, keys, tiles_, shape.depth, depths, depths + tiles_);
  launch(query_range_kernel, {ceil_div(query_tiles_, kWarps)}, kThreads, 0, shape, queries, query_tiles_, first,
         first + query_tiles_);
}

}  // namespace espalier::cuda::hopper
