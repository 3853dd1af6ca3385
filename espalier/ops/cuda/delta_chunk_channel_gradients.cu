// The same as delta_chunk_gradients.cu with decays of channels, whose names delta_chunk_channels.h has. A block of
// threads has a chunk of a value head. Products of X and Y with rows of other strips go strip by strip: before the next
// strip's is added, a sum is multiplied by a step. Pairs within a strip follow row by row.
#include "espalier/ops/cuda/delta_chunk_channels.h"
#include "espalier/ops/cuda/delta_chunk_value_sums.h"

namespace espalier::cuda {
namespace {

// Columns of a lane's numbers times what stands at `factor`.
template <int kTiles>
__device__ __forceinline__ void scale_columns(float (&sum)[kTiles][4], int m, int n, const float* factor) {
  for_each_two(sum, m, n, [&](int, int c, float& x, float& y) { x *= factor[c], y *= factor[c + 1]; });
}

// The decay of row t is between the state and rows before t, and rows from t on and the end. The gradient of its
// logarithm is the sum of three: what the state leaves at the end, by channel (`dots`); what rows before t leave there
// (`ends`); and what rows from t on read in the chunk, without what they read of each other (`pairs`). So no term
// stands in it whose decays are all 1: with strong decays it would outweigh the rest.
template <int D>
struct StripTotals {
  float pairs[kStrips][D], ends[kStrips][D], dots[D];
};

// Places in global memory, in float [64, D].
struct RowGradients {
  float *of_q, *of_k, *in_chunk, *to_end, *of_log_decay;
};

// A channel of a strip: what came from products, pairs within the strip, and the gradients that are sums of all.
template <int D>
struct Strip {
  float k[kStripRows], q[kStripRows], decay[kStripRows];
  int first, c;

  __device__ __forceinline__ Strip(const ChunkPass& pass, std::int64_t key_tile, const float* decays, int strip, int c)
      : first(strip * kStripRows), c(c) {
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      k[i] = load_one(pass.k + key_tile * kKeyNumbers<D>, kChunk * D, at(i));
      q[i] = load_one(pass.q + key_tile * kKeyNumbers<D>, kChunk * D, at(i));
      decay[i] = decays[at(i)];
    }
  }
  __device__ __forceinline__ int at(int i) const { return (first + i) * D + c; }

  // next: the decay of the row behind the strip; to_end: that of rows from there to the end.
  __device__ __forceinline__ void finish(const RowGradients& rows, const SquareTile& x, const SquareTile& y,
                                         const float* own_query, float next, float to_end, float& all_pairs,
                                         float& all_ends) const {
    float of_q[kStripRows], read[kStripRows], written[kStripRows], end[kStripRows];
    float factor = 1;
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      if (i > 0) factor *= decay[i];
      of_q[i] = factor * rows.of_q[at(i)];
      read[i] = factor * rows.of_k[at(i)];
    }
    factor = next;
#pragma unroll
    for (int i = kStripRows - 1; i >= 0; --i) {
      written[i] = factor * rows.in_chunk[at(i)];
      end[i] = factor * to_end * rows.to_end[at(i)];
      factor *= decay[i];
    }
#pragma unroll
    for (int j = 0; j < kStripRows; ++j) {
      float between = 1;
#pragma unroll
      for (int i = j + 1; i < kStripRows; ++i) {
        between *= decay[i];
        const float of_query = between * x.get(first + i, first + j), of_key = between * y.get(first + i, first + j);
        of_q[i] += of_query * k[j];
        read[i] += of_key * k[j];
        written[j] += of_query * q[i] + of_key * k[i];
      }
    }
    float of_pairs = 0, of_ends = 0, before[kStripRows];
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      before[i] = of_ends;
      of_ends += k[i] * end[i];
      rows.of_q[at(i)] = of_q[i] + own_query[first + i] * k[i];
      rows.of_k[at(i)] = read[i] + written[i] + end[i] + own_query[first + i] * q[i];
    }
#pragma unroll
    for (int i = kStripRows - 1; i >= 0; --i) {
      of_pairs += q[i] * of_q[i] + k[i] * read[i] - k[i] * written[i];
      rows.of_log_decay[at(i)] = of_pairs + before[i];
    }
    all_pairs = of_pairs, all_ends = of_ends;
  }
};

template <int D>
__global__ void __launch_bounds__(kSplitThreads, 1)
    channel_gradients_kernel(DeltaShape s, DeltaRuns<float> runs, ChunkNumbers numbers, ChunkPass pass,
                             const bfloat16* grad_o_TV) {
  using Room = GradientRoom<D>;
  ESPALIER_SHARED(float[3 * kChunk], of_rows);
  ESPALIER_SHARED(float[kStrips * D], steps);
  float *const beta = of_rows, *const own_query = of_rows + kChunk, *const own_value = of_rows + 2 * kChunk;
  unsigned char* const memory = dynamic_shared<unsigned char>();
  const KeyTile<D> first_rows{memory}, second_rows{memory + Room::kKey};
  const SquareTile of_queries{memory + 2 * Room::kKey}, of_keys{memory + 2 * Room::kKey + SquareTile::kBytes};
  static_assert(sizeof(StripTotals<D>) <= 2 * Room::kKey);
  StripTotals<D>& totals = *reinterpret_cast<StripTotals<D>*>(memory);
  const WarpPart part;
  const int m = part.m, n = part.half * 32, wide_n = part.half * (D / 2), strip_of_warp = m / kStripRows;
  const int lane = static_cast<int>(threadIdx.x) % 32, first_of_warp = static_cast<int>(threadIdx.x) / 32 * (D / 8);
  const std::int64_t chunk = blockIdx.x, of_pass = blockIdx.y, tile = chunk * pass.heads + of_pass,
                     key_tile = chunk * pass.key_heads + of_pass / pass.each;
  const float* const decay = pass.decay + tile * kChunk * D;
  const auto in_float = [&](bfloat16* array) { return reinterpret_cast<float*>(array + tile * kKeyNumbers<D>); };
  const RowGradients rows{in_float(pass.read), in_float(pass.written), in_float(pass.from_start_q),
                          in_float(pass.to_end_k), in_float(pass.from_start_k)};
  if (threadIdx.x < kChunk) beta[threadIdx.x] = pass.beta[tile * kChunk + threadIdx.x];
  for_each_strip<D>([&](int strip, int c) {
    const int next = (strip + 1) * kStripRows;
    steps[strip * D + c] = decay_of_rows(decay + c, next - kStripRows + 1, next < kChunk ? next : kChunk - 1, D);
  });

  ValueSums<D> of_values;
  const GradRows grad_o(s, grad_o_TV, rows_of_chunk(numbers, runs, chunk), pass.first_head * pass.each + of_pass);
  float dot = 0;  // S dS' of a channel: of this warp's, the lane's
  of_values.add_all(pass, tile, grad_o, true, memory, [&](const StateTile<D>& state, const StateTile<D>& grad) {
    for (int c = 0; c < D / 8; ++c) {
      const float of_channel = warp_sum(state.get(first_of_warp + c, lane) * grad.get(first_of_warp + c, lane));
      if (c == lane) dot += of_channel;
    }
  });
  store_floats<D>(of_values.written_k, m, wide_n, rows.to_end);
  store_pairs(of_values.x_ij, m, n, of_queries, own_query, [](int, int) { return 1.f; });
  store_pairs(of_values.y_ij, m, n, of_keys, own_value, [&](int i, int) { return -beta[i]; });
  fill_right(first_rows, pass.k + key_tile * kKeyNumbers<D>, decay, 1);
  __syncthreads();
  // Reads: of the state, to the first row; then of strip after strip.
  scale_columns(of_values.grad_q, m, wide_n, decay);
  scale_columns(of_values.read_k, m, wide_n, decay);
  for_each_two(of_values.read_k, m, wide_n, [&](int i, int, float& x, float& y) { x *= -beta[i], y *= -beta[i]; });
  for (int strip = 0; strip < strip_of_warp; ++strip) {
    const int from = strip * kStripRows, to = from + kStripRows;
    scale_columns(of_values.grad_q, m, wide_n, steps + strip * D);
    scale_columns(of_values.read_k, m, wide_n, steps + strip * D);
    add_product<Stored::plain, Stored::plain, D / 32>(of_values.grad_q, of_queries, m, first_rows, wide_n, to, from);
    add_product<Stored::plain, Stored::plain, D / 32>(of_values.read_k, of_keys, m, first_rows, wide_n, to, from);
  }
  store_floats<D>(of_values.grad_q, m, wide_n, rows.of_q);
  store_floats<D>(of_values.read_k, m, wide_n, rows.of_k);
  __syncthreads();  // right K is read
  fill_left(first_rows, pass.q + key_tile * kKeyNumbers<D>, decay);
  fill_left(second_rows, pass.k + key_tile * kKeyNumbers<D>, decay);
  __syncthreads();
  float in_chunk[D / 16][4];
  clear(in_chunk);
  for (int strip = kStrips - 1; strip > strip_of_warp; --strip) {
    const int from = strip * kStripRows, to = from + kStripRows;
    scale_columns(in_chunk, m, wide_n, steps + strip * D);
    add_product<Stored::turned, Stored::plain, D / 32>(in_chunk, of_queries, m, first_rows, wide_n, to, from);
    add_product<Stored::turned, Stored::plain, D / 32>(in_chunk, of_keys, m, second_rows, wide_n, to, from);
  }
  store_floats<D>(in_chunk, m, wide_n, rows.in_chunk);
  __syncthreads();  // left Q and left K are read
  if (lane < D / 8) totals.dots[first_of_warp + lane] = dot;
  for_each_strip<D>([&](int strip, int c) {
    const int next = (strip + 1) * kStripRows;
    float to_end = 1;
    for (int later = strip + 1; later < kStrips; ++later) to_end *= steps[later * D + c];
    Strip<D>(pass, key_tile, decay, strip, c)
        .finish(rows, of_queries, of_keys, own_query, next < kChunk ? decay[next * D + c] : 1.f, to_end,
                totals.pairs[strip][c], totals.ends[strip][c]);
  });
  __syncthreads();
  for_each_strip<D>([&](int strip, int c) {
    float rest = pass.kept[tile * D + c] * totals.dots[c];
    for (int other = 0; other < kStrips; ++other)
      if (other != strip) rest += other < strip ? totals.ends[other][c] : totals.pairs[other][c];
    for (int i = 0; i < kStripRows; ++i) rows.of_log_decay[(strip * kStripRows + i) * D + c] += rest;
  });
  if (threadIdx.x < kChunk) pass.of_beta[tile * kChunk + threadIdx.x] = own_value[threadIdx.x];
}

}  // namespace

void channel_gradients(const DeltaShape& shape, const DeltaRuns<float>& runs, const ChunkNumbers& numbers,
                       const ChunkPass& pass, const bfloat16* grad_o_TV) {
  const bool narrow = pass.width == 64;
  launch(narrow ? channel_gradients_kernel<64> : channel_gradients_kernel<128>, {pass.chunks, pass.heads},
         kSplitThreads, narrow ? GradientRoom<64>::kBytes : GradientRoom<128>::kBytes, shape, runs, numbers, pass,
         grad_o_TV);
}

}  // namespace espalier::cuda
