// Backward, gradients of keys and values: a block has 128 keys of a key/value head, 64 for each multiplying warpgroup,
// and all queries of all its heads pass by in one order. S^T = K Q^T and dP^T = V dO^T; then dV += P^T dO and
// dK += dS^T Q, with P^T and dS^T in registers. Queries with their numbers are the first stream of tiles, gradients of
// their results the second one.
#include "espalier/ops/cuda/hopper/backward.h"
#include "espalier/ops/cuda/hopper/key_stages.h"

namespace espalier::cuda::hopper {
namespace {

using attention::Inputs;

constexpr int kBlockKeys = 64 * kGroups, kPassing = kPassingQueries;
static_assert(kPassing == kFactQueries);

struct KeysMaps {
  TensorMap k, v, q, grad_out;  // keys and values of one region
};

// Shared memory: keys, values, stages of queries and of gradients of their results, of numbers, barriers, tiles.
template <int D>
struct KeysRoom {
  static constexpr int kKeyBytes = kParts<D> * kPartBytes<kBlockKeys>, kTileBytes = kParts<D> * kPartBytes<kPassing>,
                       kNumberBytes = kPassing * 4;
  static constexpr int kValues = kKeyBytes, kTilesQ = 2 * kKeyBytes, kTilesG = kTilesQ + kStages * kTileBytes,
                       kLse = kTilesG + kStages * kTileBytes, kDelta = kLse + kStages * kNumberBytes,
                       kBarriers = kDelta + kStages * kNumberBytes, kNumbers = kBarriers + StageBarriers::kBytes,
                       kBytes = kNumbers + 4 * kStages;
  static_assert(kBytes <= kSharedBytes);
};

// The tiles of queries that a block's keys meet, [first, last). Query rows ascend, so they are one run.
template <bool kPath, bool kRules>
struct QueryTiles {
  int first = 0, last, first_key, deepest = 0, shallowest = 0;

  __device__ __forceinline__ QueryTiles(const Shape& shape, const TileFacts& facts, int block, int keys)
      : first_key(block * kBlockKeys) {
    const int queries = static_cast<int>(shape.query_rows);
    last = (queries + kPassing - 1) / kPassing;
    if constexpr (kPath) {
      deepest = min(first_key + kBlockKeys, keys) - 1, shallowest = first_key;
    } else {
      const int end = facts.most_end[block];
      while (first < last && last_row(shape, first) < first_key) ++first;
      while (first < last && first_row(shape, last - 1) >= end) --last;
      if (kRules && facts.most_depth != nullptr)
        deepest = facts.most_depth[block], shallowest = facts.least_depth[block];
    }
  }
  static __device__ __forceinline__ int first_row(const Shape& shape, int tile) {
    return static_cast<int>(own_row_of(shape, tile * kPassing));
  }
  static __device__ __forceinline__ int last_row(const Shape& shape, int tile) {
    return static_cast<int>(own_row_of(shape, min((tile + 1) * kPassing, static_cast<int>(shape.query_rows)) - 1));
  }
  // True if the window of some query of a tile reaches a key.
  __device__ __forceinline__ bool reached(const TileFacts& facts, int tile) const {
    return !kRules || facts.least_first == nullptr || facts.least_first[tile] <= deepest;
  }
  // True if all queries of a tile see all keys. Rows behind the last key of the path, and behind the last query, need
  // no mask: the first are not stored, and the weights of the others are 0.
  __device__ __forceinline__ bool whole(const Shape& shape, const TileFacts& facts, int block, int tile) const {
    bool all = true;
    if constexpr (!kPath)
      all = first_key + kBlockKeys - 1 <= first_row(shape, tile) && facts.least_end[block] > last_row(shape, tile);
    if (kRules && facts.most_first != nullptr) all = all && facts.most_first[tile] <= shallowest;
    return all;
  }
};

// Has the keys, their values and all tiles of queries copied: one thread. The number of a tile is twice its first
// query, plus 1 where all see all keys; -1 behind the last one.
template <int D, bool kPath, bool kRules>
__device__ __forceinline__ void copy_query_tiles(const KeysMaps& maps, const Shape& shape, const TileFacts& facts,
                                                 const QueryNumbers& of_queries, SharedPlace memory,
                                                 const StageBarriers& barriers, int* numbers, int kv_head) {
  using Room = KeysRoom<D>;
  const int block = static_cast<int>(blockIdx.x), heads = static_cast<int>(shape.heads / shape.kv_heads);
  const QueryTiles<kPath, kRules> tiles(shape, facts, block,
                                        static_cast<int>(kPath ? shape.path_rows : shape.own_rows));
  barrier_expect(barriers.full_staying(), 2 * Room::kKeyBytes);
  load_tile<D, kBlockKeys>(memory, maps.k, barriers.full_staying(), kv_head * D, block * kBlockKeys);
  load_tile<D, kBlockKeys>(memory + Room::kValues, maps.v, barriers.full_staying(), kv_head * D, block * kBlockKeys);
  Stage stage{0, 1};  // nobody has had the tiles of the phases before
  // Unrolled, the loops take more registers than this warpgroup has.
#pragma unroll 1
  for (int head = kv_head * heads, last_head = head + heads; head < last_head; ++head)
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.last; ++tile) {
      if (!tiles.reached(facts, tile)) continue;
      const int s = stage.number;
      const std::int64_t at = head * of_queries.padded + tile * kPassing;
      barrier_wait(barriers.empty_first(s), stage.parity);
      numbers[s] = 2 * tile * kPassing + (tiles.whole(shape, facts, block, tile) ? 1 : 0);
      barrier_expect(barriers.full_first(s), Room::kTileBytes + Room::kNumberBytes);
      load_tile<D, kPassing>(memory + Room::kTilesQ + s * Room::kTileBytes, maps.q, barriers.full_first(s), head * D,
                             tile * kPassing);
      bulk_load(memory + Room::kLse + s * Room::kNumberBytes, of_queries.lse_log2 + at, Room::kNumberBytes,
                barriers.full_first(s));
      barrier_wait(barriers.empty_second(s), stage.parity);
      barrier_expect(barriers.full_second(s), Room::kTileBytes + Room::kNumberBytes);
      load_tile<D, kPassing>(memory + Room::kTilesG + s * Room::kTileBytes, maps.grad_out, barriers.full_second(s),
                             head * D, tile * kPassing);
      bulk_load(memory + Room::kDelta + s * Room::kNumberBytes, of_queries.delta + at, Room::kNumberBytes,
                barriers.full_second(s));
      stage.advance();
    }
  barrier_wait(barriers.empty_first(stage.number), stage.parity);
  numbers[stage.number] = -1;
  barrier_arrive(barriers.full_first(stage.number));
}

template <int D, bool kPath, bool kRules>
__global__ void __launch_bounds__(kBlockThreads, 1)
    hopper_backward_keys_kernel(const ESPALIER_GRID_CONSTANT KeysMaps maps, const Shape shape, const TileFacts facts,
                                const QueryNumbers of_queries, const Rows<float> grad_k, const Rows<float> grad_v) {
  using Room = KeysRoom<D>;
  constexpr int kWide = kParts<D> * kPartColumns;
  const SharedPlace memory = place_of(shared_bytes());
  int* const numbers = reinterpret_cast<int*>(shared_bytes() + Room::kNumbers);
  const StageBarriers barriers{memory + Room::kBarriers};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int first_key = static_cast<int>(blockIdx.x) * kBlockKeys, kv_head = static_cast<int>(blockIdx.y),
            keys = static_cast<int>(kPath ? shape.path_rows : shape.own_rows);
  if (thread == 0) barriers.init();
  __syncthreads();
  if (warp < 4) {
    give_registers<kCopyingRegisters>();
    if (thread == 0)
      copy_query_tiles<D, kPath, kRules>(maps, shape, facts, of_queries, memory, barriers, numbers, kv_head);
    return;
  }

  take_registers<kMultiplyingRegisters>();
  const int group = warp / 4 - 1, g = lane / 4, t = lane % 4;
  const int in_tile = 64 * group + warp % 4 * 16 + g;  // of this lane's two keys the first; the other is 8 further
  int end[2];
  std::int32_t depth[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + in_tile + 8 * r;
    end[r] = !kPath && key < keys ? shape.subtree_end[key] : 0;
    depth[r] = key_depth<kRules>(shape, kPath, key < keys, key);
  }
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  float dk[kWide / 2] = {}, dv[kWide / 2] = {}, s[kPassing / 2], dp[kPassing / 2];
  unsigned weights[kPassing / 16][4], slopes[kPassing / 16][4];
  const std::uint64_t factor_k = factor_at(memory + group * 64 * kPartRowBytes, 16),
                      factor_v = factor_at(memory + Room::kValues + group * 64 * kPartRowBytes, 16),
                      factor_q = factor_at(memory + Room::kTilesQ, 16),
                      factor_g = factor_at(memory + Room::kTilesG, 16),
                      columns_q = factor_at(memory + Room::kTilesQ, kPartBytes<kPassing>),
                      columns_g = factor_at(memory + Room::kTilesG, kPartBytes<kPassing>);
  // Turns scores into weights; then s has the weights times the slopes of caps.
  const auto weigh = [&](const float* lse, int number) {
#pragma unroll
    for (int j = 0; j < kPassing / 8; ++j) {
      const Pack<float, 2> of = load_pack<2>(lse + 8 * j + 2 * t);
      float p[4];
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const Score<float> score = log2_score<kRules>(shape, s[4 * j + 2 * r + c], scale, to_log2);
          p[2 * r + c] = exp2_approximate(score.value - of.x[c]);
          s[4 * j + 2 * r + c] = score.slope;
        }
      if ((!kPath || kRules) && number % 2 == 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = min(number / 2 + 8 * j + 2 * t + c, static_cast<int>(shape.query_rows) - 1);
          const int row = static_cast<int>(own_row_of(shape, query));
          const std::int32_t first_depth = kRules ? first_depth_of(shape, row) : 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int key = first_key + in_tile + 8 * r;
            const bool seen = (kPath || ((key <= row) & (row < end[r]))) & (!kRules || depth[r] >= first_depth);
            p[2 * r + c] = seen ? p[2 * r + c] : 0.f;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        weights[j / 2][j % 2 * 2 + r] = packed(p[2 * r], p[2 * r + 1]);
#pragma unroll
        for (int c = 0; c < 2; ++c) s[4 * j + 2 * r + c] *= p[2 * r + c];
      }
    }
  };
  const auto slope = [&](const float* delta) {
#pragma unroll
    for (int j = 0; j < kPassing / 8; ++j) {
      const Pack<float, 2> of = load_pack<2>(delta + 8 * j + 2 * t);
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r) dp[4 * j + 2 * r + c] = s[4 * j + 2 * r + c] * (dp[4 * j + 2 * r + c] - of.x[c]);
    }
  };
  const auto numbers_of = [&](int begin, int stage) {
    return reinterpret_cast<const float*>(shared_bytes() + begin + stage * Room::kNumberBytes);
  };

  barrier_wait(barriers.full_staying(), 0);
  // All products of a pass end with it: nvcc keeps none in flight from one pass to the next.
  for (Stage stage{0, 0};; stage.advance()) {
    const int n = stage.number;
    barrier_wait(barriers.full_first(n), stage.parity);
    const int number = numbers[n];
    if (number < 0) break;
    wgmma_fence();
    multiply_rows<D, kPassing, kBlockKeys, kPassing>(s, factor_k, further(factor_q, n * Room::kTileBytes));
    barrier_wait(barriers.full_second(n), stage.parity);
    wgmma_fence();
    multiply_rows<D, kPassing, kBlockKeys, kPassing>(dp, factor_v, further(factor_g, n * Room::kTileBytes));
    wgmma_wait<1>();
    keep(s);
    weigh(numbers_of(Room::kLse, n), number);
    wgmma_wait<0>();
    keep(dp);
    wgmma_fence();
    multiply_columns<kWide, kPassing>(dv, weights, further(columns_g, n * Room::kTileBytes), true);
    slope(numbers_of(Room::kDelta, n));
    round_factor<kPassing>(dp, slopes);
    wgmma_fence();
    multiply_columns<kWide, kPassing>(dk, slopes, further(columns_q, n * Room::kTileBytes), true);
    wgmma_wait<1>();
    keep(dv);
    release(barriers.empty_second(n));
    wgmma_wait<0>();
    keep(dk);
    release(barriers.empty_first(n));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + in_tile + 8 * r;
    if (key >= keys) continue;
    float* const to_k = grad_k.data + key * grad_k.stride + kv_head * D + 2 * t;
    float* const to_v = grad_v.data + key * grad_v.stride + kv_head * D + 2 * t;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        to_k[8 * j + c] += scale * dk[4 * j + 2 * r + c];
        to_v[8 * j + c] += dv[4 * j + 2 * r + c];
      }
  }
}

}  // namespace

void add_backward_keys(const Shape& shape, const Inputs<bfloat16>& in, const QueryNumbers& numbers,
                       Rows<const bfloat16> grad_out, bool path, Rows<float> grad_k, Rows<float> grad_v) {
  const std::int64_t keys = path ? shape.path_rows : shape.own_rows;
  if (keys == 0) return;
  with_backward_sizes(shape, [&]<int D, bool kRules>() {
    const Facts facts(shape, kBlockKeys);
    const auto map = [&](const Rows<const bfloat16>& of, std::int64_t rows, std::int64_t heads, int box_rows) {
      return tensor_map({of.data, rows, heads * D, of.stride}, box_rows);
    };
    const KeysMaps maps{map(path ? in.path_k : in.own_k, keys, shape.kv_heads, kBlockKeys),
                        map(path ? in.path_v : in.own_v, keys, shape.kv_heads, kBlockKeys),
                        map(in.q, shape.query_rows, shape.heads, kPassing),
                        map(grad_out, shape.query_rows, shape.heads, kPassing)};
    launch_warpgroups(
        path ? hopper_backward_keys_kernel<D, true, kRules> : hopper_backward_keys_kernel<D, false, kRules>,
        {ceil_div(keys, kBlockKeys), shape.kv_heads}, KeysRoom<D>::kBytes, maps, shape, facts.get(), numbers, grad_k,
        grad_v);
  });
}

}  // namespace espalier::cuda::hopper
