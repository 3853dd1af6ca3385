// A block has a row of logits. A thread keeps the sums of its columns relative to the largest one it has met; lanes and
// warps join theirs in one order, in double.
#include "espalier/ops/cuda/head.h"

#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256, kFlatThreads = 128;

// With y = (raw - top) / temperature: the largest raw, sum exp y, sum y exp y.
template <class S>
struct Running {
  S top, sum, weighted;
};

// The sums relative to a larger maximum `top`: with d = (top_new - top) / temperature, sum exp(y - d) and
// sum (y - d) exp(y - d). Nothing yet (top = -inf) stays nothing; NaN stays NaN.
template <class S>
__device__ __forceinline__ Running<S> raised(Running<S> v, S top, S inverse) {
  if (v.top == top || v.top == -INFINITY) return {top, v.sum, v.weighted};
  const S shift = (top - v.top) * inverse, scale = std::exp(-shift);
  return {top, scale * v.sum, scale == S(0) ? S(0) : scale * (v.weighted - shift * v.sum)};
}
template <class S>
__device__ __forceinline__ Running<S> joined(Running<S> a, Running<S> b, S inverse) {
  const S top = b.top > a.top ? b.top : a.top;
  a = raised(a, top, inverse), b = raised(b, top, inverse);
  return {top, a.sum + b.sum, a.weighted + b.weighted};
}
template <class S>
__device__ __forceinline__ Running<S> warp_joined(Running<S> v, S inverse) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Running<S> other{__shfl_xor_sync(kWholeWarp, v.top, lanes), __shfl_xor_sync(kWholeWarp, v.sum, lanes),
                           __shfl_xor_sync(kWholeWarp, v.weighted, lanes)};
    // Both lanes of a pair add in the order of their numbers.
    v = (threadIdx.x & static_cast<unsigned>(lanes)) != 0 ? joined(other, v, inverse) : joined(v, other, inverse);
  }
  return v;
}

// Joins the sums of a block's threads into the sums of distribution d.
template <class L>
__device__ __forceinline__ void write_sums(const Running<L>& v, double inverse, std::int64_t d, const RowSums& sums,
                                           Running<double> (&scratch)[32]) {
  Running<double> wide{static_cast<double>(v.top), static_cast<double>(v.sum), static_cast<double>(v.weighted)};
  wide = warp_joined(wide, inverse);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = wide;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  wide = threadIdx.x < blockDim.x / 32 ? scratch[threadIdx.x] : Running<double>{-INFINITY, 0, 0};
  wide = warp_joined(wide, inverse);
  if (threadIdx.x == 0) sums.max[d] = wide.top, sums.sum_exp[d] = wide.sum, sums.weighted[d] = wide.weighted;
}

// The logits of the distribution's targets; x: its row.
template <class L>
__device__ __forceinline__ void write_raw(const Edges& edges, std::int64_t d, std::int64_t first, std::int64_t columns,
                                          const L* x, double* raw_E) {
  const std::int32_t begin = edges.begin[d] - edges.begin[0], end = edges.begin[d + 1] - edges.begin[0];
  for (std::int64_t e = begin + static_cast<std::int64_t>(threadIdx.x); e < end; e += blockDim.x) {
    const std::int64_t column = edges.target[e] - first;
    raw_E[e] = column >= 0 && column < columns ? static_cast<double>(x[column]) : 0.0;
  }
}

template <class L, int kPack>
__global__ void __launch_bounds__(kThreads) logit_sums_kernel(std::int64_t columns, Edges edges, std::int64_t first,
                                                              const L* logits, RowSums sums, double* raw_E) {
  ESPALIER_SHARED(Running<double>[32], scratch);
  const std::int64_t row = blockIdx.x;
  const L* const x = logits + row * columns;
  const double inverse = 1.0 / edges.temperature[row];
  const L narrow = static_cast<L>(inverse);
  Running<L> v{-INFINITY, 0, 0};
  for (std::int64_t m = threadIdx.x * kPack; m < columns; m += blockDim.x * kPack) {
    const Pack<L, kPack> pack = load_pack<kPack>(x + m);
    L top = v.top;
#pragma unroll
    for (int i = 0; i < kPack; ++i) top = pack.x[i] > top ? pack.x[i] : top;
    v = raised(v, top, narrow);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const L y = (pack.x[i] - top) * narrow, e = std::exp(y);
      v.sum += e;
      v.weighted += e * y;
    }
  }
  write_sums(v, inverse, row, sums, scratch);
  write_raw(edges, row, first, columns, x, raw_E);
}

// A block has a distribution.
template <class L>
__global__ void __launch_bounds__(kThreads)
    kept_sums_kernel(Sets sets, std::int64_t columns, Edges edges, std::int64_t first, const L* logits, RowSums sums,
                     double* raw_E) {
  ESPALIER_SHARED(Running<double>[32], scratch);
  const std::int64_t d = blockIdx.x;
  const L* const x = logits + sets.row[d] * columns;
  const double inverse = 1.0 / edges.temperature[d];
  const L narrow = static_cast<L>(inverse);
  const std::int32_t begin = sets.begin[d], end = sets.end[d];
  const std::int64_t count = end < 0 ? columns : end - begin;
  Running<L> v{-INFINITY, 0, 0};
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const L logit = x[end < 0 ? i : sets.column[begin + i]];
    v = raised(v, logit > v.top ? logit : v.top, narrow);
    const L y = (logit - v.top) * narrow, e = std::exp(y);
    v.sum += e;
    v.weighted += e * y;
  }
  write_sums(v, inverse, d, sums, scratch);
  write_raw(edges, d, first, columns, x, raw_E);
}

__global__ void __launch_bounds__(kFlatThreads)
    raise_maximum_kernel(std::int64_t rows, Edges edges, const double* max, RowSums sums) {
  const std::int64_t row = grid_thread();
  if (row >= rows) return;
  const Running<double> v =
      raised({sums.max[row], sums.sum_exp[row], sums.weighted[row]}, max[row], 1.0 / edges.temperature[row]);
  sums.max[row] = v.top, sums.sum_exp[row] = v.sum, sums.weighted[row] = v.weighted;
}

__global__ void __launch_bounds__(kFlatThreads) score_edges_kernel(std::int64_t rows, Edges edges, const double* raw_E,
                                                                   RowSums sums, double* logprob_E, double* entropy_E) {
  const std::int64_t row = grid_thread();
  if (row >= rows) return;
  const double inverse = 1.0 / edges.temperature[row], log_sum = std::log(sums.sum_exp[row]);
  const double entropy = log_sum - sums.weighted[row] / sums.sum_exp[row], max = sums.max[row];
  sums.sum_exp[row] = log_sum, sums.weighted[row] = entropy;
  for (std::int32_t e = edges.begin[row] - edges.begin[0]; e < edges.begin[row + 1] - edges.begin[0]; ++e) {
    logprob_E[e] = (raw_E[e] - max) * inverse - log_sum;
    entropy_E[e] = entropy;
  }
}

// raw -> logits: scale raw, then cap tanh(z / cap).
template <class L>
__global__ void __launch_bounds__(kThreads)
    shape_logits_kernel(std::int64_t columns, std::int64_t stride, L scale, L cap, L* logits) {
  L* const x = logits + blockIdx.x * stride;
  for (std::int64_t m = threadIdx.x; m < columns; m += blockDim.x) {
    const L z = x[m] * scale;
    x[m] = cap > 0 ? cap * std::tanh(z / cap) : z;
  }
}

// The derivative of a logit by its raw logit; cap 0: none.
template <class L>
__device__ __forceinline__ L slope_of_logit(L logit, L scale, L cap) {
  const L t = cap > 0 ? logit / cap : L(0);
  return scale * (L(1) - t * t);
}

// A thread has a distribution: the slopes of its targets, before the logits become gradients. 0 where another rank has
// the column. row_D null: row d has the distribution d.
template <class L>
__global__ void __launch_bounds__(kFlatThreads)
    target_slopes_kernel(std::int64_t distributions, const std::int32_t* row_D, std::int64_t columns, Edges edges,
                         std::int64_t first, L scale, L cap, const L* logits, double* slope_E) {
  const std::int64_t d = grid_thread();
  if (d >= distributions) return;
  const std::int64_t row = row_D != nullptr ? row_D[d] : d;
  for (std::int32_t e = edges.begin[d] - edges.begin[0]; e < edges.begin[d + 1] - edges.begin[0]; ++e) {
    const std::int64_t column = edges.target[e] - first;
    const bool here = column >= 0 && column < columns;
    slope_E[e] = here ? static_cast<double>(slope_of_logit(logits[row * columns + column], scale, cap)) : 0.0;
  }
}

// slope_E null: logits are the raw ones.
template <class L, int kPack>
__global__ void __launch_bounds__(kThreads)
    logit_gradients_kernel(std::int64_t columns, Edges edges, std::int64_t first, RowSums sums,
                           const double* grad_logprob_E, const double* grad_entropy_E, L scale, L cap,
                           const double* slope_E, L* logits) {
  const std::int64_t row = blockIdx.x;
  L* const x = logits + row * columns;
  const double inverse = 1.0 / edges.temperature[row];
  const std::int32_t begin = edges.begin[row] - edges.begin[0], end = edges.begin[row + 1] - edges.begin[0];
  double grad_logprob = 0, grad_entropy = 0;
  for (std::int32_t e = begin; e < end; ++e) grad_logprob += grad_logprob_E[e], grad_entropy += grad_entropy_E[e];
  const L offset = static_cast<L>(sums.max[row]), log_sum = static_cast<L>(sums.sum_exp[row]);
  const L constant = static_cast<L>(-inverse * (grad_logprob + grad_entropy * sums.weighted[row]));
  const L slope = static_cast<L>(-inverse * grad_entropy), narrow = static_cast<L>(inverse);
  for (std::int64_t m = threadIdx.x * kPack; m < columns; m += blockDim.x * kPack) {
    Pack<L, kPack> pack = load_pack<kPack>(x + m);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const L log_p = (pack.x[i] - offset) * narrow - log_sum;
      const L grad = std::exp(log_p) * (constant + slope * log_p);
      pack.x[i] = slope_E != nullptr ? grad * slope_of_logit(pack.x[i], scale, cap) : grad;
    }
    store_pack(x + m, pack);
  }
  __syncthreads();  // the targets add to what other threads wrote
  if (threadIdx.x != 0) return;
  for (std::int32_t e = begin; e < end; ++e) {
    const std::int64_t column = edges.target[e] - first;
    if (column < 0 || column >= columns) continue;
    x[column] += static_cast<L>(grad_logprob_E[e] * inverse * (slope_E != nullptr ? slope_E[e] : 1.0));
  }
}

// A distribution's numbers for the gradient of a logit: log_p = (logit - max) / temperature - log_sum, and the
// gradient p (constant + slope log_p).
struct SetGradient {
  double max, log_sum, constant, slope;
};

// A thread has a distribution.
__global__ void __launch_bounds__(kFlatThreads)
    set_gradients_kernel(std::int64_t distributions, Edges edges, RowSums sums, const double* grad_logprob_E,
                         const double* grad_entropy_E, SetGradient* set_D) {
  const std::int64_t d = grid_thread();
  if (d >= distributions) return;
  double grad_logprob = 0, grad_entropy = 0;
  for (std::int32_t e = edges.begin[d] - edges.begin[0]; e < edges.begin[d + 1] - edges.begin[0]; ++e)
    grad_logprob += grad_logprob_E[e], grad_entropy += grad_entropy_E[e];
  const double inverse = 1.0 / edges.temperature[d];
  set_D[d] = {sums.max[d], sums.sum_exp[d], -inverse * (grad_logprob + grad_entropy * sums.weighted[d]),
              -inverse * grad_entropy};
}

// True if the ascending columns [begin, end) hold this one.
__device__ __forceinline__ bool holds(const std::int32_t* column, std::int32_t begin, std::int32_t end,
                                      std::int64_t wanted) {
  while (begin < end) {
    const std::int32_t middle = begin + (end - begin) / 2;
    if (column[middle] == wanted) return true;
    column[middle] < wanted ? begin = middle + 1 : end = middle;
  }
  return false;
}

// A block has a row, each thread some of its logits: the gradients of all distributions of the row are added before the
// logit is overwritten, so that nothing needs to be kept of it. slope_E null: logits are the raw ones.
template <class L>
__global__ void __launch_bounds__(kThreads)
    kept_gradients_kernel(Sets sets, std::int64_t columns, Edges edges, std::int64_t first, const SetGradient* set_D,
                          const double* grad_logprob_E, L scale, L cap, const double* slope_E, L* logits) {
  const std::int64_t row = blockIdx.x;
  L* const x = logits + row * columns;
  const std::int32_t from = sets.first[row], to = sets.first[row + 1];
  for (std::int64_t m = threadIdx.x; m < columns; m += blockDim.x) {
    const L logit = x[m];
    L grad = 0;
    for (std::int32_t d = from; d < to; ++d) {
      if (sets.end[d] >= 0 && !holds(sets.column, sets.begin[d], sets.end[d], m)) continue;
      const SetGradient set = set_D[d];
      const L log_p =
          (logit - static_cast<L>(set.max)) * static_cast<L>(1.0 / edges.temperature[d]) - static_cast<L>(set.log_sum);
      grad += std::exp(log_p) * (static_cast<L>(set.constant) + static_cast<L>(set.slope) * log_p);
    }
    x[m] = slope_E != nullptr ? grad * slope_of_logit(logit, scale, cap) : grad;
  }
  __syncthreads();  // the targets add to what other threads wrote
  if (threadIdx.x != 0 || from == to) return;
  for (std::int32_t d = from; d < to; ++d)
    for (std::int32_t e = edges.begin[d] - edges.begin[0]; e < edges.begin[d + 1] - edges.begin[0]; ++e) {
      const std::int64_t column = edges.target[e] - first;
      if (column < 0 || column >= columns) continue;
      x[column] += static_cast<L>(grad_logprob_E[e] / edges.temperature[d] * (slope_E != nullptr ? slope_E[e] : 1.0));
    }
}

// A warp has a row.
template <class T, int kPack>
__global__ void __launch_bounds__(kFlatThreads) value_kernel(std::int64_t rows, std::int64_t width, const T* hidden,
                                                             const T* weight, const T* bias, double* value_O) {
  const std::int64_t row = grid_thread() / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  double sum = 0;
  for (std::int64_t m = lane * kPack; row < rows && m < width; m += 32 * kPack) {
    const Pack<T, kPack> h = load_pack<kPack>(hidden + row * width + m), w = load_pack<kPack>(weight + m);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum += static_cast<double>(widened(h.x[i])) * static_cast<double>(widened(w.x[i]));
  }
  sum = warp_sum(sum);
  if (row < rows && lane == 0) value_O[row] = sum + static_cast<double>(widened(*bias));
}

template <class T, int kPack>
__global__ void __launch_bounds__(kFlatThreads)
    value_grad_hidden_kernel(std::int64_t count, std::int64_t width, const double* grad_value, const T* weight,
                             T* grad_hidden) {
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const double g = grad_value[at / width];
  const Pack<T, kPack> w = load_pack<kPack>(weight + at % width);
  Pack<T, kPack> out;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    out.x[i] = narrowed<T>(static_cast<accumulator_t<T>>(g * static_cast<double>(widened(w.x[i]))));
  store_pack(grad_hidden + at, out);
}

template <class Out>
__global__ void __launch_bounds__(kThreads) add_sum_kernel(std::int64_t count, const double* x, Out* into) {
  ESPALIER_SHARED(double[32], scratch);
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += x[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *into += static_cast<Out>(sum);
}

}  // namespace

template <class L>
void logit_sums(std::int64_t rows, std::int64_t columns, const Edges& edges, std::int64_t first, const L* logits,
                const RowSums& sums, double* raw_E) {
  with_pack<L>(columns % kPackOf<L> == 0 && aligned_16(logits), [&]<int kPack>() {
    launch(logit_sums_kernel<L, kPack>, {rows}, threads_for(columns / kPack, kThreads), 0, columns, edges, first,
           logits, sums, raw_E);
  });
}

template <class L>
void logit_sums(const Sets& sets, std::int64_t columns, const Edges& edges, std::int64_t first, const L* logits,
                const RowSums& sums, double* raw_E) {
  launch(kept_sums_kernel<L>, {sets.count}, kThreads, 0, sets, columns, edges, first, logits, sums, raw_E);
}

void raise_maximum(std::int64_t rows, const Edges& edges, const double* max, const RowSums& sums) {
  launch(raise_maximum_kernel, {ceil_div(rows, kFlatThreads)}, kFlatThreads, 0, rows, edges, max, sums);
}

void score_edges(std::int64_t rows, const Edges& edges, const double* raw_E, const RowSums& sums, double* logprob_E,
                 double* entropy_E) {
  launch(score_edges_kernel, {ceil_div(rows, kFlatThreads)}, kFlatThreads, 0, rows, edges, raw_E, sums, logprob_E,
         entropy_E);
}

template <class L>
void shape_logits(std::int64_t rows, std::int64_t columns, std::int64_t stride, L scale, L cap, L* logits) {
  launch(shape_logits_kernel<L>, {rows}, threads_for(columns, kThreads), 0, columns, stride, scale, cap, logits);
}

template <class L>
void logit_gradients(std::int64_t rows, std::int64_t columns, const Edges& edges, std::int64_t first,
                     const RowSums& sums, const double* grad_logprob_E, const double* grad_entropy_E, L scale, L cap,
                     L* logits) {
  const bool shaped = scale != 1 || cap != 0;
  const Scratch<double> slopes(shaped ? edges.count : 0);
  double* const slope_E = shaped ? slopes.get() : nullptr;
  if (shaped)
    launch(target_slopes_kernel<L>, {ceil_div(rows, kFlatThreads)}, kFlatThreads, 0, rows,
           static_cast<const std::int32_t*>(nullptr), columns, edges, first, scale, cap, logits, slope_E);
  with_pack<L>(columns % kPackOf<L> == 0 && aligned_16(logits), [&]<int kPack>() {
    launch(logit_gradients_kernel<L, kPack>, {rows}, threads_for(columns / kPack, kThreads), 0, columns, edges, first,
           sums, grad_logprob_E, grad_entropy_E, scale, cap, slope_E, logits);
  });
}

template <class L>
void logit_gradients(std::int64_t rows, const Sets& sets, std::int64_t columns, const Edges& edges, std::int64_t first,
                     const RowSums& sums, const double* grad_logprob_E, const double* grad_entropy_E, L scale, L cap,
                     L* logits) {
  const bool shaped = scale != 1 || cap != 0;
  const Scratch<double> slopes(shaped ? edges.count : 0);
  const Scratch<SetGradient> of_sets(sets.count);
  double* const slope_E = shaped ? slopes.get() : nullptr;
  const std::int64_t blocks = ceil_div(sets.count, kFlatThreads);
  if (shaped)
    launch(target_slopes_kernel<L>, {blocks}, kFlatThreads, 0, sets.count, sets.row, columns, edges, first, scale, cap,
           logits, slope_E);
  launch(set_gradients_kernel, {blocks}, kFlatThreads, 0, sets.count, edges, sums, grad_logprob_E, grad_entropy_E,
         of_sets.get());
  launch(kept_gradients_kernel<L>, {rows}, kThreads, 0, sets, columns, edges, first, of_sets.get(), grad_logprob_E,
         scale, cap, slope_E, logits);
}

template <class T>
void value(std::int64_t rows, std::int64_t width, const T* hidden, const T* weight, const T* bias, double* value_O) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(hidden, weight), [&]<int kPack>() {
    launch(value_kernel<T, kPack>, {ceil_div(rows, kFlatThreads / 32)}, kFlatThreads, 0, rows, width, hidden, weight,
           bias, value_O);
  });
}

template <class T>
void value_grad_hidden(std::int64_t rows, std::int64_t width, const double* grad_value, const T* weight,
                       T* grad_hidden) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(weight, grad_hidden), [&]<int kPack>() {
    launch(value_grad_hidden_kernel<T, kPack>, {ceil_div(rows * width, kPack * kFlatThreads)}, kFlatThreads, 0,
           rows * width, width, grad_value, weight, grad_hidden);
  });
}

template <class Out>
void add_sum(std::int64_t count, const double* x, Out* into) {
  launch(add_sum_kernel<Out>, {1}, kThreads, 0, count, x, into);
}

#define ESPALIER_INSTANTIATE(L)                                                                                        \
  template void logit_sums(std::int64_t, std::int64_t, const Edges&, std::int64_t, const L*, const RowSums&, double*); \
  template void logit_gradients(std::int64_t, std::int64_t, const Edges&, std::int64_t, const RowSums&, const double*, \
                                const double*, L, L, L*);                                                              \
  template void logit_sums(const Sets&, std::int64_t, const Edges&, std::int64_t, const L*, const RowSums&, double*);  \
  template void logit_gradients(std::int64_t, const Sets&, std::int64_t, const Edges&, std::int64_t, const RowSums&,   \
                                const double*, const double*, L, L, L*);                                               \
  template void shape_logits(std::int64_t, std::int64_t, std::int64_t, L, L, L*);                                      \
  template void add_sum(std::int64_t, const double*, L*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
#undef ESPALIER_INSTANTIATE
#define ESPALIER_INSTANTIATE(T)                                                           \
  template void value(std::int64_t, std::int64_t, const T*, const T*, const T*, double*); \
  template void value_grad_hidden(std::int64_t, std::int64_t, const double*, const T*, T*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
