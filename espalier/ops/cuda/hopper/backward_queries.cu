// Backward, gradients of queries: a block has 128 queries of a head, and goes over the tiles of keys as the forward
// does. The scores S = Q K^T and dP = dO V^T of a tile are multiplied while the slopes of the tile before are
// multiplied with its keys: dQ += dS K.
#include "espalier/ops/cuda/hopper/backward.h"
#include "espalier/ops/cuda/hopper/key_stages.h"

namespace espalier::cuda::hopper {
namespace {

using attention::Inputs;

constexpr int kTurn = 1;  // number of the barrier of the first group's turn; the next one is the second group's

struct QueriesMaps {
  TensorMap q, grad_out;
  KeyMaps keys;
};

// Keys of a tile: as many as registers hold.
template <int D, bool rules>
inline constexpr int kQueriesKeys = D == 256 || (D > 128 && rules) ? 48
                                    : rules || D > 128             ? 64
                                    : D == 64                      ? 128
                                                                   : 96;

// Shared memory: queries, gradients of their results, stages of keys and of values, barriers, numbers of tiles.
template <int D, int V, bool rules>
struct QueriesRoom : Tiling<kQueriesKeys<D, rules>, kQueriesKeys<D, rules>, kBlockQueries, kFactQueries, rules> {
  static constexpr int kKeys = kQueriesKeys<D, rules>;
  static constexpr int kQueryBytes = kParts<D> * kPartBytes<kBlockQueries>,
                       kGradientBytes = kParts<V> * kPartBytes<kBlockQueries>,
                       kKeyBytes = kParts<D> * kPartBytes<kKeys>, kValueBytes = kParts<V> * kPartBytes<kKeys>;
  static constexpr int kGradients = kQueryBytes, kTilesK = kGradients + kGradientBytes,
                       kTilesV = kTilesK + kStages * kKeyBytes, kBarriers = kTilesV + kStages * kValueBytes,
                       kNumbers = kBarriers + StageBarriers::kBytes, kBytes = kNumbers + 4 * kStages;
  static_assert(kBytes <= kSharedBytes);
};

template <int D, int V, bool kRules>
__global__ void __launch_bounds__(kBlockThreads, 1)
    hopper_backward_queries_kernel(const ESPALIER_GRID_CONSTANT QueriesMaps maps, const Shape shape,
                                   const TileFacts facts, const QueryNumbers of_queries, const QuerySums sums,
                                   const Rows<bfloat16> grad_q) {
  using Room = QueriesRoom<D, V, kRules>;
  constexpr int kKeys = Room::kKeys, kWide = kParts<D> * kPartColumns;
  const SharedPlace memory = place_of(shared_bytes());
  int* const numbers = reinterpret_cast<int*>(shared_bytes() + Room::kNumbers);
  const StageBarriers barriers{memory + Room::kBarriers};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  // Tiles with the most keys first.
  const int first_query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kBlockQueries,
            head = static_cast<int>(blockIdx.y), queries = static_cast<int>(shape.query_rows);
  if (thread == 0) barriers.init();
  __syncthreads();
  if (warp < 4) {
    give_registers<kCopyingRegisters>();
    if (thread == 0) {
      barrier_expect(barriers.full_staying(), Room::kQueryBytes + Room::kGradientBytes);
      load_tile<D, kBlockQueries>(memory, maps.q, barriers.full_staying(), head * D, first_query);
      load_tile<V, kBlockQueries>(memory + Room::kGradients, maps.grad_out, barriers.full_staying(), head * V,
                                  first_query);
      copy_key_tiles<Room, D, V>(maps.keys, shape, facts, memory, barriers, numbers, first_query,
                                 head / (static_cast<int>(shape.heads) / static_cast<int>(shape.kv_heads)));
    }
    return;
  }

  take_registers<kMultiplyingRegisters>();
  const int group = warp / 4 - 1, g = lane / 4, t = lane % 4;
  const int in_tile = 64 * group + warp % 4 * 16 + g;  // of this lane's two queries the first; the other is 8 further
  int row[2];
  FirstDepths<kRules> first_depths;
  float lse[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = min(first_query + in_tile + 8 * r, queries - 1);
    row[r] = static_cast<int>(own_row_of(shape, query));
    first_depths.set(shape, r, row[r]);
    lse[r] = of_queries.lse_log2[head * of_queries.padded + query];
    delta[r] = of_queries.delta[head * of_queries.padded + query];
  }
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  float dq[kWide / 2], s[kKeys / 2], dp[kKeys / 2];
  unsigned slopes[kKeys / 16][4];
  const std::uint64_t factor_q = factor_at(memory + group * 64 * kPartRowBytes, 16),
                      factor_g = factor_at(memory + Room::kGradients + group * 64 * kPartRowBytes, 16),
                      factor_k = factor_at(memory + Room::kTilesK, 16),
                      factor_v = factor_at(memory + Room::kTilesV, 16),
                      columns_k = factor_at(memory + Room::kTilesK, kPartBytes<kKeys>);
  const auto scores = [&](int stage) {
    multiply_rows<D, kKeys, kBlockQueries, kKeys>(s, factor_q, further(factor_k, stage * Room::kKeyBytes));
  };
  const auto value_products = [&](int stage) {
    multiply_rows<V, kKeys, kBlockQueries, kKeys>(dp, factor_g, further(factor_v, stage * Room::kValueBytes));
  };
  const auto add = [&](int stage, bool adds) {
    multiply_columns<kWide, kKeys>(dq, slopes, further(columns_k, stage * Room::kKeyBytes), adds);
  };
  // Turns scores into weights times the slopes of caps.
  const auto weigh = [&](int number) {
    if constexpr (kRules) {
      if (number % 2 == 0) {
        // A cap keeps -inf from the weight, so that keys out of sight are left out behind it.
        float seen[kKeys / 2] = {};
        mask<Room>(shape, number / 2, row, first_depths, t, seen);
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const Score<float> score = log2_score<kRules>(shape, s[i], scale, to_log2);
          s[i] = score.slope * exp2_approximate(score.value + seen[i] - lse[i / 2 % 2]);
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const Score<float> score = log2_score<kRules>(shape, s[i], scale, to_log2);
        s[i] = score.slope * exp2_approximate(score.value - lse[i / 2 % 2]);
      }
      return;
    }
    if (number % 2 == 0) mask<Room>(shape, number / 2, row, first_depths, t, s);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = exp2_approximate(s[i] * to_log2 - lse[i / 2 % 2]);
  };
  const auto slope = [&] {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) dp[i] = s[i] * (dp[i] - delta[i / 2 % 2]);
  };

  if (group == 1) named_arrive(kTurn, kGroups * kGroupThreads);  // the first group begins
  Stage stage{0, 0};
  barrier_wait(barriers.full_staying(), 0);
  barrier_wait(barriers.full_first(0), 0);  // every row sees itself: there is a tile
  int number = numbers[0];
  wgmma_fence();
  scores(0);
  barrier_wait(barriers.full_second(0), 0);
  wgmma_fence();
  value_products(0);
  wgmma_wait<0>();
  keep(s);
  keep(dp);
  release(barriers.empty_second(0));
  weigh(number);
  slope();
  round_factor<kKeys>(dp, slopes);
  for (bool adds = false;; adds = true) {
    Stage next = stage;
    next.advance();
    barrier_wait(barriers.full_first(next.number), next.parity);
    number = numbers[next.number];
    if (number < 0) {
      if (group == 0) named_wait(kTurn, kGroups * kGroupThreads);  // its last turn
      wgmma_fence();
      add(stage.number, adds);
      wgmma_wait<0>();
      keep(dq);
      break;
    }
    named_wait(kTurn + group, kGroups * kGroupThreads);
    wgmma_fence();
    scores(next.number);
    barrier_wait(barriers.full_second(next.number), next.parity);
    wgmma_fence();
    value_products(next.number);
    wgmma_fence();
    add(stage.number, adds);
    named_arrive(kTurn + 1 - group, kGroups * kGroupThreads);
    wgmma_wait<2>();
    keep(s);
    weigh(number);
    wgmma_wait<1>();
    keep(dp);
    release(barriers.empty_second(next.number));
    slope();
    wgmma_wait<0>();
    keep(dq);
    release(barriers.empty_first(stage.number));
    round_factor<kKeys>(dp, slopes);
    stage = next;
  }
  if constexpr (D == 128) {
    const int tile = first_query / kSumQueries + group;
    if (sums.data != nullptr && tile < sums.tiles) {
      const float* const of_tile =
          sums.data + (std::int64_t{head} * sums.tiles + tile) * (kSumBytes / 4) + thread % kGroupThreads * 4;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        const Pack<float, 4> of = load_pack<4>(of_tile + j * kGroupThreads * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) dq[4 * j + i] += of.x[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + in_tile + 8 * r;
    if (query >= queries) continue;
    bfloat16* const to = grad_q.data + query * grad_q.stride + head * D + 2 * t;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<unsigned*>(to + 8 * j) = packed(scale * dq[4 * j + 2 * r], scale * dq[4 * j + 2 * r + 1]);
  }
}

}  // namespace

void backward_queries(const Shape& of, const Inputs<bfloat16>& in, const QueryNumbers& numbers,
                      Rows<const bfloat16> grad_out, const QuerySums& sums, Rows<bfloat16> grad_q) {
  Shape shape = of;
  if (sums.data != nullptr) shape.path_rows = 0;  // its part is in the sums
  with_sizes(shape, [&]<int D, int V, bool kRules>() {
    using Room = QueriesRoom<D, V, kRules>;
    const Facts facts(shape, Room::kKeys);
    const auto map = [&](const Rows<const bfloat16>& rows, int columns) {
      return tensor_map({rows.data, shape.query_rows, shape.heads * columns, rows.stride}, kBlockQueries);
    };
    const QueriesMaps maps{map(in.q, D), map(grad_out, V), key_maps<D, V, Room::kKeys>(shape, in)};
    launch_warpgroups(hopper_backward_queries_kernel<D, V, kRules>,
                      {ceil_div(shape.query_rows, kBlockQueries), shape.heads}, Room::kBytes, maps, shape, facts.get(),
                      numbers, sums, grad_q);
  });
}

}  // namespace espalier::cuda::hopper
