// Moves rows between tensors of a device: contracts in ops/moving.h. Moves depend only on the element size `size` in
// bytes; widths and strides are in elements.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::cuda {

struct RowsTo {
  void* data = nullptr;
  std::int64_t stride = 0;
};
struct RowsFrom {
  const void* data = nullptr;
  std::int64_t stride = 0;
};

// x_r = table[id_r - first], or 0 if the table has no such row; `size`: bytes of an element.
void look_up(std::int64_t rows, std::int64_t width, int size, RowsFrom table, std::int64_t table_rows,
             const std::int32_t* id, std::int64_t first, RowsTo x);
// into[row_r] = x_r; rows do not repeat.
void scatter(std::int64_t rows, std::int64_t width, int size, RowsFrom x, const std::int32_t* row, RowsTo into);
// x_r = 0 where id_r is `id`.
void zero_rows(std::int64_t rows, std::int64_t width, int size, RowsTo x, const std::int32_t* ids, std::int32_t id);
// out_r = in_r.
void copy_rows(std::int64_t rows, std::int64_t width, int size, RowsFrom in, RowsTo out);

// into[id_r - first] += x_r if that row exists, r in order, the sum rounded once; contiguous.
template <class In, class Out>
void add_look_up_backward(std::int64_t rows, std::int64_t width, const In* x, const std::int32_t* id,
                          std::int64_t first, std::int64_t into_rows, Out* into);

// out_r = in_r in another type, rounded once.
template <class In, class Out>
void convert(std::int64_t rows, std::int64_t width, const In* in, std::int64_t in_stride, Out* out,
             std::int64_t out_stride);

// x_i = factor x_i, rounded once.
template <class T>
void scale(std::int64_t count, accumulator_t<T> factor, T* x);

// out_i = base_i + factor x_i (base null: factor x_i), in bfloat16 the product rounded first; out may be base, or x.
template <class T>
void add_scaled(std::int64_t count, const T* base, const T* x, accumulator_t<T> factor, T* out);

// out_i = base_i + sum_i (base null: sum_i), rounded once; out may be base.
template <class T>
void round_sum(std::int64_t count, const T* base, const accumulator_t<T>* sum, T* out);

}  // namespace espalier::cuda
