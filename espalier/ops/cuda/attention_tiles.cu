// Attention of bfloat16 on tensor cores: tiles of 64 queries (or keys) stay in registers while tiles of their partners
// pass through two buffers in shared memory, one being fetched while the other is multiplied. S is made twice in the
// backward, once for the gradients of keys and values and once for the queries', so that each sum has one owner:
// no atomics, and the same bits each time. Windows and soft caps have kernels of their own (kRules), so that those
// without them do not pay for them.
#include <algorithm>

#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/key_tiles.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/tiles.h"

namespace espalier::cuda {
namespace {

constexpr int kPassing = 32;  // rows of the side that passes by in the backward

// For each tile of own rows the largest and smallest of their numbers, none of which is negative. Rows behind the last
// one have 0.
__global__ void __launch_bounds__(kTileKeys)
    tile_range_kernel(std::int64_t own_rows, const std::int32_t* numbers, std::int32_t* most, std::int32_t* least) {
  ESPALIER_SHARED(std::int32_t[kTileKeys], all);
  const std::int64_t row = grid_thread();
  all[threadIdx.x] = row < own_rows ? numbers[row] : 0;
  __syncthreads();
  if (threadIdx.x != 0) return;
  std::int32_t largest = all[0], smallest = all[0];
  for (int i = 1; i < kTileKeys; ++i) {
    largest = all[i] > largest ? all[i] : largest;
    smallest = all[i] < smallest ? all[i] : smallest;
  }
  most[blockIdx.x] = largest;
  least[blockIdx.x] = smallest;
}

// For each tile of queries the smallest and largest first depth that one of them sees.
__global__ void __launch_bounds__(kPassing)
    first_depth_kernel(Shape shape, std::int32_t* least_first, std::int32_t* most_first) {
  const std::int64_t query = grid_thread(), last = shape.query_rows - 1;
  std::int32_t least = first_depth_of(shape, own_row_of(shape, query < last ? query : last)), most = least;
#pragma unroll
  for (int lanes = kPassing / 2; lanes > 0; lanes /= 2) {
    const std::int32_t low = __shfl_xor_sync(kWholeWarp, least, lanes);
    const std::int32_t high = __shfl_xor_sync(kWholeWarp, most, lanes);
    least = low < least ? low : least;
    most = high > most ? high : most;
  }
  if (threadIdx.x != 0) return;
  least_first[blockIdx.x] = least;
  most_first[blockIdx.x] = most;
}

__device__ __forceinline__ int own_row(const Shape& shape, int query) {
  return static_cast<int>(own_row_of(shape, query));
}

// Tiles of kKeys keys that a block's 64 queries meet.
template <int kKeys, bool kRules>
using BlockTiles = KeyTiles<Tiling<kKeys, kTileKeys, 64, kPassing, kRules>>;

// Rounds of LanePieces<D>::kOffsets steps of 16 columns whose loads may be under way together: of large heads one, for
// want of registers.
template <int D>
inline constexpr int kRoundsAtOnce = D > 128 ? 1 : D / 16 / LanePieces<D>::kOffsets;

// Large heads leave no registers for the queries' fragments, which are then read from shared memory for each tile, and
// only for half as many keys at a time.
template <int D>
struct ForwardTiles {
  static constexpr bool kQueriesInRegisters = D <= 128;
  static constexpr int kKeys = kQueriesInRegisters ? 64 : 32;
  static constexpr std::int64_t kBytes = (4 * kKeys + (kQueriesInRegisters ? 0 : 64)) * D * 2;
};

// True if some row may not see some key of a tile: a branch of the kernel for each.
template <bool masked>
struct Masked {
  static constexpr bool value = masked;
};

// A region's rows of keys or values of one head.
struct HeadRows {
  const bfloat16* data;
  int stride;

  __device__ __forceinline__ HeadRows(const Rows<const bfloat16>& rows, int head, int head_dim)
      : data(rows.data + static_cast<std::int64_t>(head) * head_dim), stride(static_cast<int>(rows.stride)) {}
};

template <int D, bool kRules>
__global__ void __launch_bounds__(kTileThreads, 1)
    forward_tiles_kernel(Shape shape, attention::Inputs<bfloat16> in, TileFacts facts, Rows<bfloat16> out,
                         float* lse_HQ) {
  using Tiles = ForwardTiles<D>;
  constexpr int kKeys = Tiles::kKeys, kOffsets = LanePieces<D>::kOffsets, kTileBytes = kKeys * D * 2;
  // Two buffers of k, v [kKeys][D], and the queries.
  const SharedPlace memory = place_of(dynamic_shared<bfloat16>());
  const SharedPlace tile_q = memory + (Tiles::kQueriesInRegisters ? 2 : 4) * kTileBytes;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
            t = lane % 4;
  const int first_query = static_cast<int>(blockIdx.x) * 64, head = static_cast<int>(blockIdx.y);
  const int kv_head = head / static_cast<int>(shape.heads / shape.kv_heads);
  const int queries = static_cast<int>(shape.query_rows), own_rows = static_cast<int>(shape.own_rows),
            path_rows = static_cast<int>(shape.path_rows);
  const BlockTiles<kKeys, kRules> tiles(shape, first_query, facts);
  const auto fetch = [&](int n, int buffer) {
    const bool path = tiles.is_path(n);
    const int first = tiles.first(n), rows = path ? path_rows : own_rows;
    const HeadRows k(path ? in.path_k : in.own_k, kv_head, D), v(path ? in.path_v : in.own_v, kv_head, D);
    const SharedPlace to = memory + buffer * 2 * kTileBytes;
    fetch_tile<D, kKeys>(to, k.data, k.stride, first, rows);
    fetch_tile<D, kKeys>(to + kTileBytes, v.data, v.stride, first, rows);
  };
  const HeadRows q(in.q, head, D);
  fetch_tile<D, 64>(tile_q, q.data, q.stride, first_query, queries);
  cp_async_commit();
  int n = tiles.from(kRules ? tiles.begin : 0);
  bool whole = tiles.whole(n);
  fetch(n, 0);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  // Rows that this lane names to ldmatrix: of queries, of keys (in b0 b1 keys 0..7 of 16, in b2 b3 the others), of
  // values.
  const LanePieces<D> query_pieces(warp * 16 + lane % 16, lane / 16),
      key_pieces(lane / 16 * 8 + lane % 8, lane / 8 % 2), value_pieces(lane % 16, lane / 16);
  unsigned fq[Tiles::kQueriesInRegisters ? D / 16 : 1][4];
  if constexpr (Tiles::kQueriesInRegisters) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) ldmatrix_x4<false>(fq[k], tile_q + query_pieces.at(0, k));
    __syncthreads();  // the queries are read: their place is free for keys
  }

  int row[2];  // own rows of the two query rows of this lane
  FirstDepths<kRules> first_depths;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = own_row(shape, min(first_query + warp * 16 + g + 8 * r, queries - 1));
    first_depths.set(shape, r, row[r]);
  }
  float acc[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  // Scores stay products until the exponential, whose argument is one multiply-add. Caps are in units of ln 2 before.
  const float unit = kRules ? 1.f : to_log2;
  // Every row sees itself: there is a tile, and the last round waits for all that was fetched.
  for (int buffer = 0; n < tiles.all; buffer ^= 1) {
    const int next = tiles.from(n + 1);
    bool next_whole = false;
    if (next < tiles.all) {
      fetch(next, buffer ^ 1);
      next_whole = tiles.whole(next);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const SharedPlace tile_k = memory + buffer * 2 * kTileBytes, tile_v = tile_k + kTileBytes;
    float s[kKeys / 8][4] = {};
    [[maybe_unused]] constexpr int kAtOnce = kRoundsAtOnce<D>;  // g++ knows no such pragma
#pragma unroll kAtOnce
    for (int first = 0; first < D / 16; first += kOffsets) {
#pragma unroll
      for (int k = 0; k < kOffsets; ++k) {
        const int columns = first / kOffsets * kOffsets * 32;  // the rounds before, in bytes
        unsigned(&a)[4] = fq[Tiles::kQueriesInRegisters ? first + k : 0];
        if constexpr (!Tiles::kQueriesInRegisters) ldmatrix_x4<false>(a, tile_q + query_pieces.at(0, k) + columns);
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) {
          unsigned b[4];
          ldmatrix_x4<false>(b, tile_k + key_pieces.at(j * 16, k) + columns);
          mma_16816(s[2 * j], a, b[0], b[1]);
          mma_16816(s[2 * j + 1], a, b[2], b[3]);
        }
      }
    }
    if constexpr (kRules) {
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[j][c] = log2_score<kRules>(shape, s[j][c], scale, to_log2).value;
    }
    if (!whole) {
      const bool path = tiles.is_path(n);
      const int first = tiles.first(n);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = first + j * 8 + 2 * t + c;
          const int end = !path && key < own_rows ? shape.subtree_end[key] : 0;
          const std::int32_t depth = key_depth<kRules>(shape, path, key < own_rows, key);
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (!sees(path, key, path_rows, row[r], end) || !first_depths.reach(r, depth)) s[j][2 * r + c] = -INFINITY;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = top[r];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) high = fmaxf(high, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) high = fmaxf(high, __shfl_xor_sync(kWholeWarp, high, lanes));
      const float base = high == -INFINITY ? 0.f : high * unit, less = exp2_approximate(top[r] * unit - base);
      top[r] = high;
      sum[r] *= less;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) acc[j][2 * r] *= less, acc[j][2 * r + 1] *= less;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[j][2 * r + c] = exp2_approximate(s[j][2 * r + c] * unit - base);
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
        ldmatrix_x4<true>(b, tile_v + value_pieces.at(k * 16, j));
        mma_16816(acc[2 * j], a, b[0], b[1]);
        mma_16816(acc[2 * j + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // the buffer is free
    n = next, whole = next_whole;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) sum[r] += __shfl_xor_sync(kWholeWarp, sum[r], lanes);
    const std::int64_t query = first_query + warp * 16 + g + 8 * r;
    if (query >= queries) continue;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<unsigned*>(out.data + query * out.stride + head * D + j * 8 + 2 * t) =
          packed(acc[j][2 * r] / sum[r], acc[j][2 * r + 1] / sum[r]);
    if (t == 0) lse_HQ[head * shape.query_rows + query] = (top[r] * unit + log2f(sum[r])) * kLn2;
  }
}

// S = x y^T and P = grad_x' y'^T of 64 rows of one side (`here`, x and its partner) against kOthers of the other.
// `fragments` gives the fragments of 16 columns of x and its partner.
template <int D, int kOthers, class Fragments>
__device__ __forceinline__ void two_products(const Fragments& fragments, SharedPlace there_a, SharedPlace there_b,
                                             const LanePieces<D>& pieces, float (&s)[kOthers / 8][4],
                                             float (&p)[kOthers / 8][4]) {
  constexpr int kOffsets = LanePieces<D>::kOffsets;
  [[maybe_unused]] constexpr int kAtOnce = kRoundsAtOnce<D>;  // g++ knows no such pragma
#pragma unroll kAtOnce
  for (int first = 0; first < D / 16; first += kOffsets) {
#pragma unroll
    for (int c = 0; c < kOffsets; ++c) {
      const int columns = first / kOffsets * kOffsets * 32;  // the rounds before, in bytes
      unsigned fa[4], fb[4];
      fragments(first, c, columns, fa, fb);
#pragma unroll
      for (int j = 0; j < kOthers / 16; ++j) {
        const int at = pieces.at(j * 16, c) + columns;
        unsigned b[4];
        ldmatrix_x4<false>(b, there_a + at);
        mma_16816(s[2 * j], fa, b[0], b[1]);
        mma_16816(s[2 * j + 1], fa, b[2], b[3]);
        ldmatrix_x4<false>(b, there_b + at);
        mma_16816(p[2 * j], fb, b[0], b[1]);
        mma_16816(p[2 * j + 1], fb, b[2], b[3]);
      }
    }
  }
}

// acc += x y, x [64, kOthers] in the fragments of a product's result, y [kOthers, kColumns] in columns of a tile, which
// `pieces` begin with.
template <int D, int kOthers, int kColumns = D>
__device__ __forceinline__ void add_product(const float (&x)[kOthers / 8][4], SharedPlace y,
                                            const LanePieces<D>& pieces, float (&acc)[kColumns / 8][4]) {
#pragma unroll
  for (int k = 0; k < kOthers / 16; ++k) {
    const unsigned a[4] = {packed(x[2 * k][0], x[2 * k][1]), packed(x[2 * k][2], x[2 * k][3]),
                           packed(x[2 * k + 1][0], x[2 * k + 1][1]), packed(x[2 * k + 1][2], x[2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      unsigned b[4];
      ldmatrix_x4<true>(b, y + pieces.at(k * 16, j));
      mma_16816(acc[2 * j], a, b[0], b[1]);
      mma_16816(acc[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Parts of a head whose gradients of keys and values fit in the registers of a block; each makes S and P by itself.
template <int D>
inline constexpr int kKeyParts = D > 128 ? 2 : 1;

// The tiles of queries that 64 keys meet, [first, last), and the tiles in which all see all, [first_whole,
// last_whole), but for windows. Query rows ascend, so each is one run.
template <bool kPath>
struct QueryTiles {
  int first = 0, last, first_whole, last_whole;

  __device__ __forceinline__ QueryTiles(const Shape& shape, const TileFacts& facts, int first_key, int keys) {
    const int queries = static_cast<int>(shape.query_rows);
    last = (queries + kPassing - 1) / kPassing;
    const auto first_row = [&](int n) { return own_row(shape, n * kPassing); };
    const auto last_row = [&](int n) { return own_row(shape, min((n + 1) * kPassing, queries) - 1); };
    if constexpr (!kPath) {
      const int end = facts.most_end[blockIdx.x];
      if (shape.query_row == nullptr)
        first = min(first_key / kPassing, last), last = min(last, (end + kPassing - 1) / kPassing);
      while (first < last && last_row(first) < first_key) ++first;
      while (first < last && first_row(last - 1) >= end) --last;
    }
    first_whole = first, last_whole = first_key + 64 <= keys ? min(last, queries / kPassing) : first;
    if constexpr (!kPath) {
      const int end = facts.least_end[blockIdx.x];
      while (first_whole < last_whole && first_row(first_whole) < first_key + 63) ++first_whole;
      while (first_whole < last_whole && last_row(last_whole - 1) >= end) --last_whole;
    }
  }
};

// Gradients of 64 keys and values of a part of a key/value head, of the path or of the own rows; added to.
template <int D, bool kPath, bool kRules>
__global__ void __launch_bounds__(kTileThreads, 1)
    backward_keys_tiles_kernel(Shape shape, attention::Inputs<bfloat16> in, TileFacts facts,
                               Rows<const bfloat16> grad_out, const float* lse_HQ, const float* delta_HQ,
                               Rows<float> grad_k, Rows<float> grad_v) {
  // k, v [64][D]; two buffers of q, dO [32][D]; two of lse, delta [32].
  constexpr int kTileBytes = kPassing * D * 2;
  bfloat16* const begin = dynamic_shared<bfloat16>();
  const SharedPlace memory = place_of(begin), tile_k = memory, tile_v = memory + 2 * kTileBytes;
  float* const numbers = reinterpret_cast<float*>(begin + 8 * kTileBytes / 2);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
            t = lane % 4;
  constexpr int kColumns = D / kKeyParts<D>;
  const int first_column = static_cast<int>(blockIdx.y) % kKeyParts<D> * kColumns;
  const int first_key = static_cast<int>(blockIdx.x) * 64, kv_head = static_cast<int>(blockIdx.y) / kKeyParts<D>;
  const int keys = static_cast<int>(kPath ? shape.path_rows : shape.own_rows),
            queries = static_cast<int>(shape.query_rows), group = static_cast<int>(shape.heads / shape.kv_heads);
  const HeadRows k(kPath ? in.path_k : in.own_k, kv_head, D), v(kPath ? in.path_v : in.own_v, kv_head, D);
  fetch_tile<D, 64>(tile_k, k.data, k.stride, first_key, keys);
  fetch_tile<D, 64>(tile_v, v.data, v.stride, first_key, keys);
  const QueryTiles<kPath> tiles(shape, facts, first_key, keys);
  // A tile of queries of one of the heads; behind the last tile of the last one, head == group.
  struct Pass {
    int head, tile;
  };
  const auto next_of = [&](Pass pass) {
    return pass.tile + 1 < tiles.last ? Pass{pass.head, pass.tile + 1} : Pass{pass.head + 1, tiles.first};
  };
  // The first pass from this one on with a query whose window reaches a key of this block.
  const int deepest = kPath ? min(first_key + 63, keys - 1)
                            : (kRules && facts.most_depth != nullptr ? facts.most_depth[blockIdx.x] : 0);
  const auto from = [&](Pass pass) {
    if constexpr (kRules) {
      while (pass.head < group && facts.least_first != nullptr && facts.least_first[pass.tile] > deepest)
        pass = next_of(pass);
    }
    return pass;
  };
  const auto fetch = [&](Pass pass, int buffer) {
    const int head = kv_head * group + pass.head, first = pass.tile * kPassing;
    const HeadRows q(in.q, head, D), grads(grad_out, head, D);
    const SharedPlace to = memory + (4 + buffer * 2) * kTileBytes;
    fetch_tile<D, kPassing>(to, q.data, q.stride, first, queries);
    fetch_tile<D, kPassing>(to + kTileBytes, grads.data, grads.stride, first, queries);
    const int number = static_cast<int>(threadIdx.x), query = first + number % kPassing;
    if (number < 2 * kPassing)
      cp_async<4>(place_of(numbers + buffer * 2 * kPassing + number),
                  (number < kPassing ? lse_HQ : delta_HQ) + head * shape.query_rows + query, query < queries);
  };
  Pass pass = from({tiles.first < tiles.last ? 0 : group, tiles.first});
  if (pass.head < group) fetch(pass, 0);
  cp_async_commit();
  int end[2];  // of the subtrees of the two keys of this lane
  std::int32_t depth[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + warp * 16 + g + 8 * r;
    end[r] = !kPath && key < keys ? shape.subtree_end[key] : 0;
    depth[r] = key_depth<kRules>(shape, kPath, key < keys, key);
  }
  const std::int32_t shallowest =
      kPath ? first_key : (kRules && facts.least_depth != nullptr ? facts.least_depth[blockIdx.x] : 0);
  const LanePieces<D> here(warp * 16 + lane % 16, lane / 16), there(lane / 16 * 8 + lane % 8, lane / 8 % 2),
      columns(lane % 16, first_column / 8 + lane / 16);
  const auto fragments = [&](int, int c, int bytes, unsigned(&fk)[4], unsigned(&fv)[4]) {
    ldmatrix_x4<false>(fk, tile_k + here.at(0, c) + bytes);
    ldmatrix_x4<false>(fv, tile_v + here.at(0, c) + bytes);
  };
  float dk[kColumns / 8][4] = {}, dv[kColumns / 8][4] = {};
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  for (int buffer = 0; pass.head < group; buffer ^= 1) {
    const Pass next = from(next_of(pass));
    if (next.head < group) fetch(next, buffer ^ 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const SharedPlace tile_q = memory + (4 + buffer * 2) * kTileBytes, tile_g = tile_q + kTileBytes;
    const float* const of_queries = numbers + buffer * 2 * kPassing;
    float s[kPassing / 8][4] = {}, dp[kPassing / 8][4] = {};
    two_products<D, kPassing>(fragments, tile_q, tile_g, there, s, dp);
    const auto score = [&](auto masked) {
#pragma unroll
      for (int j = 0; j < kPassing / 8; ++j) {
        const Pack<float, 2> lse = load_pack<2>(of_queries + j * 8 + 2 * t),
                             delta = load_pack<2>(of_queries + kPassing + j * 8 + 2 * t);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = pass.tile * kPassing + j * 8 + 2 * t + c;
          const bool inside = !masked.value || query < queries;
          const int row = masked.value && inside ? own_row(shape, query) : 0;
          const std::int32_t first_depth = masked.value && kRules && inside ? first_depth_of(shape, row) : 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int key = first_key + warp * 16 + g + 8 * r;
            const bool seen = !masked.value ||
                              (inside && sees(kPath, key, keys, row, end[r]) && (!kRules || depth[r] >= first_depth));
            const Score<float> score = log2_score<kRules>(shape, s[j][2 * r + c], scale, to_log2);
            const float p = seen ? exp2_approximate(score.value - lse.x[c] * kLog2E) : 0.f;
            s[j][2 * r + c] = p;
            dp[j][2 * r + c] = score.slope * p * (dp[j][2 * r + c] - delta.x[c]);
          }
        }
      }
    };
    bool whole = tiles.first_whole <= pass.tile && pass.tile < tiles.last_whole;
    if (kRules && facts.most_first != nullptr) whole = whole && facts.most_first[pass.tile] <= shallowest;
    if (whole)
      score(Masked<false>{});
    else
      score(Masked<true>{});
    add_product<D, kPassing, kColumns>(s, tile_g, columns, dv);
    add_product<D, kPassing, kColumns>(dp, tile_q, columns, dk);
    __syncthreads();  // the buffer is free
    pass = next;
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
  // q, dO [64][D]; two buffers of k, v [32][D]
  constexpr int kTileBytes = kPassing * D * 2;
  constexpr bool kInRegisters = D <= 128;  // fragments of the queries and their gradients
  const SharedPlace memory = place_of(dynamic_shared<bfloat16>()), tile_q = memory, tile_g = memory + 2 * kTileBytes;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4,
            t = lane % 4;
  const int first_query = static_cast<int>(blockIdx.x) * 64, head = static_cast<int>(blockIdx.y);
  const int kv_head = head / static_cast<int>(shape.heads / shape.kv_heads);
  const int queries = static_cast<int>(shape.query_rows), own_rows = static_cast<int>(shape.own_rows),
            path_rows = static_cast<int>(shape.path_rows);
  const BlockTiles<kPassing, kRules> tiles(shape, first_query, facts);
  const auto fetch = [&](int n, int buffer) {
    const bool path = tiles.is_path(n);
    const int first = tiles.first(n), rows = path ? path_rows : own_rows;
    const HeadRows k(path ? in.path_k : in.own_k, kv_head, D), v(path ? in.path_v : in.own_v, kv_head, D);
    const SharedPlace to = memory + (4 + buffer * 2) * kTileBytes;
    fetch_tile<D, kPassing>(to, k.data, k.stride, first, rows);
    fetch_tile<D, kPassing>(to + kTileBytes, v.data, v.stride, first, rows);
  };
  const HeadRows q(in.q, head, D), grads(grad_out, head, D);
  fetch_tile<D, 64>(tile_q, q.data, q.stride, first_query, queries);
  fetch_tile<D, 64>(tile_g, grads.data, grads.stride, first_query, queries);
  cp_async_commit();
  int n = tiles.from(kRules ? tiles.begin : 0);
  bool whole = tiles.whole(n);
  fetch(n, 0);
  cp_async_commit();
  const LanePieces<D> here(warp * 16 + lane % 16, lane / 16), there(lane / 16 * 8 + lane % 8, lane / 8 % 2),
      columns(lane % 16, lane / 16);
  unsigned fq[kInRegisters ? D / 16 : 1][4], fg[kInRegisters ? D / 16 : 1][4];
  if constexpr (kInRegisters) {
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      ldmatrix_x4<false>(fq[c], tile_q + here.at(0, c));
      ldmatrix_x4<false>(fg[c], tile_g + here.at(0, c));
    }
  }
  const auto fragments = [&](int first, int c, int bytes, unsigned(&a)[4], unsigned(&b)[4]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = fq[first + c][i], b[i] = fg[first + c][i];
    } else {
      ldmatrix_x4<false>(a, tile_q + here.at(0, c) + bytes);
      ldmatrix_x4<false>(b, tile_g + here.at(0, c) + bytes);
    }
  };
  int row[2];
  FirstDepths<kRules> first_depths;
  float lse[2], delta[2], dq[D / 8][4] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = min(first_query + warp * 16 + g + 8 * r, queries - 1);
    row[r] = own_row(shape, query);
    first_depths.set(shape, r, row[r]);
    lse[r] = lse_HQ[head * shape.query_rows + query] * kLog2E;
    delta[r] = delta_HQ[head * shape.query_rows + query];
  }
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  // Every row sees itself: there is a tile, and the last round waits for all that was fetched.
  for (int buffer = 0; n < tiles.all; buffer ^= 1) {
    const int next = tiles.from(n + 1);
    bool next_whole = false;
    if (next < tiles.all) {
      fetch(next, buffer ^ 1);
      next_whole = tiles.whole(next);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const SharedPlace tile_k = memory + (4 + buffer * 2) * kTileBytes, tile_v = tile_k + kTileBytes;
    float s[kPassing / 8][4] = {}, dp[kPassing / 8][4] = {};
    two_products<D, kPassing>(fragments, tile_k, tile_v, there, s, dp);
    const auto score = [&](auto masked) {
      const bool path = tiles.is_path(n);
      const int first = tiles.first(n);
#pragma unroll
      for (int j = 0; j < kPassing / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = first + j * 8 + 2 * t + c;
          const int end = masked.value && !path && key < own_rows ? shape.subtree_end[key] : 0;
          const std::int32_t depth = masked.value ? key_depth<kRules>(shape, path, key < own_rows, key) : 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const bool seen =
                !masked.value || (sees(path, key, path_rows, row[r], end) && first_depths.reach(r, depth));
            const Score<float> score = log2_score<kRules>(shape, s[j][2 * r + c], scale, to_log2);
            const float p = seen ? exp2_approximate(score.value - lse[r]) : 0.f;
            s[j][2 * r + c] = score.slope * p * (dp[j][2 * r + c] - delta[r]);
          }
        }
    };
    if (whole)
      score(Masked<false>{});
    else
      score(Masked<true>{});
    add_product<D, kPassing>(s, tile_k, columns, dq);
    __syncthreads();  // the buffer is free
    n = next, whole = next_whole;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t query = first_query + warp * 16 + g + 8 * r;
    if (query >= queries) continue;
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
      : windows_(shape.window > 0),
        tiles_(ceil_div(shape.own_rows, kTileKeys)),
        passing_(windows_ ? ceil_div(shape.query_rows, kPassing) : 0),
        memory_(tiles_ * (windows_ ? 4 : 2) + passing_ * 2) {
    std::int32_t* const ends = memory_.get();
    facts_.most_end = ends, facts_.least_end = ends + tiles_;
    launch(tile_range_kernel, {tiles_}, kTileKeys, 0, shape.own_rows, shape.subtree_end, ends, ends + tiles_);
    if (!windows_) return;
    std::int32_t *const depths = ends + 2 * tiles_, *const first = depths + 2 * tiles_;
    facts_.most_depth = depths, facts_.least_depth = depths + tiles_;
    facts_.least_first = first, facts_.most_first = first + passing_;
    launch(tile_range_kernel, {tiles_}, kTileKeys, 0, shape.own_rows, shape.depth, depths, depths + tiles_);
    launch(first_depth_kernel, {passing_}, kPassing, 0, shape, first, first + passing_);
  }
  const TileFacts& get() const { return facts_; }

 private:
  bool windows_;
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

// Shared memory of the backward's blocks: two tiles of 64 rows that stay, four of kPassing rows that pass, and in the
// kernel of keys the log-sum-exp and delta of those.
template <int D>
inline constexpr std::int64_t kBackwardBytes = (2 * 64 + 4 * kPassing) * D * 2 + 4 * kPassing * 4;

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
         shape.scale > 0 && shape.heads <= kMostHeads / 2 && whole_pieces(in.q) && whole_pieces(in.own_k) &&
         whole_pieces(in.own_v) && whole_pieces(in.path_k) && whole_pieces(in.path_v);
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
