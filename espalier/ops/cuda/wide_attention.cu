// Softmax over rows of scores in memory, and its backward: a block of threads has a query row.
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/visible.h"
#include "espalier/ops/cuda/wide_attention.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

// The row of a block of threads, and the keys that it sees.
struct Sight {
  std::int64_t query, own_row, first_depth;

  __device__ __forceinline__ Sight(const Shape& shape, const ScoreBlock& block)
      : query(block.first + blockIdx.x),
        own_row(own_row_of(shape, query)),
        first_depth(first_depth_of(shape, own_row)) {}

  __device__ __forceinline__ bool sees(const Shape& shape, const ScoreBlock& block, std::int64_t column) const {
    if (column < block.own_column) return column < shape.path_rows && column >= first_depth;
    const std::int64_t own = column - block.own_column;
    return own <= own_row && own_row < shape.subtree_end[own] && depth_of(shape, own) >= first_depth;
  }
};

template <class A>
__device__ __forceinline__ A block_max(A x, A (&scratch)[32]) {
  const unsigned lane = threadIdx.x % 32;
  x = warp_max(x);
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(lane < kThreads / 32 ? scratch[lane] : A(-INFINITY));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    weigh_scores_kernel(Shape shape, ScoreBlock block, const accumulator_t<T>* score_BC, T* weight_BC,
                        accumulator_t<T>* lse_Q) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const Sight row(shape, block);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * block.columns;
  const auto score = [&](std::int64_t column) { return score_of(shape, score_BC[begin + column]).value; };
  A top = -INFINITY;
  for (std::int64_t column = threadIdx.x; column < block.columns; column += kThreads)
    if (row.sees(shape, block, column)) {
      const A value = score(column);
      top = value > top ? value : top;
    }
  top = block_max(top, scratch);
  A sum = 0;
  for (std::int64_t column = threadIdx.x; column < block.columns; column += kThreads)
    if (row.sees(shape, block, column)) sum += std::exp(score(column) - top);
  sum = block_sum(sum, scratch);
  for (std::int64_t column = threadIdx.x; column < block.columns; column += kThreads)
    weight_BC[begin + column] =
        narrowed<T>(row.sees(shape, block, column) ? std::exp(score(column) - top) / sum : A(0));
  if (threadIdx.x == 0) lse_Q[row.query] = top + std::log(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    weigh_slopes_kernel(Shape shape, ScoreBlock block, const accumulator_t<T>* score_BC,
                        const accumulator_t<T>* product_BC, const accumulator_t<T>* lse_Q,
                        const accumulator_t<T>* delta_Q, T* weight_BC, T* slope_BC) {
  using A = accumulator_t<T>;
  const Sight row(shape, block);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * block.columns;
  const A lse = lse_Q[row.query], delta = delta_Q[row.query], scale = static_cast<A>(shape.scale);
  for (std::int64_t column = threadIdx.x; column < block.columns; column += kThreads) {
    const std::int64_t at = begin + column;
    A weight = 0, slope = 0;
    if (row.sees(shape, block, column)) {
      const Score<A> score = score_of(shape, score_BC[at]);
      weight = std::exp(score.value - lse);
      slope = scale * score.slope * weight * (product_BC[at] - delta);
    }
    weight_BC[at] = narrowed<T>(weight);
    slope_BC[at] = narrowed<T>(slope);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    round_rows_kernel(std::int64_t numbers, std::int64_t width, const accumulator_t<T>* sum_BW, Rows<T> to) {
  const std::int64_t at = grid_thread();
  if (at < numbers) to.data[at / width * to.stride + at % width] = narrowed<T>(sum_BW[at]);
}

}  // namespace

template <class T>
void weigh_scores(const Shape& shape, const ScoreBlock& block, const accumulator_t<T>* score_BC, T* weight_BC,
                  accumulator_t<T>* lse_Q) {
  launch(weigh_scores_kernel<T>, {block.rows}, kThreads, 0, shape, block, score_BC, weight_BC, lse_Q);
}

template <class T>
void weigh_slopes(const Shape& shape, const ScoreBlock& block, const accumulator_t<T>* score_BC,
                  const accumulator_t<T>* product_BC, const accumulator_t<T>* lse_Q, const accumulator_t<T>* delta_Q,
                  T* weight_BC, T* slope_BC) {
  launch(weigh_slopes_kernel<T>, {block.rows}, kThreads, 0, shape, block, score_BC, product_BC, lse_Q, delta_Q,
         weight_BC, slope_BC);
}

template <class T>
void round_rows(std::int64_t rows, std::int64_t width, const accumulator_t<T>* sum_BW, Rows<T> to) {
  launch(round_rows_kernel<T>, {ceil_div(rows * width, kThreads)}, kThreads, 0, rows * width, width, sum_BW, to);
}

#define ESPALIER_INSTANTIATE(T)                                                                                 \
  template void weigh_scores(const Shape&, const ScoreBlock&, const accumulator_t<T>*, T*, accumulator_t<T>*);  \
  template void weigh_slopes(const Shape&, const ScoreBlock&, const accumulator_t<T>*, const accumulator_t<T>*, \
                             const accumulator_t<T>*, const accumulator_t<T>*, T*, T*);                         \
  template void round_rows(std::int64_t, std::int64_t, const accumulator_t<T>*, Rows<T>);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
