// Backward, gradients of keys and values: a block has 128 keys of a key/value head, 64 for each multiplying warpgroup,
// and all queries of all its heads pass by in one order. S^T = K Q^T and dP^T = V dO^T; then dV += P^T dO and
// dK += dS^T Q, with P^T and dS^T in registers. Heads above 128 elements have gradients of more columns than registers
// hold: a launch for columns 0 to 127 and one for the others, each of which makes P and dS by itself. Queries with
// their numbers are the first stream of tiles, gradients of their results the second one. With sums, blocks of the
// path's keys also make dQ = dS K of each tile and add it to the sums in turn.
#include "espalier/ops/cuda/hopper/query_sums.h"

namespace espalier::cuda::hopper {
namespace {

using attention::Inputs;

constexpr int kBlockKeys = 64 * kGroups;
constexpr int kSlopes = 1;  // number of the barrier at which the slopes of both groups are stored

struct KeysMaps {
  TensorMap k, v, q, grad_out;  // keys and values of one region
};

// The keys of a launch; with sums, it makes gradients of queries as well.
enum class Keys : std::uint8_t { own, path, path_with_sums };

// Shared memory: keys, values, stages of queries and of gradients of their results, of numbers, barriers, tiles.
template <int D, int V, bool rules>
struct KeysRoom {
  static constexpr int kPassing = kPassingQueries<D, rules>;
  static constexpr int kKeyBytes = kParts<D> * kPartBytes<kBlockKeys>, kValueBytes = kParts<V> * kPartBytes<kBlockKeys>,
                       kQueryBytes = kParts<D> * kPartBytes<kPassing>,
                       kGradientBytes = kParts<V> * kPartBytes<kPassing>, kNumberBytes = kPassing * 4;
  static constexpr int kValues = kKeyBytes, kTilesQ = kValues + kValueBytes, kTilesG = kTilesQ + kStages * kQueryBytes,
                       kLse = kTilesG + kStages * kGradientBytes, kDelta = kLse + kStages * kNumberBytes,
                       kBarriers = kDelta + kStages * kNumberBytes, kNumbers = kBarriers + StageBarriers::kBytes,
                       kBytes = kNumbers + 4 * kStages;
  static_assert(kBytes <= kSharedBytes);
};

// The tiles of queries that a block's keys meet, [first, last). Query rows ascend, so they are one run.
template <int kPassing, Keys kOf, bool kRules>
struct QueryTiles {
  int first = 0, last, first_key, deepest = 0, shallowest = 0;

  __device__ __forceinline__ QueryTiles(const Shape& shape, const TileFacts& facts, int block, int keys)
      : first_key(block * kBlockKeys) {
    const int queries = static_cast<int>(shape.query_rows);
    last = (queries + kPassing - 1) / kPassing;
    if constexpr (kOf != Keys::own) {
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
  // True if all queries of a tile see all keys. Rows behind the last query need no mask, since their weights are 0, and
  // gradients of rows behind the last key of the path are not stored. In sums over keys these rows would count.
  __device__ __forceinline__ bool whole(const Shape& shape, const TileFacts& facts, int block, int tile) const {
    bool all = true;
    if constexpr (kOf == Keys::path_with_sums) all = deepest == first_key + kBlockKeys - 1;
    if constexpr (kOf == Keys::own)
      all = first_key + kBlockKeys - 1 <= first_row(shape, tile) && facts.least_end[block] > last_row(shape, tile);
    if (kRules && facts.most_first != nullptr) all = all && facts.most_first[tile] <= shallowest;
    return all;
  }
};

// Has the keys, their values and all tiles of queries copied: one thread. The number of a tile is twice its first
// query, plus 1 where all see all keys; -1 behind the last one.
template <int D, int V, Keys kOf, bool kRules>
__device__ __forceinline__ void copy_query_tiles(const KeysMaps& maps, const Shape& shape, const TileFacts& facts,
                                                 const QueryNumbers& of_queries, SharedPlace memory,
                                                 const StageBarriers& barriers, int* numbers, int block, int kv_head) {
  using Room = KeysRoom<D, V, kRules>;
  constexpr int kPassing = Room::kPassing;
  const int heads = static_cast<int>(shape.heads) / static_cast<int>(shape.kv_heads);
  const QueryTiles<kPassing, kOf, kRules> tiles(shape, facts, block,
                                                static_cast<int>(kOf == Keys::own ? shape.own_rows : shape.path_rows));
  barrier_expect(barriers.full_staying(), Room::kKeyBytes + Room::kValueBytes);
  load_tile<D, kBlockKeys>(memory, maps.k, barriers.full_staying(), kv_head * D, block * kBlockKeys);
  load_tile<V, kBlockKeys>(memory + Room::kValues, maps.v, barriers.full_staying(), kv_head * V, block * kBlockKeys);
  Stage stage{0, 1};  // nobody has had the tiles of the phases before
  int head = kv_head * heads, tile = tiles.first, left = heads * max(tiles.last - tiles.first, 0);
  const int behind = head + heads;
  if constexpr (kOf == Keys::path_with_sums) {
    const int begin = static_cast<int>(blockIdx.x);  // in the circle
    head += begin / tiles.last, tile = begin % tiles.last;
  }
  // Unrolled, the loop takes more registers than this warpgroup has.
#pragma unroll 1
  for (; left > 0; --left) {
    if (tiles.reached(facts, tile)) {
      const int s = stage.number;
      const int at = head * static_cast<int>(of_queries.padded) + tile * kPassing;
      barrier_wait(barriers.empty_first(s), stage.parity);
      numbers[s] = 2 * tile * kPassing + (tiles.whole(shape, facts, block, tile) ? 1 : 0);
      barrier_expect(barriers.full_first(s), Room::kQueryBytes + Room::kNumberBytes);
      load_tile<D, kPassing>(memory + Room::kTilesQ + s * Room::kQueryBytes, maps.q, barriers.full_first(s), head * D,
                             tile * kPassing);
      bulk_load(memory + Room::kLse + s * Room::kNumberBytes, of_queries.lse_log2 + at, Room::kNumberBytes,
                barriers.full_first(s));
      barrier_wait(barriers.empty_second(s), stage.parity);
      barrier_expect(barriers.full_second(s), Room::kGradientBytes + Room::kNumberBytes);
      load_tile<V, kPassing>(memory + Room::kTilesG + s * Room::kGradientBytes, maps.grad_out, barriers.full_second(s),
                             head * V, tile * kPassing);
      bulk_load(memory + Room::kDelta + s * Room::kNumberBytes, of_queries.delta + at, Room::kNumberBytes,
                barriers.full_second(s));
      stage.advance();
    }
    if (++tile < tiles.last) continue;
    tile = tiles.first;
    if (++head == behind) head -= heads;
  }
  barrier_wait(barriers.empty_first(stage.number), stage.parity);
  numbers[stage.number] = -1;
  barrier_arrive(barriers.full_first(stage.number));
}

// Columns [kFirst, kFirst + kColumns) of the gradients, as far as keys and values have them, for blocks of keys from
// `first_block` on.
template <int D, int V, int kFirst, int kColumns, Keys kOf, bool kRules>
__global__ void __launch_bounds__(kBlockThreads, 1)
    hopper_backward_keys_kernel(const ESPALIER_GRID_CONSTANT KeysMaps maps, const Shape shape, const TileFacts facts,
                                const QueryNumbers of_queries, const QuerySums sums, const int first_block,
                                const Rows<float> grad_k, const Rows<float> grad_v) {
  using Room = KeysRoom<D, V, kRules>;
  using OfSums = SumsRoom<Room::kBytes>;
  constexpr int kPassing = Room::kPassing;
  constexpr bool kPath = kOf != Keys::own, kSums = kOf == Keys::path_with_sums;
  constexpr int kFirstPart = kFirst / kPartColumns * kPartBytes<kPassing>;
  constexpr bool kValues = kFirst < V;  // whether there are columns of values
  const SharedPlace memory = place_of(shared_bytes());
  int* const numbers = reinterpret_cast<int*>(shared_bytes() + Room::kNumbers);
  const StageBarriers barriers{memory + Room::kBarriers};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const SumsBarriers sums_barriers{memory + OfSums::kFull, memory + OfSums::kEmpty};
  const int block = first_block + static_cast<int>(blockIdx.x), first_key = block * kBlockKeys,
            kv_head = static_cast<int>(blockIdx.y), keys = static_cast<int>(kPath ? shape.path_rows : shape.own_rows);
  if (thread == 0) {
    if constexpr (kSums) sums_barriers.init();
    barriers.init();
  }
  __syncthreads();
  if (warp < 4) {
    give_registers<kCopyingRegisters>();
    if (thread == 0)
      copy_query_tiles<D, V, kOf, kRules>(maps, shape, facts, of_queries, memory, barriers, numbers, block, kv_head);
    if constexpr (kSums) {
      if (thread == 32) {
        const int heads = static_cast<int>(shape.heads) / static_cast<int>(shape.kv_heads);
        add_sums(sums, {heads * sums.tiles, static_cast<int>(gridDim.x)}, static_cast<int>(blockIdx.x), kv_head * heads,
                 memory + OfSums::kSums, sums_barriers);
      }
    }
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
  float dk[kColumns / 2] = {}, dv[kColumns / 2] = {}, s[kPassing / 2], dp[kPassing / 2];
  unsigned weights[kPassing / 16][4], slopes[kPassing / 16][4];
  const std::uint64_t factor_k = factor_at(memory + group * 64 * kPartRowBytes, 16),
                      factor_v = factor_at(memory + Room::kValues + group * 64 * kPartRowBytes, 16),
                      factor_q = factor_at(memory + Room::kTilesQ, 16),
                      factor_g = factor_at(memory + Room::kTilesG, 16),
                      columns_q = factor_at(memory + Room::kTilesQ + kFirstPart, kPartBytes<kPassing>),
                      columns_g = factor_at(memory + Room::kTilesG + kFirstPart, kPartBytes<kPassing>),
                      factor_slopes = factor_at(memory + OfSums::kSlopes, 16),
                      half_k = factor_at(memory + group * kPartBytes<kBlockKeys>, kPartBytes<kBlockKeys>);
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
      if ((kSums || !kPath || kRules) && number % 2 == 0) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = min(number / 2 + 8 * j + 2 * t + c, static_cast<int>(shape.query_rows) - 1);
          const int row = static_cast<int>(own_row_of(shape, query));
          const std::int32_t first_depth = kRules ? first_depth_of(shape, row) : 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int key = first_key + in_tile + 8 * r;
            const bool seen =
                (kSums ? key < keys : kPath || ((key <= row) & (row < end[r]))) & (!kRules || depth[r] >= first_depth);
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
  // Makes the gradients of the tile's queries, each group half of the columns, from the slopes of both groups.
  unsigned sums_parity = 1;  // of the place of sums, which is empty at first
  const auto store_sums = [&](const float(&dq)[32]) {
    barrier_wait(sums_barriers.empty, sums_parity);
    sums_parity ^= 1;
    float* const to = reinterpret_cast<float*>(shared_bytes() + OfSums::kSums + group * (kSumBytes / kGroups)) +
                      thread % kGroupThreads * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      store_pack<4>(to + j * kGroupThreads * 4, {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]});
    async_fence();
    release(sums_barriers.full);
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
    multiply_rows<D, kPassing, kBlockKeys, kPassing>(s, factor_k, further(factor_q, n * Room::kQueryBytes));
    barrier_wait(barriers.full_second(n), stage.parity);
    wgmma_fence();
    multiply_rows<V, kPassing, kBlockKeys, kPassing>(dp, factor_v, further(factor_g, n * Room::kGradientBytes));
    wgmma_wait<1>();
    keep(s);
    weigh(numbers_of(Room::kLse, n), number);
    wgmma_wait<0>();
    keep(dp);
    if constexpr (kValues) {
      wgmma_fence();
      multiply_columns<kColumns, kPassing>(dv, weights, further(columns_g, n * Room::kGradientBytes), true);
    }
    slope(numbers_of(Room::kDelta, n));
    round_factor<kPassing>(dp, slopes);
    if constexpr (kSums) {
      // There are two places. The other group has multiplied what was here two passes ago: it has come to the barrier
      // of the last pass since.
      store_slopes(memory + OfSums::kSlopes + n * OfSums::kSlopeBytes, group, slopes);
      async_fence();
      named_wait(kSlopes, kGroups * kGroupThreads);
    }
    wgmma_fence();
    multiply_columns<kColumns, kPassing>(dk, slopes, further(columns_q, n * Room::kQueryBytes), true);
    if constexpr (kSums) {
      float dq[32];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kBlockKeys / 16; ++k)
        wgmma<64, true>(dq, columns_further<kSumQueries>(further(factor_slopes, n * OfSums::kSlopeBytes), k),
                        rows_further(half_k, k), k > 0);
      wgmma_commit();
      wgmma_wait<2>();
      keep(dv);
      release(barriers.empty_second(n));
      wgmma_wait<1>();
      keep(dk);
      release(barriers.empty_first(n));
      wgmma_wait<0>();
      keep(dq);
      store_sums(dq);
    } else {
      if constexpr (kValues) {
        wgmma_wait<1>();
        keep(dv);
      }
      release(barriers.empty_second(n));
      wgmma_wait<0>();
      keep(dk);
      release(barriers.empty_first(n));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + in_tile + 8 * r;
    if (key >= keys) continue;
    float* const to_k = grad_k.data + key * grad_k.stride + kv_head * D + kFirst + 2 * t;
    float* const to_v = grad_v.data + key * grad_v.stride + kv_head * V + kFirst + 2 * t;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (kFirst + 8 * j < D) to_k[8 * j + c] += scale * dk[4 * j + 2 * r + c];
        if (kFirst + 8 * j < V) to_v[8 * j + c] += dv[4 * j + 2 * r + c];
      }
  }
}

template <int D, int V, bool rules>
KeysMaps keys_maps(const Shape& shape, const Inputs<bfloat16>& in, Rows<const bfloat16> grad_out, bool path) {
  constexpr int kPassing = kPassingQueries<D, rules>;
  const std::int64_t H = shape.heads, J = shape.kv_heads, Q = shape.query_rows,
                     keys = path ? shape.path_rows : shape.own_rows;
  const auto map = [](const Rows<const bfloat16>& of, std::int64_t rows, std::int64_t columns, int box_rows) {
    return tensor_map({of.data, rows, columns, of.stride}, box_rows);
  };
  return {map(path ? in.path_k : in.own_k, keys, J * D, kBlockKeys),
          map(path ? in.path_v : in.own_v, keys, J * V, kBlockKeys), map(in.q, Q, H * D, kPassing),
          map(grad_out, Q, H * V, kPassing)};
}

constexpr int kSumD = 128;  // elements of a head whose queries' gradients are summed in turn
constexpr auto kSumsKernel = hopper_backward_keys_kernel<kSumD, kSumD, 0, kSumD, Keys::path_with_sums, false>;
constexpr int kSumsBytes = SumsRoom<KeysRoom<kSumD, kSumD, false>::kBytes>::kBytes;
static_assert(kSumsBytes <= kSharedBytes && kPassingQueries<kSumD, false> == kSumQueries);

std::int64_t blocks_together = kBlocksTogether;

// Blocks of keys of a launch, for each key/value head.
std::int64_t blocks_in_turn(const Shape& shape) {
  return std::min(blocks_together / shape.kv_heads, ceil_div(shape.path_rows, kBlockKeys));
}

}  // namespace

void set_blocks_together(std::int64_t blocks) { blocks_together = blocks; }

void add_backward_keys(const Shape& shape, const Inputs<bfloat16>& in, const QueryNumbers& numbers,
                       Rows<const bfloat16> grad_out, bool path, Rows<float> grad_k, Rows<float> grad_v) {
  const std::int64_t keys = path ? shape.path_rows : shape.own_rows;
  if (keys == 0) return;
  with_sizes(shape, [&]<int D, int V, bool kRules>() {
    const Facts facts(shape, kBlockKeys, kPassingQueries<D, kRules>);
    const KeysMaps maps = keys_maps<D, V, kRules>(shape, in, grad_out, path);
    const auto add_columns = [&]<int kFirst, int kColumns>() {
      launch_warpgroups(path ? hopper_backward_keys_kernel<D, V, kFirst, kColumns, Keys::path, kRules>
                             : hopper_backward_keys_kernel<D, V, kFirst, kColumns, Keys::own, kRules>,
                        {ceil_div(keys, kBlockKeys), shape.kv_heads}, KeysRoom<D, V, kRules>::kBytes, maps, shape,
                        facts.get(), numbers, QuerySums{}, 0, grad_k, grad_v);
    };
    constexpr int kAll = kParts<D> * kPartColumns;
    add_columns.template operator()<0, (kAll < 128 ? kAll : 128)>();
    if constexpr (kAll > 128) add_columns.template operator()<128, kAll - 128>();
  });
}

bool adds_query_sums(const Shape& shape) {
  if (shape.path_rows == 0 || shape.head_dim != kSumD || shape.values() != kSumD || shape.window > 0 ||
      shape.soft_cap > 0 || shape.kv_heads > blocks_together)
    return false;
  const std::int64_t blocks = blocks_in_turn(shape), tiles = ceil_div(shape.query_rows, kSumQueries);
  return tiles * (shape.heads / shape.kv_heads) >= blocks &&
         holds_together(reinterpret_cast<const void*>(kSumsKernel), kBlockThreads, kSumsBytes, blocks_together);
}

void add_backward_path(const Shape& shape, const Inputs<bfloat16>& in, const QueryNumbers& numbers,
                       Rows<const bfloat16> grad_out, QuerySums sums, Rows<float> grad_k, Rows<float> grad_v) {
  const KeysMaps maps = keys_maps<kSumD, kSumD, false>(shape, in, grad_out, true);
  const std::int64_t all = ceil_div(shape.path_rows, kBlockKeys), most = blocks_in_turn(shape);
  for (std::int64_t first = 0; first < all; first += most) {
    const std::int64_t blocks = std::min(most, all - first);
    sums.before = static_cast<int>(first);
    launch_together(kSumsKernel, {blocks, shape.kv_heads}, kSumsBytes, maps, shape, TileFacts{}, numbers, sums,
                    static_cast<int>(first), grad_k, grad_v);
  }
}

}  // namespace espalier::cuda::hopper
