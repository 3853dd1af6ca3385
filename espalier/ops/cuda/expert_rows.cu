// Slots sorted by expert, and the experts' results back in their rows. The sort counts instead of comparing: a chunk of
// slots counts its slots of each expert, one scan makes offsets of the counts, and a slot's place is its chunk's offset
// and the slots before it in the chunk.
#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kChunk = 256, kScanThreads = 1024, kThreads = 256;

// count[e, chunk].
__global__ void __launch_bounds__(kChunk)
    count_slots_kernel(std::int64_t slots, std::int64_t experts, const std::int32_t* choice, std::int32_t* count) {
  ESPALIER_SHARED(std::int32_t[kChunk], tile);
  const std::int64_t slot = grid_thread();
  tile[threadIdx.x] = slot < slots ? choice[slot] : -1;
  __syncthreads();
  for (std::int64_t e = threadIdx.x; e < experts; e += kChunk) {
    std::int32_t sum = 0;
    for (int i = 0; i < kChunk; ++i) sum += tile[i] == e ? 1 : 0;
    count[e * gridDim.x + blockIdx.x] = sum;
  }
}

// Each count becomes the sum of those before it; begin_e is that of the expert's first chunk. One block.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(std::int64_t experts, std::int64_t chunks, std::int32_t* count, std::int32_t* begin_E1) {
  ESPALIER_SHARED(std::int32_t[kScanThreads + 1], sums);
  const std::int64_t numbers = experts * chunks, each = (numbers + kScanThreads - 1) / kScanThreads;
  const std::int64_t first = threadIdx.x * each, end = first + each < numbers ? first + each : numbers;
  std::int32_t sum = 0;
  for (std::int64_t i = first; i < end; ++i) sum += count[i];
  sums[threadIdx.x + 1] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sums[0] = 0;
    for (int t = 1; t <= kScanThreads; ++t) sums[t] += sums[t - 1];
    begin_E1[experts] = sums[kScanThreads];
  }
  __syncthreads();
  std::int32_t before = sums[threadIdx.x];
  for (std::int64_t i = first; i < end; ++i) {
    const std::int32_t here = count[i];
    count[i] = before;
    if (i % chunks == 0) begin_E1[i / chunks] = before;
    before += here;
  }
}

__global__ void __launch_bounds__(kChunk)
    place_slots_kernel(std::int64_t slots, std::int64_t chosen, const std::int32_t* choice, const std::int32_t* offset,
                       std::int32_t* row_S, std::int32_t* slot_S) {
  ESPALIER_SHARED(std::int32_t[kChunk], tile);
  const std::int64_t slot = grid_thread();
  const std::int32_t expert = slot < slots ? choice[slot] : -1;
  tile[threadIdx.x] = expert;
  __syncthreads();
  if (slot >= slots) return;
  std::int32_t at = offset[static_cast<std::int64_t>(expert) * gridDim.x + blockIdx.x];
  for (unsigned i = 0; i < threadIdx.x; ++i) at += tile[i] == expert ? 1 : 0;
  slot_S[at] = static_cast<std::int32_t>(slot);
  row_S[at] = static_cast<std::int32_t>(slot / chosen);
}

__global__ void __launch_bounds__(kThreads)
    find_places_kernel(std::int64_t slots, const std::int32_t* slot_S, std::int32_t* place_S) {
  const std::int64_t at = grid_thread();
  if (at < slots) place_S[slot_S[at]] = static_cast<std::int32_t>(at);
}

// Where each expert ends among the places of a window.
__global__ void __launch_bounds__(kThreads)
    find_ends_kernel(std::int64_t experts, Places window, const std::int32_t* begin_E1, std::int32_t* end_E) {
  const std::int64_t expert = grid_thread();
  if (expert >= experts) return;
  const std::int64_t end = begin_E1[expert + 1] - window.first;
  end_E[expert] = static_cast<std::int32_t>(end < 0 ? 0 : end < window.count ? end : window.count);
}

// A block has a row; its slots are ordered by their places, and the places in the window have rows of y.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    add_expert_rows_kernel(std::int64_t chosen, std::int64_t width, Places window, const std::int32_t* place_S,
                           const T* y_NM, const accumulator_t<T>* weight_S, accumulator_t<T>* sum_RM) {
  using A = accumulator_t<T>;
  std::int32_t *const place = dynamic_shared<std::int32_t>(), *const slot = place + chosen;
  const std::int64_t row = blockIdx.x, first = row * chosen;
  for (std::int64_t j = threadIdx.x; j < chosen; j += blockDim.x) {
    const std::int32_t mine = place_S[first + j];
    std::int32_t before = 0;
    for (std::int64_t other = 0; other < chosen; ++other) before += place_S[first + other] < mine ? 1 : 0;
    place[before] = mine;
    slot[before] = static_cast<std::int32_t>(first + j);
  }
  __syncthreads();
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    Pack<A, kPack> sum = load_pack<kPack>(sum_RM + row * width + m);
    for (std::int64_t j = 0; j < chosen; ++j) {
      const std::int64_t at = place[j] - window.first;
      if (at < 0 || at >= window.count) continue;
      const Pack<T, kPack> y = load_pack<kPack>(y_NM + at * width + m);
      const A weight = weight_S != nullptr ? weight_S[slot[j]] : A(1);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum.x[i] += weight * widened(y.x[i]);
    }
    store_pack(sum_RM + row * width + m, sum);
  }
}

// A block has an entry, whose row nobody else has.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    add_weighted_rows_kernel(std::int64_t width, const std::int32_t* row, const std::int32_t* slot, const T* y_NM,
                             const accumulator_t<T>* weight_S, accumulator_t<T>* sum_RM) {
  using A = accumulator_t<T>;
  const std::int64_t entry = blockIdx.x;
  const A weight = weight_S != nullptr ? weight_S[slot[entry]] : A(1);
  A* const to = sum_RM + row[entry] * width;
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    Pack<A, kPack> sum = load_pack<kPack>(to + m);
    const Pack<T, kPack> y = load_pack<kPack>(y_NM + entry * width + m);
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum.x[i] += weight * widened(y.x[i]);
    store_pack(to + m, sum);
  }
}

// A block has an entry.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weigh_gradient_kernel(std::int64_t inner, const std::int32_t* slots, const T* gate_up_NW,
                          const accumulator_t<T>* weight_S, T* grad_gate_up_NW, T* act_NF,
                          accumulator_t<T>* grad_weight_S) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const std::int64_t entry = blockIdx.x;
  const std::int32_t slot = slots[entry];
  const T* const up = gate_up_NW + entry * 2 * inner + inner;
  T *const grad = grad_gate_up_NW + entry * 2 * inner, *const act = act_NF + entry * inner;
  A sum = 0;
  for (std::int64_t f = threadIdx.x; f < inner; f += blockDim.x) sum += widened(grad[inner + f]) * widened(up[f]);
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) grad_weight_S[slot] = sum;
  const A weight = weight_S[slot];
  for (std::int64_t f = threadIdx.x; f < inner; f += blockDim.x) {
    grad[f] = narrowed<T>(widened(grad[f]) * weight);
    grad[inner + f] = narrowed<T>(widened(grad[inner + f]) * weight);
    act[f] = narrowed<T>(widened(act[f]) * weight);
  }
}

// The expert that has an entry: the last one that begins at or before it.
__device__ __forceinline__ std::int64_t expert_of(std::int64_t entry, std::int64_t experts,
                                                  const std::int32_t* begin_E1) {
  std::int64_t low = 0, high = experts;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (begin_E1[middle] <= entry)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// A block has an entry.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_expert_bias_kernel(std::int64_t width, std::int64_t first, std::int64_t experts, const std::int32_t* begin_E1,
                           const T* bias_EW, T* y_NW) {
  const std::int64_t entry = blockIdx.x;
  const T* const bias = bias_EW + expert_of(first + entry, experts, begin_E1) * width;
  T* const y = y_NW + entry * width;
  for (std::int64_t m = threadIdx.x; m < width; m += blockDim.x) y[m] = narrowed<T>(widened(y[m]) + widened(bias[m]));
}

// A block has an entry.
template <class T>
__global__ void __launch_bounds__(kThreads)
    weigh_gradient_of_act_kernel(std::int64_t inner, std::int64_t width, const std::int32_t* slots, const T* act_NF,
                                 std::int64_t first, std::int64_t experts, const std::int32_t* begin_E1,
                                 const T* bias_EM, const accumulator_t<T>* weight_S, T* grad_act_NF, T* grad_y_NM,
                                 accumulator_t<T>* grad_weight_S) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(A[32], scratch);
  const std::int64_t entry = blockIdx.x;
  const std::int32_t slot = slots[entry];
  const T* const act = act_NF + entry * inner;
  T *const grad_act = grad_act_NF + entry * inner, *const grad_y = grad_y_NM + entry * width;
  A sum = 0;
  for (std::int64_t f = threadIdx.x; f < inner; f += blockDim.x) sum += widened(act[f]) * widened(grad_act[f]);
  if (bias_EM != nullptr) {
    const T* const bias = bias_EM + expert_of(first + entry, experts, begin_E1) * width;
    for (std::int64_t m = threadIdx.x; m < width; m += blockDim.x) sum += widened(bias[m]) * widened(grad_y[m]);
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) grad_weight_S[slot] = sum;
  const A weight = weight_S[slot];
  for (std::int64_t f = threadIdx.x; f < inner; f += blockDim.x)
    grad_act[f] = narrowed<T>(widened(grad_act[f]) * weight);
  for (std::int64_t m = threadIdx.x; m < width; m += blockDim.x) grad_y[m] = narrowed<T>(widened(grad_y[m]) * weight);
}

}  // namespace

void sort_by_expert(const moe::RouterShape& shape, const std::int32_t* choice_RK, std::int32_t* begin_E1,
                    std::int32_t* row_S, std::int32_t* slot_S) {
  const std::int64_t slots = shape.rows * shape.chosen, chunks = ceil_div(slots, kChunk);
  if (slots == 0) return fill_zero(begin_E1, static_cast<std::size_t>(shape.experts + 1) * sizeof(std::int32_t));
  const Scratch<std::int32_t> count(shape.experts * chunks);
  launch(count_slots_kernel, {chunks}, kChunk, 0, slots, shape.experts, choice_RK, count.get());
  launch(scan_kernel, {1}, kScanThreads, 0, shape.experts, chunks, count.get(), begin_E1);
  launch(place_slots_kernel, {chunks}, kChunk, 0, slots, shape.chosen, choice_RK, count.get(), row_S, slot_S);
}

void find_places(std::int64_t slots, const std::int32_t* slot_S, std::int32_t* place_S) {
  launch(find_places_kernel, {ceil_div(slots, kThreads)}, kThreads, 0, slots, slot_S, place_S);
}

void find_ends(std::int64_t experts, Places window, const std::int32_t* begin_E1, std::int32_t* end_E) {
  launch(find_ends_kernel, {ceil_div(experts, kThreads)}, kThreads, 0, experts, window, begin_E1, end_E);
}

template <class T>
void add_expert_rows(std::int64_t rows, std::int64_t chosen, std::int64_t width, Places window,
                     const std::int32_t* place_S, const T* y_NM, const accumulator_t<T>* weight_S,
                     accumulator_t<T>* sum_RM) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(y_NM, sum_RM), [&]<int kPack>() {
    launch(add_expert_rows_kernel<T, kPack>, {rows}, threads_for(width / kPack, kThreads), 2 * chosen * 4, chosen,
           width, window, place_S, y_NM, weight_S, sum_RM);
  });
}

template <class T>
void add_weighted_rows(std::int64_t count, std::int64_t width, const std::int32_t* row, const std::int32_t* slot,
                       const T* y_NM, const accumulator_t<T>* weight_S, accumulator_t<T>* sum_RM) {
  with_pack<T>(width % kPackOf<T> == 0 && aligned_16(y_NM, sum_RM), [&]<int kPack>() {
    launch(add_weighted_rows_kernel<T, kPack>, {count}, threads_for(width / kPack, kThreads), 0, width, row, slot, y_NM,
           weight_S, sum_RM);
  });
}

template <class T>
void weigh_expert_gradient(std::int64_t count, std::int64_t inner, const std::int32_t* slot, const T* gate_up_NW,
                           const accumulator_t<T>* weight_S, T* grad_gate_up_NW, T* act_NF,
                           accumulator_t<T>* grad_weight_S) {
  launch(weigh_gradient_kernel<T>, {count}, threads_for(inner, kThreads), 0, inner, slot, gate_up_NW, weight_S,
         grad_gate_up_NW, act_NF, grad_weight_S);
}

template <class T>
void add_expert_bias(std::int64_t count, std::int64_t width, std::int64_t first, std::int64_t experts,
                     const std::int32_t* begin_E1, const T* bias_EW, T* y_NW) {
  launch(add_expert_bias_kernel<T>, {count}, threads_for(width, kThreads), 0, width, first, experts, begin_E1, bias_EW,
         y_NW);
}

template <class T>
void weigh_gradient_of_act(std::int64_t count, std::int64_t inner, std::int64_t width, const std::int32_t* slot,
                           const T* act_NF, std::int64_t first, std::int64_t experts, const std::int32_t* begin_E1,
                           const T* bias_EM, const accumulator_t<T>* weight_S, T* grad_act_NF, T* grad_y_NM,
                           accumulator_t<T>* grad_weight_S) {
  launch(weigh_gradient_of_act_kernel<T>, {count}, threads_for(inner, kThreads), 0, inner, width, slot, act_NF, first,
         experts, begin_E1, bias_EM, weight_S, grad_act_NF, grad_y_NM, grad_weight_S);
}

#define ESPALIER_INSTANTIATE(T)                                                                                        \
  template void add_expert_bias(std::int64_t, std::int64_t, std::int64_t, std::int64_t, const std::int32_t*, const T*, \
                                T*);                                                                                   \
  template void weigh_gradient_of_act(std::int64_t, std::int64_t, std::int64_t, const std::int32_t*, const T*,         \
                                      std::int64_t, std::int64_t, const std::int32_t*, const T*,                       \
                                      const accumulator_t<T>*, T*, T*, accumulator_t<T>*);                             \
  template void add_expert_rows(std::int64_t, std::int64_t, std::int64_t, Places, const std::int32_t*, const T*,       \
                                const accumulator_t<T>*, accumulator_t<T>*);                                           \
  template void add_weighted_rows(std::int64_t, std::int64_t, const std::int32_t*, const std::int32_t*, const T*,      \
                                  const accumulator_t<T>*, accumulator_t<T>*);                                         \
  template void weigh_expert_gradient(std::int64_t, std::int64_t, const std::int32_t*, const T*,                       \
                                      const accumulator_t<T>*, T*, T*, accumulator_t<T>*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
