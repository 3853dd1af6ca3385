// Tiles of keys and values that pass through stages of shared memory: the thread that has them copied, and the barriers
// between it and the warpgroups that multiply them.
#pragma once

#include "espalier/ops/cuda/hopper/launch.h"
#include "espalier/ops/cuda/hopper/tile_facts.h"

namespace espalier::cuda::hopper {

inline constexpr int kGroups = 2;  // warpgroups that multiply, 64 rows each
inline constexpr int kStages = 2;
inline constexpr int kBlockThreads = 3 * kGroupThreads;  // one more copies
inline constexpr int kBlockQueries = 64 * kGroups;

struct KeyMaps {
  TensorMap path_k, path_v, own_k, own_v;
};

// A stage, and the parity of its barriers' phases.
struct Stage {
  int number;
  unsigned parity;
  __device__ __forceinline__ void advance() {
    if (++number == kStages) number = 0, parity ^= 1;
  }
};

// A barrier by name for two streams of tiles: a stage is full when its tile has come, and empty when all multiplying
// warps are done with it. One further barrier is for tiles that stay.
struct StageBarriers {
  static constexpr int kBytes = 8 * (4 * kStages + 1);
  SharedPlace at;

  __device__ __forceinline__ SharedPlace full_first(int stage) const { return at + 8 * stage; }
  __device__ __forceinline__ SharedPlace full_second(int stage) const { return at + 8 * (kStages + stage); }
  __device__ __forceinline__ SharedPlace empty_first(int stage) const { return at + 8 * (2 * kStages + stage); }
  __device__ __forceinline__ SharedPlace empty_second(int stage) const { return at + 8 * (3 * kStages + stage); }
  __device__ __forceinline__ SharedPlace full_staying() const { return at + 8 * 4 * kStages; }

  __device__ __forceinline__ void init() const {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full_first(s), 1);
      barrier_init(full_second(s), 1);
      barrier_init(empty_first(s), 4 * kGroups);
      barrier_init(empty_second(s), 4 * kGroups);
    }
    barrier_init(full_staying(), 1);
    barrier_init_fence();
  }
};
// A warp is done with a stage. All its lanes have read the number of the tile by then.
__device__ __forceinline__ void release(SharedPlace barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Has all tiles of keys (first) and values (second) that a block's queries meet copied: one thread. The number of a
// tile is 2 n + 1 where all rows see it whole, 2 n where not, and -1 behind the last one.
template <class Room, int D, int V>
__device__ __forceinline__ void copy_key_tiles(const KeyMaps& maps, const Shape& shape, const TileFacts& facts,
                                               SharedPlace memory, const StageBarriers& barriers, int* numbers,
                                               int first_query, int kv_head) {
  constexpr int kKeys = Room::kKeys;
  const KeyTiles<Room> tiles(shape, first_query, facts);
  Stage stage{0, 1};  // nobody has had the tiles of the phases before
  for (int n = tiles.from(Room::kRules ? tiles.begin : 0);; n = tiles.from(n + 1)) {
    const int s = stage.number;
    barrier_wait(barriers.empty_first(s), stage.parity);
    numbers[s] = n < tiles.all ? 2 * n + (tiles.whole(n) ? 1 : 0) : -1;
    if (n >= tiles.all) {
      barrier_arrive(barriers.full_first(s));
      return;
    }
    const bool path = tiles.is_path(n);
    const TensorMap &map_k = path ? maps.path_k : maps.own_k, &map_v = path ? maps.path_v : maps.own_v;
    barrier_expect(barriers.full_first(s), Room::kKeyBytes);
    load_tile<D, kKeys>(memory + Room::kTilesK + s * Room::kKeyBytes, map_k, barriers.full_first(s), kv_head * D,
                        tiles.first(n));
    barrier_wait(barriers.empty_second(s), stage.parity);
    barrier_expect(barriers.full_second(s), Room::kValueBytes);
    load_tile<V, kKeys>(memory + Room::kTilesV + s * Room::kValueBytes, map_v, barriers.full_second(s), kv_head * V,
                        tiles.first(n));
    stage.advance();
  }
}

// The matrices of a problem, for boxes of kKeys keys.
template <int D, int V, int kKeys>
KeyMaps key_maps(const Shape& shape, const attention::Inputs<bfloat16>& in) {
  const auto map = [](const Rows<const bfloat16>& of, std::int64_t rows, std::int64_t columns) {
    return tensor_map({of.data, rows, columns, of.stride}, kKeys);
  };
  const std::int64_t J = shape.kv_heads, P = shape.path_rows, T = shape.own_rows;
  KeyMaps maps{{}, {}, map(in.own_k, T, J * D), map(in.own_v, T, J * V)};
  if (P > 0) maps.path_k = map(in.path_k, P, J * D), maps.path_v = map(in.path_v, P, J * V);
  return maps;
}

}  // namespace espalier::cuda::hopper
