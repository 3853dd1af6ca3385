// Attention without tensor cores. A warp has a query row of a head, or a key row of a key/value head; it meets its
// partners 32 at a time: each lane computes the score of one pair, then each lane adds to some columns of the result.
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/visible.h"

namespace espalier::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kColumns = static_cast<int>(kLargestHead) / 32;  // of a head, in a lane

template <class T>
__device__ __forceinline__ T* head_at(const Rows<T>& rows, const Shape& shape, std::int64_t row, std::int64_t head) {
  return rows.data + row * rows.stride + head * shape.head_dim;
}
// The same for values and results.
template <class T>
__device__ __forceinline__ T* value_at(const Rows<T>& rows, const Shape& shape, std::int64_t row, std::int64_t head) {
  return rows.data + row * rows.stride + head * shape.value_dim;
}

// Two factors of a warp and what its 32 pairs weigh.
template <class A>
struct WarpMemory {
  A first[kLargestHead], second[kLargestHead];
  A weight[32], slope[32];
};

template <class T, class A>
__device__ __forceinline__ void load_row(const T* from, std::int64_t count, int lane, A (&to)[kLargestHead]) {
  for (std::int64_t d = lane; d < count; d += 32) to[d] = widened(from[d]);
}

template <class T, class A>
__device__ __forceinline__ A dot(const A (&a)[kLargestHead], const T* b, std::int64_t count) {
  A sum = 0;
  for (std::int64_t d = 0; d < count; ++d) sum += a[d] * widened(b[d]);
  return sum;
}

// acc_c += w b_(lane + 32 c)
template <class T, class A>
__device__ __forceinline__ void add_row(A w, const T* b, std::int64_t count, int lane, A (&acc)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane + 32 * c < count) acc[c] += w * widened(b[lane + 32 * c]);
}

// The query row and head of a warp, and the smallest depth that the row sees.
struct Item {
  bool inside = false;
  std::int64_t query = 0, head = 0, kv_head = 0, own_row = 0, first_depth = 0;

  // The first key that it meets, a multiple of 32: keys of the path before its window are left out.
  __device__ __forceinline__ std::int64_t first_key(const Shape& shape) const {
    if (first_depth <= 0) return 0;
    return (first_depth < shape.path_rows ? first_depth : shape.path_rows) / 32 * 32;
  }
};
__device__ __forceinline__ Item item_of(const Shape& shape) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= shape.query_rows * shape.heads) return {};
  const std::int64_t query = item / shape.heads, head = item % shape.heads, own_row = own_row_of(shape, query);
  return {true, query, head, head / (shape.heads / shape.kv_heads), own_row, first_depth_of(shape, own_row)};
}

// Key number `key` of those that a query row meets: of the path first, then of the own rows, of which it sees some up
// to itself.
template <class T>
struct Key {
  bool seen = false;
  const T *k = nullptr, *v = nullptr;
};
template <class T>
__device__ __forceinline__ Key<T> key_at(const Shape& shape, const attention::Inputs<T>& in, std::int64_t key,
                                         const Item& item) {
  if (key < shape.path_rows)
    return {key >= item.first_depth, head_at(in.path_k, shape, key, item.kv_head),
            value_at(in.path_v, shape, key, item.kv_head)};
  const std::int64_t own = key - shape.path_rows;
  if (own > item.own_row || item.own_row >= shape.subtree_end[own]) return {};
  if (shape.window > 0 && shape.depth[own] < item.first_depth) return {};
  return {true, head_at(in.own_k, shape, own, item.kv_head), value_at(in.own_v, shape, own, item.kv_head)};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Shape shape, attention::Inputs<T> in, Rows<T> out, accumulator_t<T>* lse_HQ) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(WarpMemory<A>[kWarps], memories);
  const Item item = item_of(shape);
  if (!item.inside) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WarpMemory<A>& memory = memories[threadIdx.x / 32];
  const std::int64_t D = shape.head_dim, V = shape.value_dim, keys = shape.path_rows + item.own_row + 1;
  load_row(head_at(in.q, shape, item.query, item.head), D, lane, memory.first);
  __syncwarp();
  A top = -INFINITY, sum = 0, acc[kColumns] = {};
  for (std::int64_t first = item.first_key(shape); first < keys; first += 32) {
    const Key<T> mine = key_at(shape, in, first + lane, item);
    const A score = mine.seen ? score_of(shape, dot(memory.first, mine.k, D)).value : A(-INFINITY);
    const A high = warp_max(score), base = high > top ? high : top;
    if (__ballot_sync(kWholeWarp, mine.seen ? 1 : 0) == 0) continue;
    const A less = top == base ? A(1) : std::exp(top - base), weight = mine.seen ? std::exp(score - base) : A(0);
    top = base;
    sum = sum * less + warp_sum(weight);
    memory.weight[lane] = weight;
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) acc[c] *= less;
    for (int k = 0; k < 32; ++k) {
      const Key<T> key = key_at(shape, in, first + k, item);
      if (key.seen) add_row(memory.weight[k], key.v, V, lane, acc);
    }
    __syncwarp();  // the weights are read
  }
  T* const to = value_at(out, shape, item.query, item.head);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane + 32 * c < V) to[lane + 32 * c] = narrowed<T>(acc[c] / sum);
  if (lane == 0) lse_HQ[item.head * shape.query_rows + item.query] = top + std::log(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    delta_kernel(Shape shape, Rows<const T> out, Rows<const T> grad_out, accumulator_t<T>* delta_HQ) {
  using A = accumulator_t<T>;
  const Item item = item_of(shape);
  if (!item.inside) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T *const o = value_at(out, shape, item.query, item.head), *const g =
                                                                      value_at(grad_out, shape, item.query, item.head);
  A sum = 0;
  for (std::int64_t d = lane; d < shape.value_dim; d += 32) sum += widened(o[d]) * widened(g[d]);
  sum = warp_sum(sum);
  if (lane == 0) delta_HQ[item.head * shape.query_rows + item.query] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_queries_kernel(Shape shape, attention::Inputs<T> in, const accumulator_t<T>* lse_HQ,
                            const accumulator_t<T>* delta_HQ, Rows<const T> grad_out, Rows<T> grad_q) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(WarpMemory<A>[kWarps], memories);
  const Item item = item_of(shape);
  if (!item.inside) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WarpMemory<A>& memory = memories[threadIdx.x / 32];
  const std::int64_t D = shape.head_dim, V = shape.value_dim, keys = shape.path_rows + item.own_row + 1;
  load_row(head_at(in.q, shape, item.query, item.head), D, lane, memory.first);
  load_row(value_at(grad_out, shape, item.query, item.head), V, lane, memory.second);
  __syncwarp();
  const A scale = static_cast<A>(shape.scale), lse = lse_HQ[item.head * shape.query_rows + item.query],
          delta = delta_HQ[item.head * shape.query_rows + item.query];
  A acc[kColumns] = {};
  for (std::int64_t first = item.first_key(shape); first < keys; first += 32) {
    const Key<T> mine = key_at(shape, in, first + lane, item);
    if (__ballot_sync(kWholeWarp, mine.seen ? 1 : 0) == 0) continue;
    A slope = 0;
    if (mine.seen) {
      const Score<A> score = score_of(shape, dot(memory.first, mine.k, D));
      slope = scale * score.slope * std::exp(score.value - lse) * (dot(memory.second, mine.v, V) - delta);
    }
    memory.slope[lane] = slope;
    __syncwarp();
    for (int k = 0; k < 32; ++k) {
      const Key<T> key = key_at(shape, in, first + k, item);
      if (key.seen) add_row(memory.slope[k], key.k, D, lane, acc);
    }
    __syncwarp();  // the slopes are read
  }
  T* const to = head_at(grad_q, shape, item.query, item.head);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    if (lane + 32 * c < D) to[lane + 32 * c] = narrowed<T>(acc[c]);
}

// A warp has a key row, of the path or of the own rows, and a key/value head.
template <class T, bool kPath>
__global__ void __launch_bounds__(kThreads)
    backward_keys_kernel(Shape shape, attention::Inputs<T> in, const accumulator_t<T>* lse_HQ,
                         const accumulator_t<T>* delta_HQ, Rows<const T> grad_out, Rows<accumulator_t<T>> grad_k,
                         Rows<accumulator_t<T>> grad_v) {
  using A = accumulator_t<T>;
  ESPALIER_SHARED(WarpMemory<A>[kWarps], memories);
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= (kPath ? shape.path_rows : shape.own_rows) * shape.kv_heads) return;
  const std::int64_t row = item / shape.kv_heads, kv_head = item % shape.kv_heads, D = shape.head_dim;
  const std::int64_t V = shape.value_dim, depth = kPath ? row : depth_of(shape, row);
  const std::int64_t group = shape.heads / shape.kv_heads, end = kPath ? 0 : shape.subtree_end[row];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WarpMemory<A>& memory = memories[threadIdx.x / 32];
  load_row(head_at(kPath ? in.path_k : in.own_k, shape, row, kv_head), D, lane, memory.first);
  load_row(value_at(kPath ? in.path_v : in.own_v, shape, row, kv_head), V, lane, memory.second);
  __syncwarp();
  const A scale = static_cast<A>(shape.scale);
  A acc_k[kColumns] = {}, acc_v[kColumns] = {};
  for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
    for (std::int64_t first = 0; first < shape.query_rows; first += 32) {
      const std::int64_t query = first + lane;
      bool seen = query < shape.query_rows;
      if (seen) {
        const std::int64_t own_row = own_row_of(shape, query);
        seen = (kPath || (row <= own_row && own_row < end)) && depth >= first_depth_of(shape, own_row);
      }
      const unsigned seen_by = __ballot_sync(kWholeWarp, seen ? 1 : 0);
      if (seen_by == 0) continue;
      A weight = 0, slope = 0;
      if (seen) {
        const std::int64_t at = head * shape.query_rows + query;
        const Score<A> score = score_of(shape, dot(memory.first, head_at(in.q, shape, query, head), D));
        weight = std::exp(score.value - lse_HQ[at]);
        slope = scale * score.slope * weight *
                (dot(memory.second, value_at(grad_out, shape, query, head), V) - delta_HQ[at]);
      }
      memory.weight[lane] = weight;
      memory.slope[lane] = slope;
      __syncwarp();
      for (int k = 0; k < 32; ++k) {
        if ((seen_by >> k & 1) == 0) continue;
        add_row(memory.slope[k], head_at(in.q, shape, first + k, head), D, lane, acc_k);
        add_row(memory.weight[k], value_at(grad_out, shape, first + k, head), V, lane, acc_v);
      }
      __syncwarp();  // weights and slopes are read
    }
  A *const to_k = head_at(grad_k, shape, row, kv_head), *const to_v = value_at(grad_v, shape, row, kv_head);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (lane + 32 * c < D) to_k[lane + 32 * c] += acc_k[c];
    if (lane + 32 * c < V) to_v[lane + 32 * c] += acc_v[c];
  }
}

Blocks blocks_for(std::int64_t items) { return {ceil_div(items, kWarps)}; }

}  // namespace

template <class T>
void plain_attention(const Shape& shape, const attention::Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ) {
  launch(forward_kernel<T>, blocks_for(shape.query_rows * shape.heads), kThreads, 0, shape, in, out, lse_HQ);
}

template <class T>
void attention_delta(const Shape& shape, Rows<const T> out, Rows<const T> grad_out, accumulator_t<T>* delta_HQ) {
  launch(delta_kernel<T>, blocks_for(shape.query_rows * shape.heads), kThreads, 0, shape, out, grad_out, delta_HQ);
}

template <class T>
void add_plain_attention_backward(const Shape& shape, const attention::Inputs<T>& in, Rows<const T> out,
                                  const accumulator_t<T>* lse_HQ, Rows<const T> grad_out,
                                  const attention::Gradients<T>& grads) {
  const Scratch<accumulator_t<T>> delta(shape.heads * shape.query_rows);
  attention_delta(shape, out, grad_out, delta.get());
  launch(backward_queries_kernel<T>, blocks_for(shape.query_rows * shape.heads), kThreads, 0, shape, in, lse_HQ,
         delta.get(), grad_out, grads.q);
  launch(backward_keys_kernel<T, true>, blocks_for(shape.path_rows * shape.kv_heads), kThreads, 0, shape, in, lse_HQ,
         delta.get(), grad_out, grads.path_k, grads.path_v);
  launch(backward_keys_kernel<T, false>, blocks_for(shape.own_rows * shape.kv_heads), kThreads, 0, shape, in, lse_HQ,
         delta.get(), grad_out, grads.own_k, grads.own_v);
}

#define ESPALIER_INSTANTIATE(T)                                                                         \
  template void plain_attention(const Shape&, const attention::Inputs<T>&, Rows<T>, accumulator_t<T>*); \
  template void attention_delta(const Shape&, Rows<const T>, Rows<const T>, accumulator_t<T>*);         \
  template void add_plain_attention_backward(const Shape&, const attention::Inputs<T>&, Rows<const T>,  \
                                             const accumulator_t<T>*, Rows<const T>, const attention::Gradients<T>&);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
