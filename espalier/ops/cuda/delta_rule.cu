// The gated delta rule forward, row by row: a block has 32 channels of a value head of a run. Columns of a state do not
// meet, so a lane has a column, and each warp a part of its rows. The recurrence's q, k and v are made in
// shared memory for some rows at a time.
#include "espalier/ops/cuda/delta_rule.h"

#include "espalier/ops/cuda/delta_chunks.h"
#include "espalier/ops/cuda/delta_rows.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kRows = 16;  // at a time

// Decays are of heads, or of channels.
template <class T, bool kChannels>
__global__ void __launch_bounds__(kThreads)
    delta_forward_kernel(DeltaShape s, DeltaWeights<T> w, DeltaRuns<accumulator_t<T>> runs, T* o_TV) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[2 * kWarps * 32], partial);
  const DeltaRun<A> run = runs.of[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t slices = (s.value_dim + 31) / 32, head = blockIdx.y / slices, dk = s.key_dim, dv = s.value_dim;
  const std::int64_t each = s.value_heads / s.key_heads, key_head = head / each, of_key = head % each;
  const std::int64_t column = blockIdx.y % slices * 32 + lane;
  const std::int64_t of_row = kChannels ? dk : 1, next_decay = kChannels ? 1 : 0;  // decays; to the next channel's
  const DeltaPlaces channel = at_head(s.channel, s.channel_step, key_head),
                    place = at_head(s.column, s.column_step, key_head);
  A *const q = dynamic_shared<A>(), *const k = q + kRows * dk, *const v = k + kRows * dk, *const decay = v + kRows * 32,
           *const beta = decay + kRows * of_row, *const state = beta + kRows;
  const std::int64_t matrix = head * dk * dv + column;  // of this lane's column
  const bool inside = column < dv;
  for (std::int64_t i = warp; i < dk; i += kWarps)
    state[i * 32 + lane] = inside && run.start != nullptr ? run.start[matrix + i * dv] : A(0);
  const A skip = w.skip_H != nullptr ? widened(w.skip_H[head]) : A(0);
  for (std::int64_t first = run.begin; first < run.end; first += kRows) {
    const std::int64_t rows = run.end - first < kRows ? run.end - first : kRows;
    __syncthreads();  // the rows before are read
    for (std::int64_t i = threadIdx.x; i < rows * dk; i += kThreads) {
      const std::int64_t row = first + i / dk, c = i % dk;
      q[i] = silu(convolved(s, w, run, row, place.q + c, channel.q + c));
      k[i] = silu(convolved(s, w, run, row, place.k + c, channel.k + c));
    }
    for (std::int64_t row = warp; row < rows; row += kWarps)
      v[row * 32 + lane] = inside ? silu(convolved(s, w, run, first + row, place.v + of_key * dv + column,
                                                   channel.v + of_key * dv + column))
                                  : A(0);
    for (std::int64_t i = threadIdx.x; i < rows * of_row; i += kThreads)
      decay[i] = std::exp(decay_of<kChannels>(s, w, {first + i / of_row, head, of_key, place}, i % of_row).log_decay);
    if (static_cast<std::int64_t>(threadIdx.x) < rows)
      beta[threadIdx.x] = beta_of(s, w, {first + threadIdx.x, head, of_key, place});
    __syncthreads();
    for (std::int64_t row = warp; row < rows && !s.mamba; row += kWarps) {
      (void)make_unit(dk, lane, query_scale<A>(dk), q + row * dk);
      (void)make_unit(dk, lane, A(1), k + row * dk);
    }
    __syncthreads();
    for (std::int64_t row = 0; row < rows; ++row) {
      const A *const of_q = q + row * dk, *const of_k = k + row * dk, *const decays = decay + row * of_row;
      A update = v[row * 32 + lane];
      if (!s.mamba) {
        A seen = 0;
        for (std::int64_t i = warp; i < dk; i += kWarps)
          seen += state[i * 32 + lane] * (kChannels ? decays[i] * of_k[i] : of_k[i]);
        partial[warp * 32 + lane] = seen;
        __syncthreads();
        seen = 0;
        for (int part = 0; part < kWarps; ++part) seen += partial[part * 32 + lane];
        update -= kChannels ? seen : decays[0] * seen;
      }
      update *= beta[row];
      A out = 0;
      for (std::int64_t i = warp; i < dk; i += kWarps) {
        const A next = state[i * 32 + lane] * decays[i * next_decay] + update * of_k[i];
        state[i * 32 + lane] = next;
        out += next * of_q[i];
      }
      if (o_TV == nullptr) {
        __syncthreads();  // the sums of what is seen are read
        continue;
      }
      A* const outs = partial + kWarps * 32;
      outs[warp * 32 + lane] = out;
      __syncthreads();
      if (warp == 0 && inside) {
        out = 0;
        for (int part = 0; part < kWarps; ++part) out += outs[part * 32 + lane];
        o_TV[((first + row) * s.value_heads + head) * dv + column] = narrowed<T>(out + skip * v[row * 32 + lane]);
      }
      if (s.mamba) __syncthreads();  // the sums are read
    }
  }
  for (std::int64_t i = warp; i < dk && run.end_state != nullptr && inside; i += kWarps)
    run.end_state[matrix + i * dv] = state[i * 32 + lane];
}

// The last inputs of the convolution: a thread has a channel of key head x, of run y. The end may be the start.
template <class T>
__global__ void __launch_bounds__(kThreads)
    store_inputs_kernel(DeltaShape s, DeltaWeights<T> w, DeltaRuns<accumulator_t<T>> runs) {
  using A = accumulator_t<T>;
  const DeltaRun<A> run = runs.of[blockIdx.y];
  if (run.end_state == nullptr) return;
  const std::int64_t key_head = blockIdx.x, width = width_of(s);
  for (std::int64_t c = threadIdx.x; c < width; c += kThreads) {
    const Channel at = channel_at(s, key_head, c);
    A inputs[kLargestKernel];
    for (std::int64_t j = 1; j < s.kernel; ++j)
      inputs[j] = input_at(s, w, run, run.end - s.kernel + j, at.column, at.channel);
    for (std::int64_t j = 1; j < s.kernel; ++j)
      run.end_state[matrix_of(s) + (j - 1) * s.channels + at.channel] = inputs[j];
  }
}

}  // namespace

std::int64_t delta_forward_bytes(std::int64_t key_dim, std::int64_t decays, std::int64_t number_bytes) {
  return (kRows * (2 * key_dim + 32 + decays + 1) + key_dim * 32) * number_bytes;
}

void store_inputs(const DeltaShape& shape, const DeltaWeights<bfloat16>& weights, const DeltaRuns<float>& runs) {
  launch(store_inputs_kernel<bfloat16>, {shape.key_heads, runs.count}, kThreads, 0, shape, weights, runs);
}

template <class T>
void delta_rule(const DeltaShape& shape, const DeltaWeights<T>& weights, const DeltaRuns<accumulator_t<T>>& runs,
                T* o_TV) {
  launch(shape.decays > 1 ? delta_forward_kernel<T, true> : delta_forward_kernel<T, false>,
         {runs.count, shape.value_heads * ceil_div(shape.value_dim, 32)}, kThreads,
         delta_forward_bytes(shape.key_dim, shape.decays, sizeof(accumulator_t<T>)), shape, weights, runs, o_TV);
  launch(store_inputs_kernel<T>, {shape.key_heads, runs.count}, kThreads, 0, shape, weights, runs);
}

#define ESPALIER_INSTANTIATE(T) \
  template void delta_rule(const DeltaShape&, const DeltaWeights<T>&, const DeltaRuns<accumulator_t<T>>&, T*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
