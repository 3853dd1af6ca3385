// Sums down columns: blocks of 32 packs of columns by 8 rows; each row of threads has its own sums, added in order.
#include "espalier/ops/cuda/columns.h"

#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kColumns = 32, kRows = 8, kThreads = kColumns * kRows;
constexpr std::int64_t kRowsOfPart = 64, kMostParts = 128;
constexpr int kFlatThreads = 256;

// The sums of a block's rows of threads, added in their order; in the first row of threads.
template <class S>
__device__ S sum_of_rows(S mine, S (&scratch)[kThreads]) {
  scratch[threadIdx.x] = mine;
  __syncthreads();
  S sum = 0;
  if (threadIdx.x < kColumns)
    for (int row = 0; row < kRows; ++row) sum += scratch[row * kColumns + threadIdx.x];
  return sum;
}

template <class S, class Out>
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(std::int64_t parts, std::int64_t width, const S* part, Out* into) {
  ESPALIER_SHARED(S[kThreads], scratch);
  const std::int64_t m = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x % kColumns;
  S sum = 0;
  if (m < width)
    for (std::int64_t p = threadIdx.x / kColumns; p < parts; p += kRows) sum += part[p * width + m];
  sum = sum_of_rows(sum, scratch);
  if (threadIdx.x < kColumns && m < width) into[m] += static_cast<Out>(sum);
}

// part[blockIdx.y, m] = sum over the rows of this part.
template <class S, class T, int kPack>
__global__ void __launch_bounds__(kThreads) column_parts_kernel(std::int64_t rows, std::int64_t width, const T* x,
                                                                std::int64_t stride, const double* factor, S* part) {
  ESPALIER_SHARED(S[kThreads], scratch);
  const std::int64_t m = (static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x % kColumns) * kPack;
  S sums[kPack] = {};
  if (m < width)
    for (std::int64_t r = static_cast<std::int64_t>(blockIdx.y) * kRows + threadIdx.x / kColumns; r < rows;
         r += static_cast<std::int64_t>(gridDim.y) * kRows) {
      const Pack<T, kPack> row = load_pack<kPack>(x + r * stride + m);
      const S weight = factor != nullptr ? static_cast<S>(factor[r]) : S(1);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sums[i] += weight * static_cast<S>(widened(row.x[i]));
    }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    __syncthreads();  // scratch may still be read from the column before
    const S sum = sum_of_rows(sums[i], scratch);
    if (threadIdx.x < kColumns && m < width) part[blockIdx.y * width + m + i] = sum;
  }
}

template <class T, int kPack>
__global__ void __launch_bounds__(kFlatThreads)
    add_bias_kernel(std::int64_t count, std::int64_t width, const T* bias, T* y) {
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  Pack<T, kPack> row = load_pack<kPack>(y + at);
  const Pack<T, kPack> b = load_pack<kPack>(bias + at % width);
#pragma unroll
  for (int i = 0; i < kPack; ++i) row.x[i] = narrowed<T>(widened(row.x[i]) + widened(b.x[i]));
  store_pack(y + at, row);
}

}  // namespace

template <class S, class Out>
void add_parts(std::int64_t parts, std::int64_t width, const S* part, Out* into) {
  launch(add_parts_kernel<S, Out>, {ceil_div(width, kColumns)}, kThreads, 0, parts, width, part, into);
}

template <class S, class T, class Out>
void add_column_sums(std::int64_t rows, std::int64_t width, const T* x, std::int64_t stride, const double* factor,
                     Out* into) {
  if (rows == 0) return;
  const std::int64_t wanted = ceil_div(rows, kRowsOfPart), parts = wanted < kMostParts ? wanted : kMostParts;
  const Scratch<S> part(parts * width);
  with_pack<T>(width % kPackOf<T> == 0 && stride % kPackOf<T> == 0 && aligned_16(x), [&]<int kPack>() {
    launch(column_parts_kernel<S, T, kPack>, {ceil_div(width, kColumns * kPack), parts}, kThreads, 0, rows, width, x,
           stride, factor, part.get());
  });
  add_parts(parts, width, part.get(), into);
}

template <class T>
void add_bias(std::int64_t rows, std::int64_t width, const T* bias, T* y) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(bias, y), [&]<int kPack>() {
    launch(add_bias_kernel<T, kPack>, {ceil_div(rows * width, kPack * kFlatThreads)}, kFlatThreads, 0, rows * width,
           width, bias, y);
  });
}

template void add_parts(std::int64_t, std::int64_t, const float*, float*);
template void add_parts(std::int64_t, std::int64_t, const double*, double*);
#define ESPALIER_INSTANTIATE(T)                                                                                      \
  template void add_bias(std::int64_t, std::int64_t, const T*, T*);                                                  \
  template void add_column_sums<accumulator_t<T>>(std::int64_t, std::int64_t, const T*, std::int64_t, const double*, \
                                                  accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE
// A value head sums in double whatever is stored.
template void add_column_sums<double>(std::int64_t, std::int64_t, const float*, std::int64_t, const double*, float*);
template void add_column_sums<double>(std::int64_t, std::int64_t, const bfloat16*, std::int64_t, const double*, float*);

}  // namespace espalier::cuda
