// Rows from one tensor to another.
//
// Shapes: R rows, M width (a row may have more dimensions), N rows of a table. Row numbers are int32.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct MovingOperations {
  // x_r = table[row_r]. Overwrites x; both contiguous, of one dtype, whichever.
  void (*gather)(const at::Tensor& table_NM, const at::Tensor& row_R, const at::Tensor& x_RM);
  // into[row_r] += x_r, in order; rows may repeat. `into` is of x's dtype or its accumulator's.
  void (*add_scatter)(const at::Tensor& x_RM, const at::Tensor& row_R, const at::Tensor& into_NM);
  // x_r = table[id_r - first], 0 where the table has no such row: a table of some of the ids. Overwrites x.
  // table: as x, or bfloat16 on a CPU where x is float32.
  void (*look_up)(const at::Tensor& table_NM, const at::Tensor& id_R, std::int64_t first, const at::Tensor& x_RM);
  // into[id_r - first] += x_r where the table has that row, in order. `into` as in add_scatter.
  void (*add_look_up_backward)(const at::Tensor& x_RM, const at::Tensor& id_R, std::int64_t first,
                               const at::Tensor& into_NM);
  // into[row_r] = x_r; rows do not repeat. x may have a row stride.
  void (*scatter)(const at::Tensor& x_RM, const at::Tensor& row_R, const at::Tensor& into_NM);
  // Rows [to, to + count) = rows [from, from + count) as they were; the ranges may overlap.
  void (*move_rows)(const at::Tensor& x_NM, std::int64_t from, std::int64_t to, std::int64_t count);
  // out = in, rounded to the dtype of out. Two dimensions with row strides, or contiguous.
  void (*convert)(const at::Tensor& in, const at::Tensor& out);
  // x_r = 0 where id_r is the given one; contiguous.
  void (*zero_rows)(const at::Tensor& x_RM, const at::Tensor& id_R, std::int64_t id);
  // out = base + factor x, in bfloat16 the product rounded first; base undefined: 0; out may be base, or x. Contiguous.
  void (*add_scaled)(const at::Tensor& base_RM, const at::Tensor& x_RM, double factor, const at::Tensor& out_RM);
  // x = 0; contiguous.
  void (*zero)(const at::Tensor& x);
  // x = factor x, rounded once; contiguous.
  void (*scale)(const at::Tensor& x, double factor);
};

}  // namespace espalier
