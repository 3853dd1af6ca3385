// A thread has a channel of a tile of rows. Rows read their neighbours' inputs again: K is small, and the caches have
// them.
#include "espalier/ops/cuda/short_convolution.h"

#include "espalier/ops/cuda/columns.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 128, kTileRows = 16;
constexpr std::int64_t kLeastPartRows = 64;
constexpr int kPartChannels = 32, kMostPartThreads = 1024;
static_assert(kMostPartThreads == kPartChannels * (kLongestShortConvolution + 1));  // with the bias

// b, c or x.
template <class T>
__device__ __forceinline__ accumulator_t<T> part_at(const ShortConvolutionRows<T>& of, std::int64_t row, int part,
                                                    std::int64_t channel) {
  return widened(of.projected_TW[(row * 3 + part) * of.channels + channel]);
}
// Where a state stores the row that stands so far from its end, -1 being the last.
template <class T>
__device__ __forceinline__ std::int64_t tail_at(const ShortConvolutionRows<T>& of, std::int64_t from_end,
                                                std::int64_t channel) {
  return (of.kernel - 1 + from_end) * of.channels + channel;
}

// u at a row of the run, or at one of the K - 1 before it.
template <class T>
__device__ accumulator_t<T> input_at(const ShortConvolutionRows<T>& of, const DeltaRun<accumulator_t<T>>& run,
                                     std::int64_t row, std::int64_t channel) {
  if (row >= run.begin) return part_at(of, row, 0, channel) * part_at(of, row, 2, channel);
  return run.start != nullptr ? run.start[tail_at(of, row - run.begin, channel)] : accumulator_t<T>(0);
}

template <class T>
__device__ accumulator_t<T> mixed_at(const ShortConvolutionRows<T>& of, const DeltaRun<accumulator_t<T>>& run,
                                     std::int64_t row, std::int64_t channel) {
  using A = accumulator_t<T>;
  A sum = of.conv_bias_C != nullptr ? widened(of.conv_bias_C[channel]) : A(0);
  for (std::int64_t j = 0; j < of.kernel; ++j)
    sum += widened(of.conv_CK[channel * of.kernel + j]) * input_at(of, run, row - of.kernel + 1 + j, channel);
  return sum;
}

template <class T>
__device__ __forceinline__ accumulator_t<T> grad_mixed_at(const ShortConvolutionRows<T>& of, const T* grad_y_TC,
                                                          std::int64_t row, std::int64_t channel) {
  return widened(grad_y_TC[row * of.channels + channel]) * part_at(of, row, 1, channel);
}

// The gradient of u at a row of the run, or at one of the K - 1 rows before it. The run's rows and the rows behind the
// run add to it.
template <class T>
__device__ accumulator_t<T> grad_input_at(const ShortConvolutionRows<T>& of, const DeltaRun<accumulator_t<T>>& run,
                                          const T* grad_y_TC, std::int64_t row, std::int64_t channel) {
  using A = accumulator_t<T>;
  const std::int64_t K = of.kernel;
  A sum = run.grad_end != nullptr && row > run.end - K ? run.grad_end[tail_at(of, row - run.end, channel)] : A(0);
  for (std::int64_t later = row < run.begin ? run.begin - row : 0; later < K && row + later < run.end; ++later)
    sum += widened(of.conv_CK[channel * K + K - 1 - later]) * grad_mixed_at(of, grad_y_TC, row + later, channel);
  return sum;
}

// The rows of a tile, of all runs' tiles in order.
struct Tile {
  std::int64_t run = 0, begin = 0, end = 0;
};
template <class A>
__device__ Tile tile_at(const DeltaRuns<A>& runs, std::int64_t number) {
  std::int64_t run = 0;
  for (;; ++run) {
    const std::int64_t tiles = (runs.of[run].end - runs.of[run].begin + kTileRows - 1) / kTileRows;
    if (number < tiles) break;
    number -= tiles;
  }
  const std::int64_t begin = runs.of[run].begin + number * kTileRows;
  return {run, begin, begin + kTileRows < runs.of[run].end ? begin + kTileRows : runs.of[run].end};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(ShortConvolutionRows<T> of, DeltaRuns<accumulator_t<T>> runs, T* y_TC) {
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= of.channels) return;
  const Tile tile = tile_at(runs, blockIdx.x);
  for (std::int64_t row = tile.begin; row < tile.end; ++row)
    y_TC[row * of.channels + channel] =
        narrowed<T>(part_at(of, row, 1, channel) * mixed_at(of, runs.of[tile.run], row, channel));
}

// The states behind runs. A state may take the place of the one that its run begins with: rows stand in the order of
// the state, and each is read before the place of an earlier one is written.
template <class T>
__global__ void __launch_bounds__(kThreads)
    states_kernel(ShortConvolutionRows<T> of, DeltaRuns<accumulator_t<T>> runs) {
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const DeltaRun<accumulator_t<T>>& run = runs.of[blockIdx.y];
  if (channel >= of.channels || run.end_state == nullptr) return;
  for (std::int64_t from_end = 1 - of.kernel; from_end < 0; ++from_end)
    run.end_state[tail_at(of, from_end, channel)] = input_at(of, run, run.end + from_end, channel);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    rows_backward_kernel(ShortConvolutionRows<T> of, DeltaRuns<accumulator_t<T>> runs, const T* grad_y_TC,
                         T* grad_projected_TW) {
  using A = accumulator_t<T>;
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= of.channels) return;
  const Tile tile = tile_at(runs, blockIdx.x);
  for (std::int64_t row = tile.begin; row < tile.end; ++row) {
    const DeltaRun<A>& run = runs.of[tile.run];
    const A of_input = grad_input_at(of, run, grad_y_TC, row, channel);
    T* const to = grad_projected_TW + row * 3 * of.channels + channel;
    to[0] = narrowed<T>(of_input * part_at(of, row, 2, channel));
    to[of.channels] = narrowed<T>(widened(grad_y_TC[row * of.channels + channel]) * mixed_at(of, run, row, channel));
    to[2 * of.channels] = narrowed<T>(of_input * part_at(of, row, 0, channel));
  }
}

// Several runs may begin with one state: a thread adds them in order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    states_backward_kernel(ShortConvolutionRows<T> of, DeltaRuns<accumulator_t<T>> runs, const T* grad_y_TC) {
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= of.channels) return;
  for (std::int64_t r = runs.count; r-- > 0;) {
    const DeltaRun<accumulator_t<T>>& run = runs.of[r];
    if (run.grad_start == nullptr) continue;
    for (std::int64_t before = 1 - of.kernel; before < 0; ++before)
      run.grad_start[tail_at(of, before, channel)] += grad_input_at(of, run, grad_y_TC, run.begin + before, channel);
  }
}

// Weights' gradients of a part of the runs' rows: a warp has one of the K rows of the convolution for 32 channels, or
// the bias.
template <class T>
__global__ void __launch_bounds__(kMostPartThreads)
    weights_backward_kernel(ShortConvolutionRows<T> of, DeltaRuns<accumulator_t<T>> runs, std::int64_t rows_of_part,
                            const T* grad_y_TC, accumulator_t<T>* weights_PCK, accumulator_t<T>* bias_PC) {
  using A = accumulator_t<T>;
  const std::int64_t channel = static_cast<std::int64_t>(blockIdx.x) * kPartChannels + threadIdx.x % kPartChannels;
  const std::int64_t tap = threadIdx.x / kPartChannels, part = blockIdx.y;
  if (channel >= of.channels) return;
  std::int64_t first = part * rows_of_part, last = first + rows_of_part;  // of the runs' rows, one behind the other
  A sum = 0;
  for (std::int64_t r = 0; r < runs.count; ++r) {
    const DeltaRun<A>& run = runs.of[r];
    const std::int64_t rows = run.end - run.begin;
    for (std::int64_t at = first > 0 ? first : 0; at < last && at < rows; ++at) {
      const A of_mixed = grad_mixed_at(of, grad_y_TC, run.begin + at, channel);
      sum += tap == of.kernel ? of_mixed : of_mixed * input_at(of, run, run.begin + at - of.kernel + 1 + tap, channel);
    }
    first -= rows, last -= rows;
  }
  if (tap == of.kernel)
    bias_PC[part * of.channels + channel] = sum;
  else
    weights_PCK[(part * of.channels + channel) * of.kernel + tap] = sum;
}

template <class A>
std::int64_t tiles_of(const DeltaRuns<A>& runs) {
  std::int64_t tiles = 0;
  for (std::int64_t r = 0; r < runs.count; ++r) tiles += ceil_div(runs.of[r].end - runs.of[r].begin, kTileRows);
  return tiles;
}

template <class T>
void add_weights_backward(const ShortConvolutionRows<T>& of, const DeltaRuns<accumulator_t<T>>& runs,
                          const T* grad_y_TC, const ShortConvolutionSums<accumulator_t<T>>& sums) {
  using A = accumulator_t<T>;
  std::int64_t rows = 0;
  for (std::int64_t r = 0; r < runs.count; ++r) rows += runs.of[r].end - runs.of[r].begin;
  if (rows == 0) return;
  const std::int64_t wanted = ceil_div(rows, kLeastPartRows),
                     most = wanted < kConvolutionParts ? wanted : kConvolutionParts;
  const std::int64_t rows_of_part = ceil_div(rows, most), parts = ceil_div(rows, rows_of_part);
  const Scratch<A> weights(parts * of.channels * of.kernel), bias(parts * of.channels);
  launch(weights_backward_kernel<T>, {ceil_div(of.channels, kPartChannels), parts},
         kPartChannels * static_cast<int>(of.kernel + 1), 0, of, runs, rows_of_part, grad_y_TC, weights.get(),
         bias.get());
  if (sums.conv_CK != nullptr) add_parts(parts, of.channels * of.kernel, weights.get(), sums.conv_CK);
  if (sums.conv_bias_C != nullptr) add_parts(parts, of.channels, bias.get(), sums.conv_bias_C);
}

}  // namespace

template <class T>
void short_convolution(const ShortConvolutionRows<T>& rows, const DeltaRuns<accumulator_t<T>>& runs, T* y_TC) {
  const std::int64_t blocks = ceil_div(rows.channels, kThreads);
  if (y_TC != nullptr) launch(rows_kernel<T>, {tiles_of(runs), blocks}, kThreads, 0, rows, runs, y_TC);
  launch(states_kernel<T>, {blocks, runs.count}, kThreads, 0, rows, runs);
}

template <class T>
void add_short_convolution_backward(const ShortConvolutionRows<T>& rows, const DeltaRuns<accumulator_t<T>>& runs,
                                    const T* grad_y_TC, T* grad_projected_TW,
                                    const ShortConvolutionSums<accumulator_t<T>>& sums) {
  const std::int64_t blocks = ceil_div(rows.channels, kThreads);
  launch(rows_backward_kernel<T>, {tiles_of(runs), blocks}, kThreads, 0, rows, runs, grad_y_TC, grad_projected_TW);
  launch(states_backward_kernel<T>, {blocks}, kThreads, 0, rows, runs, grad_y_TC);
  if (sums.conv_CK != nullptr || sums.conv_bias_C != nullptr) add_weights_backward(rows, runs, grad_y_TC, sums);
}

#define ESPALIER_INSTANTIATE(T)                                                                                    \
  template void short_convolution(const ShortConvolutionRows<T>&, const DeltaRuns<accumulator_t<T>>&, T*);         \
  template void add_short_convolution_backward(const ShortConvolutionRows<T>&, const DeltaRuns<accumulator_t<T>>&, \
                                               const T*, T*, const ShortConvolutionSums<accumulator_t<T>>&);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
