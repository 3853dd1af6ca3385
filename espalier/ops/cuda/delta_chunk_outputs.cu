// Outputs of a chunk whose state is known, O = gamma Q S + P U: a block of threads has a chunk of a value head.
#include "espalier/ops/cuda/delta_chunk_tiles.h"

namespace espalier::cuda {
namespace {

// Q; K, then P; a block of S and of U.
template <int D>
struct OutputRoom {
  static constexpr int kKey = KeyTile<D>::kBytes, kState = StateTile<D>::kBytes;
  static constexpr int kBytes = 2 * kKey + kState + ValueTile::kBytes;
  static_assert(kKey >= SquareTile::kBytes);
};

template <int D>
__global__ void __launch_bounds__(kSplitThreads, 2)
    chunk_outputs_kernel(DeltaShape s, DeltaWeights<bfloat16> w, DeltaRuns<float> runs, ChunkNumbers numbers,
                         ChunkPass pass, bfloat16* o_TV) {
  using Room = OutputRoom<D>;
  ESPALIER_SHARED(double[kChunk], sums);
  ESPALIER_SHARED(float[2 * kChunk], of_rows);
  float *const log_decay = of_rows, *const from_start = of_rows + kChunk;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const KeyTile<D> q{memory}, k{memory + Room::kKey};
  const SquareTile seen{memory + Room::kKey};
  const StateTile<D> state{memory + 2 * Room::kKey};
  const ValueTile u{memory + 2 * Room::kKey + Room::kState};
  const WarpPart part;
  const int m = part.m, n = part.half * 16;
  const std::int64_t chunk = blockIdx.x, of_pass = blockIdx.y, tile = chunk * pass.heads + of_pass,
                     key_tile = chunk * pass.key_heads + of_pass / pass.each,
                     head = pass.first_head * pass.each + of_pass, of_key = of_pass % pass.each;
  const ChunkRows rows = rows_of_chunk(numbers, runs, chunk);
  const DeltaRun<float> run = runs.of[rows.run];
  fetch_split(q, queries_from_start<D>(pass, tile, key_tile));
  if (!pass.channels) fetch_split(k, pass.k + key_tile * kKeyNumbers<D>);
  cp_async_commit();
  if (threadIdx.x < kChunk) {
    log_decay[threadIdx.x] = pass.log_decay[tile * kChunk + threadIdx.x];
    from_start[threadIdx.x] = pass.from_start[tile * kChunk + threadIdx.x];
  }
  __syncthreads();
  sum_decays(log_decay, sums);
  cp_async_wait<0>();
  __syncthreads();
  float of_pairs[4][4];
  clear(of_pairs);
  if (pass.channels)
    load_floats<kChunk>(of_pairs, m, part.half * 32, pass.query_pairs + tile * kChunk * kChunk);
  else
    add_product<Stored::plain, Stored::turned, 2>(of_pairs, q, m, k, part.half * 32, D);
  __syncthreads();  // the keys are read
  store_seen(of_pairs, m, part.half * 32, sums, seen);
  const std::int64_t key_head = pass.first_head + of_pass / pass.each;
  const std::int64_t column = at_head(s.column, s.column_step, key_head).v + of_key * s.value_dim,
                     channel = at_head(s.channel, s.channel_step, key_head).v + of_key * s.value_dim;
  const float skip = w.skip_H != nullptr ? widened(w.skip_H[head]) : 0.f;
  for (std::int64_t block = 0; block < pass.blocks; ++block) {
    fetch_split(state, pass.states + (tile * pass.blocks + block) * kStateNumbers<D>);
    fetch_split(u, pass.u + (tile * pass.blocks + block) * kValueNumbers);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float sum[2][4];
    clear(sum);
    add_product<Stored::plain, Stored::plain, 1>(sum, q, m, state, n, D);
    for_each_two(sum, m, n, [&](int i, int, float& x, float& y) { x *= from_start[i], y *= from_start[i]; });
    add_product<Stored::plain, Stored::plain, 1>(sum, seen, m, u, n, kChunk);
    const auto put = [&](int i, int c, float x) {
      const std::int64_t row = rows.first + i, value = block * kBlockWidth + c;
      if (i >= rows.rows || value >= s.value_dim) return;
      if (skip != 0.f) x += skip * silu(convolved(s, w, run, row, column + value, channel + value));
      o_TV[(row * s.value_heads + head) * s.value_dim + value] = narrowed<bfloat16>(x);
    };
    for_each_two(sum, m, n, [&](int i, int c, float x, float y) { put(i, c, x), put(i, c + 1, y); });
    __syncthreads();  // the tiles are read
  }
}

}  // namespace

void chunk_outputs(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                   const ChunkNumbers& numbers, const ChunkPass& pass, bfloat16* o_TV) {
  const bool narrow = pass.width == 64;
  launch(narrow ? chunk_outputs_kernel<64> : chunk_outputs_kernel<128>, {pass.chunks, pass.heads}, kSplitThreads,
         narrow ? OutputRoom<64>::kBytes : OutputRoom<128>::kBytes, shape, weights, runs, numbers, pass, o_TV);
}

}  // namespace espalier::cuda
