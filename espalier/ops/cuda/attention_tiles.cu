// Attention of bfloat16 on tensor cores: tiles of 64 queries (or keys) stay in registers while tiles of their partners
// pass through two buffers in shared memory, one being fetched while the other is multiplied. S is made twice in the
// backward, once for the gradients of keys and values and once for those of queries, so that each sum has one owner:
// no atomics, and the same bits each time. Windows and soft caps have kernels of their own (kRules), so that those
// without them do not pay for them.
#include <algorithm>

#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/tiles.h"
#include "espalier/ops/cuda/visible.h"

namespace espalier::cuda {
namespace {

constexpr int kPassing = 32;  // rows of the side that passes by in the backward

// What is said of tiles of rows as a whole, to leave out those that nobody sees. Depths: where there is a window.
struct TileFacts {
  const std::int32_t* end;         // of 64 own keys the last end of their subtrees: no query row from there on sees one
  const std::int32_t* last_depth;  // of 64 own keys their largest depth
  const std::int32_t* first_depth;  // of kPassing queries the smallest depth that one sees
};

// For each tile of own rows the largest of their numbers, none of which is negative.
__global__ void __launch_bounds__(kTileKeys)
    tile_most_kernel(std::int64_t own_rows, const std::int32_t* numbers, std::int32_t* most) {
  ESPALIER_SHARED(std::int32_t[kTileKeys], all);
  const std::int64_t row = grid_thread();
  all[threadIdx.x] = row < own_rows ? numbers[row] : 0;
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::int32_t last = 0;
  for (int i = 0; i < kTileKeys; ++i) last = all[i] > last ? all[i] : last;
  most[blockIdx.x] = last;
}

// For each tile of queries the smallest depth that one of them sees.
__global__ void __launch_bounds__(kPassing) first_depth_kernel(Shape shape, std::int32_t* first_depth) {
  const std::int64_t query = grid_thread(), last = shape.query_rows - 1;
  std::int32_t first = first_depth_of(shape, own_row_of(shape, query < last ? query : last));
#pragma unroll
  for (int lanes = kPassing / 2; lanes > 0; lanes /= 2) {
    const std::int32_t other = __shfl_xor_sync(kWholeWarp, first, lanes);
    first = other < first ? other : first;
  }
  if (threadIdx.x == 0) first_depth[blockIdx.x] = first;
}

// The tiles of keys that 64 query rows meet: those of the path, then those of the own rows with a key that one sees.
template <bool kRules>
struct KeyTiles {
  std::int64_t of_path, all, first_row, begin;
  TileFacts facts;
  int keys;                  // of a tile
  std::int32_t first_depth;  // that one of the rows sees

  __device__ __forceinline__ bool seen(std::int64_t n) const {
    if (n < of_path) return true;
    const std::int64_t tile = (n - of_path) * keys / kTileKeys;
    if (kRules && facts.last_depth != nullptr && facts.last_depth[tile] < first_depth) return false;
    return facts.end[tile] > first_row;
  }
  __device__ __forceinline__ std::int64_t from(std::int64_t n) const {
    while (n < all && !seen(n)) ++n;
    return n;
  }
};
template <bool kRules>
__device__ __forceinline__ KeyTiles<kRules> key_tiles(const Shape& shape, std::int64_t first_query, int keys,
                                                      const TileFacts& facts) {
  const std::int64_t end = first_query + 64 < shape.query_rows ? first_query + 64 : shape.query_rows;
  const std::int64_t of_path = (shape.path_rows + keys - 1) / keys;
  KeyTiles<kRules> tiles{
      of_path, of_path + own_row_of(shape, end - 1) / keys + 1, own_row_of(shape, first_query), 0, facts, keys, 0};
  if (kRules && facts.first_depth != nullptr) {
    const std::int64_t tile = first_query / kPassing;
    tiles.first_depth = facts.first_depth[tile];
    if (first_query + kPassing < end && facts.first_depth[tile + 1] < tiles.first_depth)
      tiles.first_depth = facts.first_depth[tile + 1];
    if (tiles.first_depth >= shape.path_rows)
      tiles.begin = of_path;
    else if (tiles.first_depth > 0)
      tiles.begin = tiles.first_depth / keys;
  }
  return tiles;
}

// Whether the query at own row `row` sees key number `key` of a region; `end` is the key's subtree's.
__device__ __forceinline__ bool sees(bool path, std::int64_t key, std::int64_t path_rows, std::int64_t row,
                                     std::int64_t end) {
  return path ? key < path_rows : key <= row && row < end;
}

// The first depths that the two query rows of a lane see, where there are windows.
template <bool kRules>
struct FirstDepths {
  std::int32_t of[2];

  __device__ __forceinline__ void set(const Shape& shape, int r, std::int64_t row) {
    if constexpr (kRules) of[r] = first_depth_of(shape, row);
  }
  __device__ __forceinline__ bool reach(int r, std::int32_t depth) const { return !kRules || depth >= of[r]; }
};
// The depth of a key that is inside its region.
template <bool kRules>
__device__ __forceinline__ std::int32_t key_depth(const Shape& shape, bool path, bool inside, std::int64_t key) {
  if (!kRules || path) return static_cast<std::int32_t>(key);
  return inside ? depth_of(shape, key) : 0;
}

// A score in units of ln 2, and its slope by the scaled product.
template <bool kRules>
__device__ __forceinline__ Score<float> log2_score(const Shape& shape, float product, float scale, float to_log2) {
  if (!kRules || shape.soft_cap == 0) return {product * to_log2, 1.f};
  const Score<float> score = capped(product * scale, static_cast<float>(shape.soft_cap));
  return {score.value * kLog2E, score.slope};
}

// Steps of 16 columns whose loads may be under way together: of large heads fewer, for want of registers.
template <int D>
inline constexpr int kStepsAtOnce = D > 128 ? 2 : D / 16;

// Large heads leave no registers for the queries' fragments, which are then read from shared memory for each tile, and
// only for half as many keys at a time.
template <int D>
struct ForwardTiles {
  static constexpr bool kQueriesInRegisters = D <= 128;
  static constexpr int kKeys = kQueriesInRegisters ? 64 : 32;
  static constexpr std::int64_t kBytes = (4 * kKeys + (kQueriesInRegisters ? 0 : 64)) * D * 2;
};

template <int D, bool kRules>
__global__ void __launch_bounds__(kTileThreads, 1)
    forward_tiles_kernel(Shape shape, attention::Inputs<bfloat16> in, TileFacts facts, Rows<bfloat16> out,
                         float* lse_HQ) {
  using Tiles = ForwardTiles<D>;
  constexpr int kKeys = Tiles::kKeys, kSteps = D / 16;
  bfloat16* const memory = dynamic_shared<bfloat16>();  // two buffers of k, v [kKeys][D], and the queries
  const auto tile = [&](int buffer, int which) { return memory + (buffer * 2 + which) * kKeys * D; };
  bfloat16* const tile_q = Tiles::kQueriesInRegisters ? tile(1, 0) : tile(2, 0);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
            t = lane % 4;
  const std::int64_t first_query = static_cast<std::int64_t>(blockIdx.x) * 64, head = blockIdx.y;
  const std::int64_t kv_head = head / (shape.heads / shape.kv_heads);
  const KeyTiles<kRules> tiles = key_tiles<kRules>(shape, first_query, kKeys, facts);
  const auto fetch = [&](std::int64_t n, int buffer) {
    const bool path = n < tiles.of_path;
    const std::int64_t first = (path ? n : n - tiles.of_path) * kKeys, rows = path ? shape.path_rows : shape.own_rows;
    fetch_tile<D, kKeys>(tile(buffer, 0), (path ? in.path_k.data : in.own_k.data) + kv_head * D,
                         path ? in.path_k.stride : in.own_k.stride, first, rows);
    fetch_tile<D, kKeys>(tile(buffer, 1), (path ? in.path_v.data : in.own_v.data) + kv_head * D,
                         path ? in.path_v.stride : in.own_v.stride, first, rows);
  };
  fetch_tile<D, 64>(tile_q, in.q.data + head * D, in.q.stride, first_query, shape.query_rows);
  cp_async_commit();
  std::int64_t n = tiles.from(kRules ? tiles.begin : 0);
  fetch(n, 0);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  unsigned fq[Tiles::kQueriesInRegisters ? kSteps : 1][4];
  const auto load_queries = [&](int step, unsigned(&to)[4]) {
    ldmatrix_x4<false>(to, piece_at<D>(tile_q, warp * 16 + lane % 16, step * 2 + lane / 16));
  };
  if constexpr (Tiles::kQueriesInRegisters) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_queries(s, fq[s]);
    __syncthreads();  // the queries are read: their place is free for keys
  }

  std::int64_t row[2];  // own rows of the two query rows of this lane
  FirstDepths<kRules> first_depths;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t query = first_query + warp * 16 + g + 8 * r;
    row[r] = own_row_of(shape, query < shape.query_rows ? query : shape.query_rows - 1);
    first_depths.set(shape, r, row[r]);
  }
  float acc[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  // Every row sees itself: there is a tile, and the last round waits for all that was fetched.
  for (int buffer = 0; n < tiles.all; buffer ^= 1) {
    const std::int64_t next = tiles.from(n + 1);
    if (next < tiles.all) fetch(next, buffer ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const bool path = n < tiles.of_path;
    const std::int64_t first = (path ? n : n - tiles.of_path) * kKeys;
    float s[kKeys / 8][4] = {};
    [[maybe_unused]] constexpr int kAtOnce = kStepsAtOnce<D>;  // g++ knows no such pragma
#pragma unroll kAtOnce
    for (int k = 0; k < kSteps; ++k) {
      unsigned(&a)[4] = fq[Tiles::kQueriesInRegisters ? k : 0];
      if constexpr (!Tiles::kQueriesInRegisters) load_queries(k, a);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        unsigned b[4];  // keys 16 j + 0..7 in b0 b1, the next eight in b2 b3
        ldmatrix_x4<false>(b, piece_at<D>(tile(buffer, 0), j * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
        mma_16816(s[2 * j], a, b[0], b[1]);
        mma_16816(s[2 * j + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::int64_t key = first + j * 8 + 2 * t + c;
        const std::int64_t end = !path && key < shape.own_rows ? shape.subtree_end[key] : 0;
        const std::int32_t depth = key_depth<kRules>(shape, path, key < shape.own_rows, key);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool seen = sees(path, key, shape.path_rows, row[r], end) && first_depths.reach(r, depth);
          s[j][2 * r + c] = seen ? log2_score<kRules>(shape, s[j][2 * r + c], scale, to_log2).value : -INFINITY;
        }
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = top[r];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) high = fmaxf(high, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) high = fmaxf(high, __shfl_xor_sync(kWholeWarp, high, lanes));
      const float base = high == -INFINITY ? 0.f : high, less = exp2_approximate(top[r] - base);
      top[r] = high;
      sum[r] *= less;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) acc[j][2 * r] *= less, acc[j][2 * r + 1] *= less;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[j][2 * r + c] = exp2_approximate(s[j][2 * r + c] - base);
          sum[r] += s[j][2 * r + c];
        }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {  // the result of two blocks of keys is the left factor of 16 keys
      const unsigned a[4] = {packed(s[2 * k][0], s[2 * k][1]), packed(s[2 * k][2], s[2 * k][3]),
                             packed(s[2 * k + 1][0], s[2 * k + 1][1]), packed(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int j = 0; j < D / 16; ++j) {
        unsigned b[4];
        ldmatrix_x4<true>(b, piece_at<D>(tile(buffer, 1), k * 16 + lane % 16, j * 2 + lane / 16));
        mma_16816(acc[2 * j], a, b[0], b[1]);
        mma_16816(acc[2 * j + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // the buffer is free
    n = next;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) sum[r] += __shfl_xor_sync(kWholeWarp, sum[r], lanes);
    const std::int64_t query = first_query + warp * 16 + g + 8 * r;
    if (query >= shape.query_rows) continue;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<unsigned*>(out.data + query * out.stride + head * D + j * 8 + 2 * t) =
          packed(acc[j][2 * r] / sum[r], acc[j][2 * r + 1] / sum[r]);
    if (t == 0) lse_HQ[head * shape.query_rows + query] = (top[r] + log2f(sum[r])) * kLn2;
  }
}

// Probabilities and slopes of 64 rows of one side (`here`, in a and its partner) against kOthers of the other: with
// S = x y^T and P = grad_x' y'^T in their fragments.
template <int D, int kOthers>
__device__ __forceinline__ void two_products(bfloat16* here_a, bfloat16* here_b, bfloat16* there_a, bfloat16* there_b,
                                             int warp, int lane, float (&s)[kOthers / 8][4],
                                             float (&p)[kOthers / 8][4]) {
  [[maybe_unused]] constexpr int kAtOnce = kStepsAtOnce<D>;  // g++ knows no such pragma
#pragma unroll kAtOnce
  for (int c = 0; c < D / 16; ++c) {
    unsigned fa[4], fb[4];
    ldmatrix_x4<false>(fa, piece_at<D>(here_a, warp * 16 + lane % 16, c * 2 + lane / 16));
    ldmatrix_x4<false>(fb, piece_at<D>(here_b, warp * 16 + lane % 16, c * 2 + lane / 16));
#pragma unroll
    for (int j = 0; j < kOthers / 16; ++j) {
      const int row = j * 16 + lane / 16 * 8 + lane % 8, piece = c * 2 + lane / 8 % 2;
      unsigned b[4];
      ldmatrix_x4<false>(b, piece_at<D>(there_a, row, piece));
      mma_16816(s[2 * j], fa, b[0], b[1]);
      mma_16816(s[2 * j + 1], fa, b[2], b[3]);
      ldmatrix_x4<false>(b, piece_at<D>(there_b, row, piece));
      mma_16816(p[2 * j], fb, b[0], b[1]);
      mma_16816(p[2 * j + 1], fb, b[2], b[3]);
    }
  }
}

// acc += x y, x [64, kOthers] in the fragments of a product's result, y [kOthers, kColumns] in columns of a tile, the
// first of them in piece `first`.
template <int D, int kOthers, int kColumns = D>
__device__ __forceinline__ void add_product(const float (&x)[kOthers / 8][4], bfloat16* y, int lane,
                                            float (&acc)[kColumns / 8][4], int first = 0) {
#pragma unroll
  for (int k = 0; k < kOthers / 16; ++k) {
    const unsigned a[4] = {packed(x[2 * k][0], x[2 * k][1]), packed(x[2 * k][2], x[2 * k][3]),
                           packed(x[2 * k + 1][0], x[2 * k + 1][1]), packed(x[2 * k + 1][2], x[2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      unsigned b[4];
      ldmatrix_x4<true>(b, piece_at<D>(y, k * 16 + lane % 16, first + j * 2 + lane / 16));
      mma_16816(acc[2 * j], a, b[0], b[1]);
      mma_16816(acc[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Parts of a head whose gradients of keys and values fit in the registers of a block; each makes S and P by itself.
template <int D>
inline constexpr int kKeyParts = D > 128 ? 2 : 1;

// Gradients of 64 keys and values of a part of a key/value head, of the path or of the own rows; added to.
template <int D, bool kPath, bool kRules>
__global__ void __launch_bounds__(kTileThreads, 1)
    backward_keys_tiles_kernel(Shape shape, attention::Inputs<bfloat16> in, TileFacts facts,
                               Rows<const bfloat16> grad_out, const float* lse_HQ, const float* delta_HQ,
                               Rows<float> grad_k, Rows<float> grad_v) {
  bfloat16* const memory = dynamic_shared<bfloat16>();  // k, v [64][D]; two buffers of q, dO [32][D]
  bfloat16 *const tile_k = memory, *const tile_v = memory + 64 * D;
  const auto tile = [&](int buffer, int which) { return memory + (4 + buffer * 2 + which) * kPassing * D; };
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
            t = lane % 4;
  constexpr int kColumns = D / kKeyParts<D>;
  const int first_column = static_cast<int>(blockIdx.y) % kKeyParts<D> * kColumns;
  const std::int64_t first_key = static_cast<std::int64_t>(blockIdx.x) * 64, kv_head = blockIdx.y / kKeyParts<D>;
  const std::int64_t keys = kPath ? shape.path_rows : shape.own_rows, group = shape.heads / shape.kv_heads;
  const Rows<const bfloat16> k = kPath ? in.path_k : in.own_k, v = kPath ? in.path_v : in.own_v;
  fetch_tile<D, 64>(tile_k, k.data + kv_head * D, k.stride, first_key, keys);
  fetch_tile<D, 64>(tile_v, v.data + kv_head * D, v.stride, first_key, keys);
  // Query rows ascend: those that see one of the keys are in one run of tiles.
  std::int64_t first_tile = 0, last_tile = (shape.query_rows + kPassing - 1) / kPassing;
  if (!kPath) {
    const auto last_row = [&](std::int64_t n) {
      const std::int64_t end = (n + 1) * kPassing < shape.query_rows ? (n + 1) * kPassing : shape.query_rows;
      return own_row_of(shape, end - 1);
    };
    while (first_tile < last_tile && last_row(first_tile) < first_key) ++first_tile;
    while (first_tile < last_tile && own_row_of(shape, (last_tile - 1) * kPassing) >= facts.end[blockIdx.x])
      --last_tile;
  }
  const std::int64_t per_head = last_tile - first_tile, passes = per_head * group;
  const auto head_of = [&](std::int64_t n) { return kv_head * group + n / per_head; };
  const auto query_of = [&](std::int64_t n) { return (first_tile + n % per_head) * kPassing; };
  // The first pass from n on with a query whose window reaches a key of this block.
  const std::int64_t last_key = first_key + 64 < keys ? first_key + 63 : keys - 1;
  const auto from = [&](std::int64_t n) {
    if (!kRules || facts.first_depth == nullptr) return n;
    const std::int64_t deepest = kPath ? last_key : facts.last_depth[blockIdx.x];
    while (n < passes && facts.first_depth[first_tile + n % per_head] > deepest) ++n;
    return n;
  };
  const auto fetch = [&](std::int64_t n, int buffer) {
    fetch_tile<D, kPassing>(tile(buffer, 0), in.q.data + head_of(n) * D, in.q.stride, query_of(n), shape.query_rows);
    fetch_tile<D, kPassing>(tile(buffer, 1), grad_out.data + head_of(n) * D, grad_out.stride, query_of(n),
                            shape.query_rows);
  };
  std::int64_t n = from(0);
  if (n < passes) fetch(n, 0);
  cp_async_commit();
  std::int64_t end[2];  // of the subtrees of the two keys of this lane
  std::int32_t depth[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t key = first_key + warp * 16 + g + 8 * r;
    end[r] = !kPath && key < keys ? shape.subtree_end[key] : 0;
    depth[r] = key_depth<kRules>(shape, kPath, key < keys, key);
  }
  float dk[kColumns / 8][4] = {}, dv[kColumns / 8][4] = {};
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  for (int buffer = 0; n < passes; buffer ^= 1) {
    const std::int64_t next = from(n + 1);
    if (next < passes) fetch(next, buffer ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    float s[kPassing / 8][4] = {}, dp[kPassing / 8][4] = {};
    two_products<D, kPassing>(tile_k, tile_v, tile(buffer, 0), tile(buffer, 1), warp, lane, s, dp);
    const std::int64_t of_head = head_of(n) * shape.query_rows;
#pragma unroll
    for (int j = 0; j < kPassing / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::int64_t query = query_of(n) + j * 8 + 2 * t + c;
        const bool inside = query < shape.query_rows;
        const float lse = inside ? lse_HQ[of_head + query] * kLog2E : 0.f,
                    delta = inside ? delta_HQ[of_head + query] : 0.f;
        const std::int64_t row = inside ? own_row_of(shape, query) : 0;
        const std::int32_t first_depth = kRules && inside ? first_depth_of(shape, row) : 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const std::int64_t key = first_key + warp * 16 + g + 8 * r;
          const bool seen = inside && sees(kPath, key, keys, row, end[r]) && (!kRules || depth[r] >= first_depth);
          const Score<float> score = log2_score<kRules>(shape, s[j][2 * r + c], scale, to_log2);
          const float p = seen ? exp2_approximate(score.value - lse) : 0.f;
          s[j][2 * r + c] = p;
          dp[j][2 * r + c] = score.slope * p * (dp[j][2 * r + c] - delta);
        }
      }
    add_product<D, kPassing, kColumns>(s, tile(buffer, 1), lane, dv, first_column / 8);
    add_product<D, kPassing, kColumns>(dp, tile(buffer, 0), lane, dk, first_column / 8);
    __syncthreads();  // the buffer is free
    n = next;
  }
  cp_async_wait<0>();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t key = first_key + warp * 16 + g + 8 * r;
    if (key >= keys) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::int64_t column = kv_head * D + first_column + j * 8 + 2 * t + c;
        grad_k.data[key * grad_k.stride + column] += scale * dk[j][2 * r + c];
        grad_v.data[key * grad_v.stride + column] += dv[j][2 * r + c];
      }
  }
}

// Gradients of 64 query rows of a head; overwritten.
template <int D, bool kRules>
__global__ void __launch_bounds__(kTileThreads, 1)
    backward_queries_tiles_kernel(Shape shape, attention::Inputs<bfloat16> in, TileFacts facts,
                                  Rows<const bfloat16> grad_out, const float* lse_HQ, const float* delta_HQ,
                                  Rows<bfloat16> grad_q) {
  bfloat16* const memory = dynamic_shared<bfloat16>();  // q, dO [64][D]; two buffers of k, v [32][D]
  bfloat16 *const tile_q = memory, *const tile_g = memory + 64 * D;
  const auto tile = [&](int buffer, int which) { return memory + (4 + buffer * 2 + which) * kPassing * D; };
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
            t = lane % 4;
  const std::int64_t first_query = static_cast<std::int64_t>(blockIdx.x) * 64, head = blockIdx.y;
  const std::int64_t kv_head = head / (shape.heads / shape.kv_heads);
  const KeyTiles<kRules> tiles = key_tiles<kRules>(shape, first_query, kPassing, facts);
  const auto fetch = [&](std::int64_t n, int buffer) {
    const bool path = n < tiles.of_path;
    const std::int64_t first = (path ? n : n - tiles.of_path) * kPassing,
                       rows = path ? shape.path_rows : shape.own_rows;
    fetch_tile<D, kPassing>(tile(buffer, 0), (path ? in.path_k.data : in.own_k.data) + kv_head * D,
                            path ? in.path_k.stride : in.own_k.stride, first, rows);
    fetch_tile<D, kPassing>(tile(buffer, 1), (path ? in.path_v.data : in.own_v.data) + kv_head * D,
                            path ? in.path_v.stride : in.own_v.stride, first, rows);
  };
  fetch_tile<D, 64>(tile_q, in.q.data + head * D, in.q.stride, first_query, shape.query_rows);
  fetch_tile<D, 64>(tile_g, grad_out.data + head * D, grad_out.stride, first_query, shape.query_rows);
  std::int64_t n = tiles.from(kRules ? tiles.begin : 0);
  fetch(n, 0);
  cp_async_commit();
  std::int64_t row[2];
  FirstDepths<kRules> first_depths;
  float lse[2], delta[2], dq[D / 8][4] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t wanted = first_query + warp * 16 + g + 8 * r;
    const std::int64_t query = wanted < shape.query_rows ? wanted : shape.query_rows - 1;
    row[r] = own_row_of(shape, query);
    first_depths.set(shape, r, row[r]);
    lse[r] = lse_HQ[head * shape.query_rows + query] * kLog2E;
    delta[r] = delta_HQ[head * shape.query_rows + query];
  }
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  // Every row sees itself: there is a tile, and the last round waits for all that was fetched.
  for (int buffer = 0; n < tiles.all; buffer ^= 1) {
    const std::int64_t next = tiles.from(n + 1);
    if (next < tiles.all) fetch(next, buffer ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const bool path = n < tiles.of_path;
    const std::int64_t first = (path ? n : n - tiles.of_path) * kPassing;
    float s[kPassing / 8][4] = {}, dp[kPassing / 8][4] = {};
    two_products<D, kPassing>(tile_q, tile_g, tile(buffer, 0), tile(buffer, 1), warp, lane, s, dp);
#pragma unroll
    for (int j = 0; j < kPassing / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::int64_t key = first + j * 8 + 2 * t + c;
        const std::int64_t end = !path && key < shape.own_rows ? shape.subtree_end[key] : 0;
        const std::int32_t depth = key_depth<kRules>(shape, path, key < shape.own_rows, key);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const bool seen = sees(path, key, shape.path_rows, row[r], end) && first_depths.reach(r, depth);
          const Score<float> score = log2_score<kRules>(shape, s[j][2 * r + c], scale, to_log2);
          const float p = seen ? exp2_approximate(score.value - lse[r]) : 0.f;
          s[j][2 * r + c] = score.slope * p * (dp[j][2 * r + c] - delta[r]);
        }
      }
    add_product<D, kPassing>(s, tile(buffer, 0), lane, dq);
    __syncthreads();  // the buffer is free
    n = next;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t query = first_query + warp * 16 + g + 8 * r;
    if (query >= shape.query_rows) continue;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<unsigned*>(grad_q.data + query * grad_q.stride + head * D + j * 8 + 2 * t) =
          packed(scale * dq[j][2 * r], scale * dq[j][2 * r + 1]);
  }
}

template <class T>
bool whole_pieces(const Rows<T>& rows) {
  return aligned_16(rows.data) && rows.stride % 8 == 0;
}

template <class Body>
void with_head_dim(const Shape& shape, Body&& body) {
  switch (shape.head_dim) {
    case 64:
      return body.template operator()<64>();
    case 96:
      return body.template operator()<96>();
    case 128:
      return body.template operator()<128>();
    case 192:
      return body.template operator()<192>();
    default:
      return body.template operator()<256>();
  }
}

class Facts {
 public:
  explicit Facts(const Shape& shape)
      : tiles_(ceil_div(shape.own_rows, kTileKeys)),
        passing_(shape.window > 0 ? ceil_div(shape.query_rows, kPassing) : 0),
        memory_(tiles_ * (shape.window > 0 ? 2 : 1) + passing_) {
    launch(tile_most_kernel, {tiles_}, kTileKeys, 0, shape.own_rows, shape.subtree_end, memory_.get());
    if (shape.window == 0) return;
    launch(tile_most_kernel, {tiles_}, kTileKeys, 0, shape.own_rows, shape.depth, memory_.get() + tiles_);
    launch(first_depth_kernel, {passing_}, kPassing, 0, shape, memory_.get() + 2 * tiles_);
    facts_ = {nullptr, memory_.get() + tiles_, memory_.get() + 2 * tiles_};
  }
  TileFacts get() const { return {memory_.get(), facts_.last_depth, facts_.first_depth}; }

 private:
  std::int64_t tiles_, passing_;
  Scratch<std::int32_t> memory_;
  TileFacts facts_{};
};

// Calls body with the head size, and whether there is a window or a cap.
template <class Body>
void with_kernels(const Shape& shape, Body&& body) {
  with_head_dim(shape, [&]<int D>() {
    shape.window > 0 || shape.soft_cap > 0 ? body.template operator()<D, true>() : body.template operator()<D, false>();
  });
}

constexpr std::int64_t kMostHeads = 65535;  // of a grid's second dimension; a key/value head of two parts has two

// Shared memory of the backward's blocks: two tiles of 64 rows that stay, four of kPassing rows that pass.
template <int D>
inline constexpr std::int64_t kBackwardBytes = (2 * 64 + 4 * kPassing) * D * 2;

// Forward and backward take the same path, so both have to fit.
bool fits_a_block(const Shape& shape) {
  std::int64_t bytes = 0;
  with_head_dim(shape, [&]<int D>() { bytes = std::max(ForwardTiles<D>::kBytes, kBackwardBytes<D>); });
  return bytes <= most_shared_bytes();
}

}  // namespace

bool takes_tiles(const Shape& shape, const attention::Inputs<bfloat16>& in) {
  constexpr std::int64_t kHeads[] = {64, 96, 128, 192, 256};
  return std::ranges::count(kHeads, shape.head_dim) > 0 && shape.values() == shape.head_dim && fits_a_block(shape) &&
         shape.heads <= kMostHeads / 2 && whole_pieces(in.q) && whole_pieces(in.own_k) && whole_pieces(in.own_v) &&
         whole_pieces(in.path_k) && whole_pieces(in.path_v);
}

void tiled_attention(const Shape& shape, const attention::Inputs<bfloat16>& in, Rows<bfloat16> out, float* lse_HQ) {
  const Facts facts(shape);
  with_kernels(shape, [&]<int D, bool kRules>() {
    launch(forward_tiles_kernel<D, kRules>, {ceil_div(shape.query_rows, 64), shape.heads}, kTileThreads,
           ForwardTiles<D>::kBytes, shape, in, facts.get(), out, lse_HQ);
  });
}

void add_tiled_attention_backward(const Shape& shape, const attention::Inputs<bfloat16>& in, Rows<const bfloat16> out,
                                  const float* lse_HQ, Rows<const bfloat16> grad_out,
                                  const attention::Gradients<bfloat16>& grads) {
  const Facts facts(shape);
  const Scratch<float> delta(shape.heads * shape.query_rows);
  attention_delta(shape, out, grad_out, delta.get());
  with_kernels(shape, [&]<int D, bool kRules>() {
    constexpr std::int64_t kBytes = kBackwardBytes<D>;
    launch(backward_queries_tiles_kernel<D, kRules>, {ceil_div(shape.query_rows, 64), shape.heads}, kTileThreads,
           kBytes, shape, in, facts.get(), grad_out, lse_HQ, delta.get(), grads.q);
    const std::int64_t parts = shape.kv_heads * kKeyParts<D>;
    launch(backward_keys_tiles_kernel<D, true, kRules>, {ceil_div(shape.path_rows, 64), parts}, kTileThreads, kBytes,
           shape, in, facts.get(), grad_out, lse_HQ, delta.get(), grads.path_k, grads.path_v);
    launch(backward_keys_tiles_kernel<D, false, kRules>, {ceil_div(shape.own_rows, 64), parts}, kTileThreads, kBytes,
           shape, in, facts.get(), grad_out, lse_HQ, delta.get(), grads.own_k, grads.own_v);
  });
}

}  // namespace espalier::cuda
