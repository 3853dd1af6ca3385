// Forward: a block has 128 queries of a head. One thread of its first warpgroup has tiles of keys and values copied;
// each of the other two multiplies 64 queries. The two take turns: while one computes weights, the other multiplies.
// The scores of a tile are multiplied while the values of the tile before are. Windows and soft caps have kernels of
// their own (kRules).
#include "espalier/ops/cuda/hopper/attention.h"
#include "espalier/ops/cuda/hopper/key_stages.h"

namespace espalier::cuda::hopper {
namespace {

using attention::Inputs;

constexpr int kTurn = 1;  // number of the barrier of the first group's turn; the next one is the second group's

struct ForwardMaps {
  TensorMap q;
  KeyMaps keys;
};

// Keys of a tile: as many as registers and shared memory hold. Windows and caps take registers.
template <int D, int V, bool rules>
inline constexpr int kForwardKeys = D == 64    ? (rules ? 128 : 192)
                                    : D <= 128 ? (rules ? 96 : 176)
                                    : D == 256 ? (rules ? 64 : 80)
                                    : V == 128 ? (rules ? 96 : 128)
                                               : (rules ? 80 : 112);

// Shared memory: queries, stages of keys and of values, barriers, the numbers of the tiles in the stages.
template <int D, int V, bool rules>
struct ForwardRoom : Tiling<kForwardKeys<D, V, rules>, kForwardKeys<D, V, rules>, kBlockQueries, kFactQueries, rules> {
  static constexpr int kKeys = kForwardKeys<D, V, rules>;
  static constexpr int kQueryBytes = kParts<D> * kPartBytes<kBlockQueries>, kKeyBytes = kParts<D> * kPartBytes<kKeys>,
                       kValueBytes = kParts<V> * kPartBytes<kKeys>;
  static constexpr int kTilesK = kQueryBytes, kTilesV = kTilesK + kStages * kKeyBytes,
                       kBarriers = kTilesV + kStages * kValueBytes, kNumbers = kBarriers + StageBarriers::kBytes,
                       kBytes = kNumbers + 4 * kStages;
  static_assert(kBytes <= kSharedBytes);
};

template <int D, int V, bool kRules>
__global__ void __launch_bounds__(kBlockThreads, 1)
    hopper_forward_kernel(const ESPALIER_GRID_CONSTANT ForwardMaps maps, const Shape shape, const TileFacts facts,
                          const Rows<bfloat16> out, float* const lse_HQ) {
  using Room = ForwardRoom<D, V, kRules>;
  constexpr int kKeys = Room::kKeys, kWide = kParts<V> * kPartColumns;  // columns of values with those behind V
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
      barrier_expect(barriers.full_staying(), Room::kQueryBytes);
      load_tile<D, kBlockQueries>(memory, maps.q, barriers.full_staying(), head * D, first_query);
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
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = static_cast<int>(own_row_of(shape, min(first_query + in_tile + 8 * r, queries - 1)));
    first_depths.set(shape, r, row[r]);
  }
  const float scale = static_cast<float>(shape.scale), to_log2 = scale * kLog2E;
  // Scores stay products until the exponential, whose argument is one multiply-add. Caps are in units of ln 2 before.
  const float unit = kRules ? 1.f : to_log2;
  float acc[kWide / 2], s[kKeys / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float less[2];  // the factor of earlier sums
  unsigned weights[kKeys / 16][4];
  const std::uint64_t factor_q = factor_at(memory + group * 64 * kPartRowBytes, 16),
                      factor_k = factor_at(memory + Room::kTilesK, 16),
                      factor_v = factor_at(memory + Room::kTilesV, kPartBytes<kKeys>);
  const auto scores = [&](int stage) {
    multiply_rows<D, kKeys, kBlockQueries, kKeys>(s, factor_q, further(factor_k, stage * Room::kKeyBytes));
  };
  const auto values = [&](int stage, bool adds) {
    multiply_columns<kWide, kKeys>(acc, weights, further(factor_v, stage * Room::kValueBytes), adds);
  };
  // Turns the scores of a tile into weights.
  const auto weigh = [&](int number) {
    if constexpr (kRules) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = log2_score<kRules>(shape, s[i], scale, to_log2).value;
    }
    if (number % 2 == 0) mask<Room>(shape, number / 2, row, first_depths, t, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = top[r];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) high = fmaxf(high, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) high = fmaxf(high, __shfl_xor_sync(kWholeWarp, high, lanes));
      const float base = high == -INFINITY ? 0.f : high * unit;
      less[r] = exp2_approximate(top[r] * unit - base);
      top[r] = high;
      sum[r] *= less[r];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& weight = s[4 * j + 2 * r + c];
          weight = exp2_approximate(weight * unit - base);
          sum[r] += weight;
        }
    }
  };

  if (group == 1) named_arrive(kTurn, kGroups * kGroupThreads);  // the first group begins
  Stage stage{0, 0};
  barrier_wait(barriers.full_staying(), 0);
  barrier_wait(barriers.full_first(0), 0);  // every row sees itself: there is a tile
  int number = numbers[0];
  wgmma_fence();
  scores(0);
  wgmma_wait<0>();
  keep(s);
  release(barriers.empty_first(0));
  weigh(number);
  round_factor<kKeys>(s, weights);
  for (bool adds = false;; adds = true) {
    Stage next = stage;
    next.advance();
    barrier_wait(barriers.full_first(next.number), next.parity);
    number = numbers[next.number];
    if (number < 0) {
      if (group == 0) named_wait(kTurn, kGroups * kGroupThreads);  // its last turn
      barrier_wait(barriers.full_second(stage.number), stage.parity);
      wgmma_fence();
      values(stage.number, adds);
      wgmma_wait<0>();
      keep(acc);
      break;
    }
    named_wait(kTurn + group, kGroups * kGroupThreads);
    wgmma_fence();
    scores(next.number);
    barrier_wait(barriers.full_second(stage.number), stage.parity);
    wgmma_fence();
    values(stage.number, adds);
    named_arrive(kTurn + 1 - group, kGroups * kGroupThreads);
    wgmma_wait<1>();
    keep(s);
    release(barriers.empty_first(next.number));
    weigh(number);
    wgmma_wait<0>();
    keep(acc);
    release(barriers.empty_second(stage.number));
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) acc[i] *= less[i / 2 % 2];
    round_factor<kKeys>(s, weights);
    stage = next;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) sum[r] += __shfl_xor_sync(kWholeWarp, sum[r], lanes);
    const int query = first_query + in_tile + 8 * r;
    if (query >= queries) continue;
    const float whole = 1.f / sum[r];
    bfloat16* const to = out.data + query * out.stride + head * V + 2 * t;
#pragma unroll
    for (int j = 0; j < V / 8; ++j)
      *reinterpret_cast<unsigned*>(to + 8 * j) = packed(acc[4 * j + 2 * r] * whole, acc[4 * j + 2 * r + 1] * whole);
    if (t == 0) lse_HQ[head * shape.query_rows + query] = (top[r] * unit + log2f(sum[r])) * kLn2;
  }
}

constexpr std::int64_t kMostHeads = 65535;  // of a grid's second dimension

}  // namespace

bool takes_copies(const Rows<const bfloat16>& rows) { return aligned_16(rows.data) && rows.stride % 8 == 0; }

bool takes_forward(const Shape& shape, const Inputs<bfloat16>& in, Rows<const bfloat16> out) {
  const std::int64_t D = shape.head_dim, V = shape.values();
  const bool sizes = (D == V && (D == 64 || D == 96 || D == 128 || D == 192 || D == 256)) || (D == 192 && V == 128);
  return sizes && shape.scale > 0 && shape.heads <= kMostHeads && takes_copies(in.q) && takes_copies(in.own_k) &&
         takes_copies(in.own_v) && takes_copies(in.path_k) && takes_copies(in.path_v) && takes_copies(out);
}

void forward(const Shape& shape, const Inputs<bfloat16>& in, Rows<bfloat16> out, float* lse_HQ) {
  if (shape.query_rows == 0) return;
  with_sizes(shape, [&]<int D, int V, bool kRules>() {
    using Room = ForwardRoom<D, V, kRules>;
    const Facts facts(shape, Room::kKeys);
    const ForwardMaps maps{tensor_map({in.q.data, shape.query_rows, shape.heads * D, in.q.stride}, kBlockQueries),
                           key_maps<D, V, Room::kKeys>(shape, in)};
    launch_warpgroups(hopper_forward_kernel<D, V, kRules>, {ceil_div(shape.query_rows, kBlockQueries), shape.heads},
                      Room::kBytes, maps, shape, facts.get(), out, lse_HQ);
  });
}

}  // namespace espalier::cuda::hopper
