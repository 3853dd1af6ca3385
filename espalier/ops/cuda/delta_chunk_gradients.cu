// Gradients of a chunk's queries and keys, decays and steps, where its state and the gradient behind it are known: a
// block of threads has a chunk of a value head. The gradient of a row's decay is q dq + k dk (read) - k dk (written),
// with X without its diagonal: a row's own product has no decay, and its parts would cancel.
#include <algorithm>

#include "espalier/ops/cuda/delta_chunk_value_sums.h"

namespace espalier::cuda {
namespace {

// Adds up over a row what the lanes and both halves of the warps have of it: to `to` [2, 64], by halves.
__device__ __forceinline__ void put_row_sums(float low, float high, int m, int half, float* to) {
  low = warp_sum<4>(low), high = warp_sum<4>(high);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane % 4 != 0) return;
  to[half * kChunk + m + lane / 4] = low;
  to[half * kChunk + m + lane / 4 + 8] = high;
}

template <int D>
__global__ void __launch_bounds__(kSplitThreads, 1)
    chunk_gradients_kernel(DeltaShape s, DeltaRuns<float> runs, ChunkNumbers numbers, ChunkPass pass,
                           const bfloat16* grad_o_TV) {
  using Room = GradientRoom<D>;
  ESPALIER_SHARED(double[32], of_warps);
  ESPALIER_SHARED(double[kChunk], sums);
  ESPALIER_SHARED(float[9 * kChunk], of_rows);
  float *const log_decay = of_rows, *const beta = of_rows + kChunk, *const from_start = of_rows + 2 * kChunk,
               *const to_end = of_rows + 3 * kChunk, *const own_query = log_decay,
               *const own_value = of_rows + 4 * kChunk, *const written = of_rows + 5 * kChunk,
               *const of_decay = of_rows + 7 * kChunk;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const KeyTile<D> q{memory}, k{memory + Room::kKey};
  const SquareTile of_queries{memory + 2 * Room::kKey}, of_keys{memory + 2 * Room::kKey + SquareTile::kBytes};
  const WarpPart part;
  const int m = part.m, n = part.half * 32, wide_n = part.half * (D / 2);
  const std::int64_t chunk = blockIdx.x, of_pass = blockIdx.y, tile = chunk * pass.heads + of_pass,
                     key_tile = chunk * pass.key_heads + of_pass / pass.each;
  const bool reads = !s.mamba;
  if (threadIdx.x < kChunk) {
    const int row = static_cast<int>(threadIdx.x);
    const std::int64_t at = tile * kChunk + row;
    log_decay[row] = pass.log_decay[at], beta[row] = pass.beta[at];
    from_start[row] = pass.from_start[at], to_end[row] = pass.to_end[at];
  }
  __syncthreads();
  sum_decays(log_decay, sums);

  ValueSums<D> of_values;
  float(&grad_q)[D / 16][4] = of_values.grad_q, (&read_k)[D / 16][4] = of_values.read_k,
                     (&written_k)[D / 16][4] = of_values.written_k;
  const GradRows grad_o(s, grad_o_TV, rows_of_chunk(numbers, runs, chunk), pass.first_head * pass.each + of_pass);
  double dot = 0;
  of_values.add_all(pass, tile, grad_o, reads, memory, [&](const StateTile<D>& state, const StateTile<D>& grad) {
    for (int i = static_cast<int>(threadIdx.x); i < D * kBlockWidth; i += kSplitThreads)
      dot += static_cast<double>(state.get(i / kBlockWidth, i % kBlockWidth)) *
             static_cast<double>(grad.get(i / kBlockWidth, i % kBlockWidth));
  });
  double of_end = static_cast<double>(from_start[kChunk - 1]) * block_sum(dot, of_warps);
  fetch_split(q, pass.q + key_tile * kKeyNumbers<D>);
  fetch_split(k, pass.k + key_tile * kKeyNumbers<D>);
  cp_async_commit();
  store_pairs(of_values.x_ij, m, n, of_queries, own_query, [&](int i, int j) { return decay_between(sums, i, j); });
  if (reads)
    store_pairs(of_values.y_ij, m, n, of_keys, own_value,
                [&](int i, int j) { return -beta[i] * decay_between(sums, i, j); });
  cp_async_wait<0>();
  __syncthreads();
  float low = 0, high = 0;
  const auto add_to_row = [&](int i, float term) {
    (i == m + static_cast<int>(threadIdx.x) % 32 / 4 ? low : high) += term;
  };
  for_each_two(grad_q, m, wide_n, [&](int i, int, float& x, float& y) { x *= from_start[i], y *= from_start[i]; });
  for_each_two(written_k, m, wide_n, [&](int i, int c, float& x, float& y) {
    x *= to_end[i], y *= to_end[i];
    add_to_row(i, x * k.get(i, c) + y * k.get(i, c + 1));
  });
  put_row_sums(low, high, m, part.half, written);
  add_product<Stored::plain, Stored::plain, D / 32>(grad_q, of_queries, m, k, wide_n, kChunk);
  add_product<Stored::turned, Stored::plain, D / 32>(written_k, of_queries, m, q, wide_n, kChunk);
  if (reads) {
    for_each_two(read_k, m, wide_n, [&](int i, int, float& x, float& y) {
      const float factor = -beta[i] * from_start[i];
      x *= factor, y *= factor;
    });
    add_product<Stored::plain, Stored::plain, D / 32>(read_k, of_keys, m, k, wide_n, kChunk);
    add_product<Stored::turned, Stored::plain, D / 32>(written_k, of_keys, m, k, wide_n, kChunk);
  }
  low = high = 0;
  float* const to_q = reinterpret_cast<float*>(pass.read + tile * kKeyNumbers<D>);
  float* const to_k = reinterpret_cast<float*>(pass.written + tile * kKeyNumbers<D>);
#pragma unroll
  for (int column = 0; column < D / 16; ++column)
#pragma unroll
    for (int each = 0; each < 4; ++each) {
      const int lane = static_cast<int>(threadIdx.x) % 32, i = m + lane / 4 + each / 2 * 8,
                c = wide_n + column * 8 + lane % 4 * 2 + each % 2;
      const float of_q = grad_q[column][each], of_read = read_k[column][each], of_written = written_k[column][each],
                  at_k = k.get(i, c), at_q = q.get(i, c);
      add_to_row(i, at_q * of_q + at_k * of_read - at_k * of_written);
      to_q[i * D + c] = of_q + own_query[i] * at_k;
      to_k[i * D + c] = of_read + of_written + own_query[i] * at_q;
    }
  put_row_sums(low, high, m, part.half, of_decay);
  __syncthreads();
  if (threadIdx.x >= kChunk) return;
  const auto both = [](const float* halves, int row) {
    return static_cast<double>(halves[row]) + static_cast<double>(halves[kChunk + row]);
  };
  const int row = static_cast<int>(threadIdx.x);
  for (int i = 0; i < kChunk; ++i) of_end += both(written, i);
  for (int i = kChunk - 1; i >= row; --i) of_end += both(of_decay, i);
  pass.of_log_decay[tile * kChunk + row] = static_cast<float>(of_end);
  pass.of_beta[tile * kChunk + row] = reads ? own_value[row] : 0.f;
}

}  // namespace

void chunk_gradients(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                     const ChunkPass& pass, const bfloat16* grad_o_TV) {
  const bool narrow = pass.width == 64;
  launch(narrow ? chunk_gradients_kernel<64> : chunk_gradients_kernel<128>, {pass.chunks, pass.heads}, kSplitThreads,
         narrow ? GradientRoom<64>::kBytes : GradientRoom<128>::kBytes, shape, runs, numbers, pass, grad_o_TV);
}

}  // namespace espalier::cuda
