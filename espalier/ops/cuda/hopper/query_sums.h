// Sums of gradients of queries in global memory, to which blocks of keys add in turn (backward_keys.cu). Each tile of
// queries has its sums in an order that depends on the shape alone. Blocks wait for each other, so all blocks of a
// launch have to be on the GPU at a time (launch_together).
#pragma once

#include "espalier/ops/cuda/hopper/backward.h"
#include "espalier/ops/cuda/hopper/key_stages.h"

namespace espalier::cuda::hopper {

// The tiles of all queries of a key/value head, head by head, in a circle: block b begins with tile b. At any moment
// the blocks add to different tiles, and a tile has its sums from the block that began with it, then from the one
// before, and so on. There are at least as many tiles as blocks.
struct Circle {
  int tiles, blocks;

  // How many of the blocks add to a tile before this one.
  __device__ __forceinline__ int turn(int block, int tile) const {
    return block <= tile ? min(tile, blocks - 1) - block : tile + blocks - block;
  }
};

// Shared memory of the sums behind `kBegin`: slopes [queries, keys] for the product with keys, twice so that a pass
// need not wait for the one before, and a place of sums on their way to global memory.
template <int kBegin>
struct SumsRoom {
  static constexpr int kSlopeBytes = kGroups * kPartBytes<kSumQueries>;
  static constexpr int kSlopes = (kBegin + 1023) / 1024 * 1024, kSums = kSlopes + 2 * kSlopeBytes,
                       kFull = kSums + kSumBytes, kEmpty = kFull + 8, kBytes = kEmpty + 8;
};

// The barriers of the place of sums: full by all multiplying warps, empty by the warp that adds them.
struct SumsBarriers {
  SharedPlace full, empty;

  __device__ __forceinline__ void init() const {
    barrier_init(full, 4 * kGroups);
    barrier_init(empty, 1);
  }
};

// Stores this thread's slopes [64 keys, 64 queries] as the columns of its group in a tile [queries, keys].
__device__ __forceinline__ void store_slopes(SharedPlace tile, int group, const unsigned (&slopes)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int piece = 2 * warp + lane / 8 % 2;  // eight keys
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int query = 16 * k + lane / 16 * 8 + lane % 8;
    stmatrix_x4<true>(tile + group * kPartBytes<kSumQueries> + query * kPartRowBytes + (piece ^ query % 8) * 16,
                      slopes[k]);
  }
}

// Adds the sums of all tiles, one after another, as they come and as their turn does: one thread.
__device__ __forceinline__ void add_sums(const QuerySums& sums, const Circle& circle, int block, int first_head,
                                         SharedPlace place, const SumsBarriers& barriers) {
  int tile = block;
#pragma unroll 1
  for (int n = 0; n < circle.tiles; ++n) {
    const std::int64_t at = std::int64_t{first_head} * sums.tiles + tile;
    barrier_wait(barriers.full, n % 2);
    turn_wait(sums.turns + at, sums.before + circle.turn(block, tile));
    bulk_add(sums.data + at * (kSumBytes / 4), place, kSumBytes);
    bulk_commit();
    bulk_read<0>();
    barrier_arrive(barriers.empty);
    bulk_done<0>();
    turn_pass(sums.turns + at);
    if (++tile == circle.tiles) tile = 0;
  }
}

}  // namespace espalier::cuda::hopper
