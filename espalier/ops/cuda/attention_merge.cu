// Two results of attention over other keys as one. A warp has a row of a head.
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kPieces = 4;  // elements of a lane at a time: heads of 128 occupy the whole warp

template <class T>
__device__ accumulator_t<T>* sum_of(const AttentionPart<T>& part, std::int64_t row, std::int64_t head) {
  return part.lse + head * part.lse_head + row * part.lse_row;
}

template <int kPack, class First, class Second, class Out>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(std::int64_t rows, std::int64_t heads, std::int64_t head_dim, AttentionPart<First> first,
                 AttentionPart<Second> second, AttentionPart<Out> to) {
  using A = accumulator_t<Out>;
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= rows * heads) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row = item / heads, head = item % heads;
  const A first_lse = *sum_of(first, row, head), second_lse = *sum_of(second, row, head);
  const bool in_first = !std::isinf(first_lse), in_second = !std::isinf(second_lse);
  A joined = in_first ? first_lse : second_lse, first_weight = 1, second_weight = 1;
  if (in_first && in_second) {
    const A largest = first_lse > second_lse ? first_lse : second_lse;
    joined = largest + std::log(std::exp(first_lse - largest) + std::exp(second_lse - largest));
    first_weight = std::exp(first_lse - joined), second_weight = std::exp(second_lse - joined);
  }
  const First* const first_row = first.out.data + row * first.out.stride + head * head_dim;
  const Second* const second_row = second.out.data + row * second.out.stride + head * head_dim;
  Out* const to_row = to.out.data + row * to.out.stride + head * head_dim;
  for (std::int64_t d = lane * kPack; d < head_dim; d += 32 * kPack) {
    const auto of_first = load_pack<kPack>(first_row + d);
    const auto of_second = load_pack<kPack>(second_row + d);
    Pack<Out, kPack> merged;
#pragma unroll
    for (int i = 0; i < kPack; ++i)
      merged.x[i] = narrowed<Out>((in_first ? first_weight * widened(of_first.x[i]) : A(0)) +
                                  (in_second ? second_weight * widened(of_second.x[i]) : A(0)));
    store_pack<kPack>(to_row + d, merged);
  }
  __syncwarp();  // all lanes have read the sums, which may be the first part's
  if (lane == 0) *sum_of(to, row, head) = in_first || in_second ? joined : A(-INFINITY);
}

}  // namespace

template <class First, class Second, class Out>
void merge_attention(std::int64_t rows, std::int64_t heads, std::int64_t head_dim, const AttentionPart<First>& first,
                     const AttentionPart<Second>& second, const AttentionPart<Out>& to) {
  const auto blocks = Blocks{ceil_div(rows * heads, kWarps)};
  const bool in_pieces = aligned_16(first.out.data, second.out.data, to.out.data) &&
                         (head_dim | first.out.stride | second.out.stride | to.out.stride) % kPieces == 0;
  if (in_pieces)
    launch(merge_kernel<kPieces, First, Second, Out>, blocks, kThreads, 0, rows, heads, head_dim, first, second, to);
  else
    launch(merge_kernel<1, First, Second, Out>, blocks, kThreads, 0, rows, heads, head_dim, first, second, to);
}

#define ESPALIER_INSTANTIATE(First, Second, Out)                                                       \
  template void merge_attention(std::int64_t, std::int64_t, std::int64_t, const AttentionPart<First>&, \
                                const AttentionPart<Second>&, const AttentionPart<Out>&);
ESPALIER_INSTANTIATE(float, float, float)
ESPALIER_INSTANTIATE(double, double, double)
ESPALIER_INSTANTIATE(bfloat16, bfloat16, bfloat16)
ESPALIER_INSTANTIATE(bfloat16, bfloat16, float)
ESPALIER_INSTANTIATE(float, bfloat16, float)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
