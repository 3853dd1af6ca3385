// The chunked delta rule's first and last step: from projected rows to tiles of q, k and v, and from their gradients to
// gradients of projected rows and parameters. A block of threads has a part of a chunk: the q or the k of a key head,
// or the v of a value head.
#include "espalier/ops/cuda/delta_chunks.h"
#include "espalier/ops/cuda/delta_rows.h"
#include "espalier/ops/cuda/split_tiles.h"

namespace espalier::cuda {
namespace {

// The part of a block: 0: q, 1: k, 2 ...: v of the key head's value heads.
struct Part {
  std::int64_t of_pass, key_head, number, of_key;  // of_key: the value head's number of the key head's
  std::int64_t width, column, channel;             // of its channels; where they begin
  std::int64_t tile;                               // of value heads, in the pass

  __device__ __forceinline__ Part(const DeltaShape& s, const ChunkPass& pass)
      : of_pass(blockIdx.y / (2 + pass.each)),
        key_head(pass.first_head + of_pass),
        number(blockIdx.y % (2 + pass.each)),
        of_key(number - 2),
        width(number < 2 ? s.key_dim : s.value_dim),
        tile(blockIdx.x * pass.heads + of_pass * pass.each + of_key) {
    const DeltaPlaces columns = at_head(s.column, s.column_step, key_head),
                      channels = at_head(s.channel, s.channel_step, key_head);
    column = number == 0 ? columns.q : number == 1 ? columns.k : columns.v + of_key * s.value_dim;
    channel = number == 0 ? channels.q : number == 1 ? channels.k : channels.v + of_key * s.value_dim;
  }
  __device__ __forceinline__ bool is_value() const { return number >= 2; }
  __device__ __forceinline__ HeadRow head(const DeltaShape& s, const ChunkPass& pass, std::int64_t row) const {
    return {row, key_head * pass.each + of_key, of_key, at_head(s.column, s.column_step, key_head)};
  }
};

// A lane's channels of a row of q or k: what comes out of the convolution, and the unit vector of its activation.
template <int D>
struct KeyRow {
  float mixed[D / 32], unit[D / 32], inverse = 1;

  __device__ __forceinline__ KeyRow(const DeltaShape& s, const DeltaWeights<bfloat16>& w, const DeltaRun<float>& run,
                                    const Part& part, std::int64_t row, float scale, int lane) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const std::int64_t c = lane + 32 * i;
      const bool inside = c < part.width && row < run.end;
      mixed[i] = inside ? convolved(s, w, run, row, part.column + c, part.channel + c) : 0.f;
      unit[i] = silu(mixed[i]);
      squares += unit[i] * unit[i];
    }
    if (s.mamba) return;
    inverse = 1.f / std::sqrt(warp_sum(squares) + static_cast<float>(kUnitEps));
#pragma unroll
    for (int i = 0; i < D / 32; ++i) unit[i] *= inverse * scale;
  }
};
__device__ __forceinline__ float scale_of(const DeltaShape& s, const Part& part) {
  return part.number == 0 ? query_scale<float>(s.key_dim) : 1.f;
}

template <int D>
__global__ void __launch_bounds__(kSplitThreads, 2)
    chunk_rows_kernel(DeltaShape s, DeltaWeights<bfloat16> w, DeltaRuns<float> runs, ChunkNumbers numbers,
                      ChunkPass pass) {
  const ChunkRows chunk = rows_of_chunk(numbers, runs, blockIdx.x);
  const DeltaRun<float> run = runs.of[chunk.run];
  const Part part(s, pass);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (!part.is_value()) {
    bfloat16* const to =
        (part.number == 0 ? pass.q : pass.k) + (blockIdx.x * pass.key_heads + part.of_pass) * 2 * kChunkRows * D;
    for (int row = warp; row < kChunkRows; row += kSplitThreads / 32) {
      const KeyRow<D> of(s, w, run, part, chunk.first + row, scale_of(s, part), lane);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) store_one(to, kChunkRows * D, row * D + lane + 32 * i, of.unit[i]);
    }
    return;
  }
  bfloat16* const to = pass.u + part.tile * pass.blocks * 2 * kChunkRows * kValueBlock;
  for (int row = warp; row < kChunkRows; row += kSplitThreads / 32)
    for (std::int64_t block = 0; block < pass.blocks; ++block) {
      const std::int64_t c = block * kValueBlock + lane;
      const bool inside = row < chunk.rows && c < part.width;
      const float v = inside ? silu(convolved(s, w, run, chunk.first + row, part.column + c, part.channel + c)) : 0.f;
      store_one(to + block * 2 * kChunkRows * kValueBlock, kChunkRows * kValueBlock, row * kValueBlock + lane, v);
    }
  for (std::int64_t i = threadIdx.x; pass.channels && i < kChunkRows * D; i += kSplitThreads) {
    const std::int64_t row = i / D, c = i % D;
    const bool inside = row < chunk.rows && c < s.key_dim;
    pass.decay[part.tile * kChunkRows * D + i] =
        inside ? std::exp(decay_of<true>(s, w, part.head(s, pass, chunk.first + row), c).log_decay) : 1.f;
  }
  if (threadIdx.x >= kChunkRows) return;
  const std::int64_t row = threadIdx.x, at = part.tile * kChunkRows + row;
  const HeadRow head = part.head(s, pass, chunk.first + row);
  const bool inside = row < chunk.rows;
  pass.beta[at] = inside ? beta_of(s, w, head) : 0.f;
  pass.log_decay[at] = inside && !pass.channels ? decay_of<false>(s, w, head, 0).log_decay : 0.f;
}

// A row of q or k: the gradient of its unit vector, to that of the convolution's result.
template <int D>
__device__ __forceinline__ void key_row_backward(const DeltaShape& s, const Part& part, const KeyRow<D>& of,
                                                 const float (&grad)[D / 32], float* to, int lane) {
  const float scale = s.mamba ? 1.f : scale_of(s, part);
  float along = 0;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) along += grad[i] * of.unit[i];
  along = s.mamba ? 0.f : warp_sum(along) / scale;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int c = lane + 32 * i;
    if (c < part.width) to[c] = (grad[i] * scale - of.unit[i] * along) * of.inverse * silu_slope(of.mixed[i]);
  }
}

// From the gradient of a decay's logarithm: to that of its step, the slope of softplus, and to that of a_log.
struct BeforeDecay {
  float rate, slope, of_a_log;
  bool clamped;
};
template <bool kChannels>
__device__ __forceinline__ BeforeDecay decay_backward(const DeltaShape& s, const DeltaWeights<bfloat16>& w,
                                                      const HeadRow& at, std::int64_t channel, float of_log_decay) {
  const Decay<float> decay = decay_of<kChannels>(s, w, at, channel);
  return {-std::exp(widened(w.a_log_H[at.head])) * of_log_decay, 1.f / (std::exp(-decay.before) + 1.f),
          of_log_decay * decay.log_decay, decay.clamped};
}

// Decays of channels: a thread has one. All threads call.
template <int D>
__device__ __forceinline__ void channel_decays_backward(const DeltaShape& s, const DeltaWeights<bfloat16>& w,
                                                        const ChunkRows& chunk, const Part& part, const ChunkPass& pass,
                                                        bfloat16* grad_projected_TW, const ChunkSums& sums) {
  static_assert(D <= kSplitThreads);
  ESPALIER_SHARED(float[32], of_warps);
  const std::int64_t c = threadIdx.x, head = part.key_head * pass.each + part.of_key;
  float of_bias = 0, of_a_log = 0;
  for (std::int64_t i = 0; i < chunk.rows && c < s.key_dim; ++i) {
    const HeadRow at = part.head(s, pass, chunk.first + i);
    const BeforeDecay before =
        decay_backward<true>(s, w, at, c, pass.of_log_decay[(part.tile * kChunkRows + i) * D + c]);
    const float of_a = before.rate * before.slope;
    grad_projected_TW[at.row * s.projected + at.place.a + part.of_key * s.key_dim + c] = narrowed<bfloat16>(of_a);
    of_bias += of_a, of_a_log += before.of_a_log;
  }
  if (c < s.key_dim) sums.dt_bias[(blockIdx.x * s.value_heads + head) * s.key_dim + c] = of_bias;
  of_a_log = block_sum(of_a_log, of_warps);
  if (threadIdx.x == 0) sums.a_log[blockIdx.x * s.value_heads + head] = of_a_log;
}

// grad_mixed, in shared memory: [64 + K - 1, width], the gradients of the convolution's results: the chunk's rows, then
// the first rows of the run's next chunk.
template <int D>
__global__ void __launch_bounds__(kSplitThreads, 2)
    chunk_rows_backward_kernel(DeltaShape s, DeltaWeights<bfloat16> w, DeltaRuns<float> runs, ChunkNumbers numbers,
                               ChunkPass pass, const bfloat16* grad_o_TV, bfloat16* grad_projected_TW, ChunkSums sums,
                               float* state_part) {
  ESPALIER_SHARED(float[3 * kChunkRows], of_rows);  // of the skip, a, and a's logarithm
  ESPALIER_SHARED(float[kChunkRows], of_step);      // Mamba-2
  const ChunkRows chunk = rows_of_chunk(numbers, runs, blockIdx.x);
  const DeltaRun<float> run = runs.of[chunk.run];
  const Part part(s, pass);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int before = static_cast<int>(s.kernel) - 1;
  const std::int64_t width = part.width, head = part.key_head * pass.each + part.of_key;
  float* const grad_mixed = dynamic_shared<float>();
  const float skip = part.is_value() && w.skip_H != nullptr ? widened(w.skip_H[head]) : 0.f;
  for (int row = warp; row < kChunkRows + before; row += kSplitThreads / 32) {
    float* const to = grad_mixed + row * width;
    const std::int64_t at_row = chunk.first + row, inner = row % kChunkRows;
    const std::int64_t of_chunk = blockIdx.x + row / kChunkRows;
    if (at_row >= run.end) {
      for (std::int64_t c = lane; c < width; c += 32) to[c] = 0;
      continue;
    }
    if (!part.is_value()) {
      const float* const from = reinterpret_cast<const float*>(part.number == 0 ? pass.read : pass.written) +
                                ((of_chunk * pass.heads + part.of_pass * pass.each) * kChunkRows + inner) * D;
      float grad[D / 32];
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        grad[i] = 0;
        for (std::int64_t h = 0; h < pass.each; ++h) grad[i] += from[h * kChunkRows * D + lane + 32 * i];
      }
      key_row_backward(s, part, KeyRow<D>(s, w, run, part, at_row, scale_of(s, part), lane), grad, to, lane);
      continue;
    }
    const std::int64_t tile = of_chunk * pass.heads + part.of_pass * pass.each + part.of_key;
    const bfloat16* const of_u = pass.of_u + tile * pass.blocks * 2 * kChunkRows * kValueBlock;
    const float beta = pass.beta[tile * kChunkRows + inner];
    float of_skip = 0, of_value = 0;
    for (std::int64_t c = lane; c < width; c += 32) {
      const bfloat16* const high = of_u + c / kValueBlock * 2 * kChunkRows * kValueBlock + inner * kValueBlock + lane;
      const float of = widened(high[0]) + widened(high[kChunkRows * kValueBlock]);
      const float of_o = widened(grad_o_TV[(at_row * s.value_heads + head) * s.value_dim + c]);
      const float mixed = convolved(s, w, run, at_row, part.column + c, part.channel + c), v = silu(mixed);
      to[c] = (beta * of + skip * of_o) * silu_slope(mixed);
      of_skip += of_o * v, of_value += of * v;
    }
    of_skip = warp_sum(of_skip), of_value = warp_sum(of_value);
    if (row < kChunkRows && lane == 0) of_rows[row] = of_skip, of_step[row] = of_value;
  }
  __syncthreads();
  if (part.is_value() && threadIdx.x < chunk.rows) {
    const std::int64_t row = threadIdx.x, at = part.tile * kChunkRows + row;
    const HeadRow at_head_row = part.head(s, pass, chunk.first + row);
    bfloat16* const to = grad_projected_TW + (chunk.first + row) * s.projected;
    if (!s.mamba) to[at_head_row.place.b + part.of_key] = narrowed<bfloat16>(pass.of_beta[at] * (1.f - pass.beta[at]));
    if (!pass.channels) {
      const BeforeDecay before_decay = decay_backward<false>(s, w, at_head_row, 0, pass.of_log_decay[at]);
      float of_a = before_decay.rate * before_decay.slope;
      if (s.mamba) of_a = before_decay.clamped ? 0.f : (before_decay.rate + of_step[row]) * before_decay.slope;
      to[at_head_row.place.a + part.of_key] = narrowed<bfloat16>(of_a);
      of_rows[kChunkRows + row] = of_a;
      of_rows[2 * kChunkRows + row] = before_decay.of_a_log;
    }
  }
  // Through the convolution.
  for (std::int64_t at = threadIdx.x; at < chunk.rows * width; at += kSplitThreads) {
    const std::int64_t i = at / width, c = at % width, row = chunk.first + i;
    float sum = 0;
    for (std::int64_t j = 0; j <= before; ++j)
      sum += widened(w.conv_CK[(part.channel + c) * s.kernel + before - j]) * grad_mixed[(i + j) * width + c];
    if (run.grad_end != nullptr && row > run.end - s.kernel)
      sum += run.grad_end[tail_at(s, row - run.end, part.channel + c)];
    grad_projected_TW[row * s.projected + part.column + c] = narrowed<bfloat16>(sum);
  }
  for (std::int64_t at = threadIdx.x; at < (s.kernel + 1) * width; at += kSplitThreads) {
    const std::int64_t j = at / width, c = at % width, channel = part.channel + c;
    float sum = 0;
    for (std::int64_t i = 0; i < chunk.rows; ++i) {
      const float grad = grad_mixed[i * width + c];
      sum += j == s.kernel ? grad : grad * input_at(s, w, run, chunk.first + i + j - before, part.column + c, channel);
    }
    if (j == s.kernel)
      sums.bias[blockIdx.x * s.channels + channel] = sum;
    else
      sums.conv[(blockIdx.x * s.channels + channel) * s.kernel + j] = sum;
  }
  __syncthreads();
  if (part.is_value() && pass.channels) channel_decays_backward<D>(s, w, chunk, part, pass, grad_projected_TW, sums);
  if (part.is_value() && threadIdx.x < (pass.channels ? 1 : 3)) {
    float* const to = threadIdx.x == 0 ? sums.skip : threadIdx.x == 1 ? sums.dt_bias : sums.a_log;
    float sum = 0;
    for (std::int64_t i = 0; i < chunk.rows; ++i) sum += of_rows[threadIdx.x * kChunkRows + i];
    to[blockIdx.x * s.value_heads + head] = sum;
  }
  // The inputs before the run: by its rows, and by what follows where the run is shorter than the convolution.
  if (!chunk.begins || run.grad_start == nullptr) return;
  float* const state = state_part + chunk.run * (matrix_of(s) + before * s.channels);
  for (std::int64_t at = threadIdx.x; at < before * width; at += kSplitThreads) {
    const std::int64_t back = at / width - before, c = at % width, channel = part.channel + c;
    float sum = run.grad_end != nullptr && run.begin + back > run.end - s.kernel
                    ? run.grad_end[tail_at(s, run.begin + back - run.end, channel)]
                    : 0.f;
    for (std::int64_t j = -back; j <= before; ++j)  // rows behind the run's last one are 0
      sum += widened(w.conv_CK[channel * s.kernel + before - j]) * grad_mixed[(back + j) * width + c];
    state[tail_at(s, back, channel)] = sum;
  }
}

}  // namespace

void chunk_rows(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                const ChunkNumbers& numbers, const ChunkPass& pass) {
  launch(pass.width == 64 ? chunk_rows_kernel<64> : chunk_rows_kernel<128>,
         {pass.chunks, pass.key_heads * (2 + pass.each)}, kSplitThreads, 0, shape, weights, runs, numbers, pass);
}

void chunk_rows_backward(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs,
                         const ChunkNumbers& numbers, const ChunkPass& pass, const bfloat16* grad_o_TV,
                         bfloat16* grad_projected_TW, const ChunkSums& sums, float* state_part) {
  const std::int64_t width = shape.key_dim < shape.value_dim ? shape.value_dim : shape.key_dim;
  launch(pass.width == 64 ? chunk_rows_backward_kernel<64> : chunk_rows_backward_kernel<128>,
         {pass.chunks, pass.key_heads * (2 + pass.each)}, kSplitThreads, (kChunkRows + shape.kernel - 1) * width * 4,
         shape, weights, runs, numbers, pass, grad_o_TV, grad_projected_TW, sums, state_part);
}

}  // namespace espalier::cuda
