// Rows are moved as words: of 16 bytes where all of them stand at multiples of 16, else of the element's size.
#include "espalier/ops/cuda/moving.h"

#include "espalier/ops/cuda/kernel.h"
#include "espalier/ops/cuda/launch.h"

namespace espalier::cuda {
namespace {

constexpr int kThreads = 256;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    look_up_kernel(std::int64_t words, const Word* table, std::int64_t table_stride, std::int64_t table_rows,
                   const std::int32_t* id, std::int64_t first, Word* x, std::int64_t x_stride) {
  const std::int64_t row = blockIdx.x, at = id[row] - first;
  const bool here = at >= 0 && at < table_rows;
  for (std::int64_t w = threadIdx.x; w < words; w += blockDim.x)
    x[row * x_stride + w] = here ? table[at * table_stride + w] : Word{};
}

// The rows of x, or where `row` is given those rows of `into`.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(std::int64_t words, const Word* x, std::int64_t x_stride, const std::int32_t* row, Word* into,
                   std::int64_t into_stride) {
  const std::int64_t from = blockIdx.x, to = row != nullptr ? row[from] : from;
  for (std::int64_t w = threadIdx.x; w < words; w += blockDim.x) into[to * into_stride + w] = x[from * x_stride + w];
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    zero_rows_kernel(std::int64_t words, Word* x, std::int64_t stride, const std::int32_t* ids, std::int32_t id) {
  const std::int64_t row = blockIdx.x;
  if (ids[row] != id) return;
  for (std::int64_t w = threadIdx.x; w < words; w += blockDim.x) x[row * stride + w] = Word{};
}

// Rows measured in words instead of elements.
struct Words {
  std::int64_t elements_of_word;
  std::int64_t of(std::int64_t elements) const { return elements / elements_of_word; }
};

// Calls body<Word>(words) with the widest word that all rows are made of.
template <class Body>
void with_words(std::int64_t width, int size, std::int64_t strides, const void* a, const void* b, Body&& body) {
  const std::int64_t whole = 16 / size;
  if (width % whole == 0 && strides % whole == 0 && aligned_16(a, b))
    return body.template operator()<uint4>(Words{whole});
  if (size == 8)
    body.template operator()<std::uint64_t>(Words{1});
  else if (size == 4)
    body.template operator()<std::uint32_t>(Words{1});
  else
    body.template operator()<std::uint16_t>(Words{1});
}

void scatter_rows(std::int64_t rows, std::int64_t width, int size, RowsFrom x, const std::int32_t* row, RowsTo into) {
  with_words(width, size, x.stride | into.stride, x.data, into.data, [&]<class Word>(Words words) {
    launch(scatter_kernel<Word>, {rows}, threads_for(words.of(width), kThreads), 0, words.of(width),
           static_cast<const Word*>(x.data), words.of(x.stride), row, static_cast<Word*>(into.data),
           words.of(into.stride));
  });
}

// For each row r of ids: whether no row before it has its id, and the next row that has it (-1: none).
constexpr int kChainThreads = 256;
__global__ void __launch_bounds__(kChainThreads)
    find_chains_kernel(std::int64_t rows, const std::int32_t* id, std::int32_t* next, std::int32_t* is_first) {
  ESPALIER_SHARED(std::int32_t[kChainThreads], tile);
  const std::int64_t row = grid_thread();
  const std::int32_t mine = row < rows ? id[row] : 0;
  bool earlier = false;
  std::int64_t later = -1;
  for (std::int64_t begin = 0; begin < rows; begin += kChainThreads) {
    __syncthreads();  // the tile before is still read
    if (begin + threadIdx.x < rows) tile[threadIdx.x] = id[begin + threadIdx.x];
    __syncthreads();
    const std::int64_t count = rows - begin < kChainThreads ? rows - begin : kChainThreads;
    for (std::int64_t i = 0; i < count; ++i) {
      if (tile[i] != mine) continue;
      if (begin + i < row) earlier = true;
      if (begin + i > row && later < 0) later = begin + i;
    }
  }
  if (row >= rows) return;
  next[row] = static_cast<std::int32_t>(later);
  is_first[row] = earlier ? 0 : 1;
}

// A block has the chain that begins at its row, if one does.
template <class In, class Out, int kPack>
__global__ void __launch_bounds__(kThreads)
    add_chains_kernel(std::int64_t width, const In* x, const std::int32_t* id, std::int64_t first,
                      std::int64_t into_rows, const std::int32_t* next, const std::int32_t* is_first, Out* into) {
  using A = accumulator_t<Out>;
  const std::int64_t row = blockIdx.x, at = id[row] - first;
  if (is_first[row] == 0 || at < 0 || at >= into_rows) return;
  for (std::int64_t m = threadIdx.x * kPack; m < width; m += blockDim.x * kPack) {
    Pack<Out, kPack> to = load_pack<kPack>(into + at * width + m);
    A sum[kPack];
#pragma unroll
    for (int i = 0; i < kPack; ++i) sum[i] = widened(to.x[i]);
    for (std::int64_t r = row; r >= 0; r = next[r]) {
      const Pack<In, kPack> from = load_pack<kPack>(x + r * width + m);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum[i] += static_cast<A>(widened(from.x[i]));
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) to.x[i] = narrowed<Out>(sum[i]);
    store_pack(into + at * width + m, to);
  }
}

template <class In, class Out, int kPack>
__global__ void __launch_bounds__(kThreads) convert_kernel(std::int64_t packs, std::int64_t count, const In* in,
                                                           std::int64_t in_stride, Out* out, std::int64_t out_stride) {
  const std::int64_t thread = grid_thread();
  if (thread >= count) return;
  const std::int64_t row = thread / packs, m = thread % packs * kPack;
  const Pack<In, kPack> from = load_pack<kPack>(in + row * in_stride + m);
  Pack<Out, kPack> to;
#pragma unroll
  for (int i = 0; i < kPack; ++i) to.x[i] = converted<Out>(from.x[i]);
  store_pack(out + row * out_stride + m, to);
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) scale_kernel(std::int64_t count, accumulator_t<T> factor, T* x) {
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  Pack<T, kPack> y = load_pack<kPack>(x + at);
#pragma unroll
  for (int i = 0; i < kPack; ++i) y.x[i] = narrowed<T>(factor * widened(y.x[i]));
  store_pack(x + at, y);
}

// The product of bfloat16 is rounded before its sum; that of others is not.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    add_scaled_kernel(std::int64_t count, const T* base, const T* x, accumulator_t<T> factor, T* out) {
  using A = accumulator_t<T>;
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const Pack<T, kPack> y = load_pack<kPack>(x + at);
  Pack<T, kPack> b{};
  if (base != nullptr) b = load_pack<kPack>(base + at);
  Pack<T, kPack> to;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const A own = widened(y.x[i]);
    if (base == nullptr)
      to.x[i] = narrowed<T>(own * factor);
    else if constexpr (sizeof(T) == 2)
      to.x[i] = narrowed<T>(widened(b.x[i]) + rounded<T>(own * factor));
    else
      to.x[i] = std::fma(own, factor, b.x[i]);
  }
  store_pack(out + at, to);
}

// out_i = a_i + b_i (a null: b_i).
template <class T, class B, class Out, int kPack>
__global__ void __launch_bounds__(kThreads) add_kernel(std::int64_t count, const T* a, const B* b, Out* out) {
  using S = accumulator_t<Out>;
  const std::int64_t at = grid_thread() * kPack;
  if (at >= count) return;
  const Pack<B, kPack> y = load_pack<kPack>(b + at);
  Pack<T, kPack> x{};
  if (a != nullptr) x = load_pack<kPack>(a + at);
  Pack<Out, kPack> to;
#pragma unroll
  for (int i = 0; i < kPack; ++i)
    to.x[i] = narrowed<Out>(a != nullptr ? static_cast<S>(widened(x.x[i])) + static_cast<S>(widened(y.x[i]))
                                         : static_cast<S>(widened(y.x[i])));
  store_pack(out + at, to);
}

}  // namespace

void look_up(std::int64_t rows, std::int64_t width, int size, RowsFrom table, std::int64_t table_rows,
             const std::int32_t* id, std::int64_t first, RowsTo x) {
  with_words(width, size, table.stride | x.stride, table.data, x.data, [&]<class Word>(Words words) {
    launch(look_up_kernel<Word>, {rows}, threads_for(words.of(width), kThreads), 0, words.of(width),
           static_cast<const Word*>(table.data), words.of(table.stride), table_rows, id, first,
           static_cast<Word*>(x.data), words.of(x.stride));
  });
}

void scatter(std::int64_t rows, std::int64_t width, int size, RowsFrom x, const std::int32_t* row, RowsTo into) {
  scatter_rows(rows, width, size, x, row, into);
}

void copy_rows(std::int64_t rows, std::int64_t width, int size, RowsFrom in, RowsTo out) {
  scatter_rows(rows, width, size, in, nullptr, out);
}

void zero_rows(std::int64_t rows, std::int64_t width, int size, RowsTo x, const std::int32_t* ids, std::int32_t id) {
  with_words(width, size, x.stride, x.data, nullptr, [&]<class Word>(Words words) {
    launch(zero_rows_kernel<Word>, {rows}, threads_for(words.of(width), kThreads), 0, words.of(width),
           static_cast<Word*>(x.data), words.of(x.stride), ids, id);
  });
}

template <class In, class Out>
void add_look_up_backward(std::int64_t rows, std::int64_t width, const In* x, const std::int32_t* id,
                          std::int64_t first, std::int64_t into_rows, Out* into) {
  if (rows == 0) return;
  const Scratch<std::int32_t> next(rows), is_first(rows);
  launch(find_chains_kernel, {ceil_div(rows, kChainThreads)}, kChainThreads, 0, rows, id, next.get(), is_first.get());
  with_pack<In>(width % kPackOf<In> == 0 && aligned_16(x, into), [&]<int kPack>() {
    launch(add_chains_kernel<In, Out, kPack>, {rows}, threads_for(width / kPack, kThreads), 0, width, x, id, first,
           into_rows, next.get(), is_first.get(), into);
  });
}

template <class In, class Out>
void convert(std::int64_t rows, std::int64_t width, const In* in, std::int64_t in_stride, Out* out,
             std::int64_t out_stride) {
  constexpr int kWhole = kPackOf < In >> kPackOf<Out> ? kPackOf<In> : kPackOf<Out>;
  const auto run = [&]<int kPack>() {
    const std::int64_t packs = width / kPack, count = rows * packs;
    launch(convert_kernel<In, Out, kPack>, {ceil_div(count, kThreads)}, kThreads, 0, packs, count, in, in_stride, out,
           out_stride);
  };
  if (width % kWhole == 0 && (in_stride | out_stride) % kWhole == 0 && aligned_16(in, out))
    run.template operator()<kWhole>();
  else
    run.template operator()<1>();
}

template <class T>
void scale(std::int64_t count, accumulator_t<T> factor, T* x) {
  with_pack<T>(count % kPackOf<T> == 0 && aligned_16(x), [&]<int kPack>() {
    launch(scale_kernel<T, kPack>, {ceil_div(count, kPack * kThreads)}, kThreads, 0, count, factor, x);
  });
}

template <class T>
void add_scaled(std::int64_t count, const T* base, const T* x, accumulator_t<T> factor, T* out) {
  with_pack<T>(count % kPackOf<T> == 0 && aligned_16(base, x, out), [&]<int kPack>() {
    launch(add_scaled_kernel<T, kPack>, {ceil_div(count, kPack * kThreads)}, kThreads, 0, count, base, x, factor, out);
  });
}

template <class T>
void round_sum(std::int64_t count, const T* base, const accumulator_t<T>* sum, T* out) {
  with_pack<T>(count % kPackOf<T> == 0 && aligned_16(base, sum, out), [&]<int kPack>() {
    launch(add_kernel<T, accumulator_t<T>, T, kPack>, {ceil_div(count, kPack * kThreads)}, kThreads, 0, count, base,
           sum, out);
  });
}

#define ESPALIER_INSTANTIATE(T)                                                                               \
  template void round_sum(std::int64_t, const T*, const accumulator_t<T>*, T*);                               \
  template void scale(std::int64_t, accumulator_t<T>, T*);                                                    \
  template void add_scaled(std::int64_t, const T*, const T*, accumulator_t<T>, T*);                           \
  template void add_look_up_backward(std::int64_t, std::int64_t, const T*, const std::int32_t*, std::int64_t, \
                                     std::int64_t, T*);
ESPALIER_INSTANTIATE(float)
ESPALIER_INSTANTIATE(double)
ESPALIER_INSTANTIATE(bfloat16)
#undef ESPALIER_INSTANTIATE
template void add_look_up_backward(std::int64_t, std::int64_t, const bfloat16*, const std::int32_t*, std::int64_t,
                                   std::int64_t, float*);
#define ESPALIER_INSTANTIATE(In, Out) \
  template void convert(std::int64_t, std::int64_t, const In*, std::int64_t, Out*, std::int64_t);
ESPALIER_INSTANTIATE(bfloat16, float)
ESPALIER_INSTANTIATE(float, bfloat16)
ESPALIER_INSTANTIATE(float, double)
ESPALIER_INSTANTIATE(double, float)
#undef ESPALIER_INSTANTIATE

}  // namespace espalier::cuda
