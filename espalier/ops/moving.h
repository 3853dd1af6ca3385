// Operations that move rows from one tensor to another.
//
// Shapes: R rows, M width (a row may have more dimensions), N rows of a table. Row numbers are int32.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct MovingOperations {
  // x_r = table[row_r]. Overwrites x. Both are contiguous and have the same dtype, of 2, 4 or 8 bytes.
  void (*gather)(const at::Tensor& table_NM, const at::Tensor& row_R, const at::Tensor& x_RM);
  // into[row_r] += x_r, in order; rows may repeat. `into` is of x's dtype or its accumulator's.
  void (*add_scatter)(const at::Tensor& x_RM, const at::Tensor& row_R, const at::Tensor& into_NM);
  // x_r = table[id_r - first], or 0 if the table, which may hold a part of the ids, has no such row. Overwrites x.
  // table: the dtype of x; on a CPU also bfloat16 with x in float32.
  void (*look_up)(const at::Tensor& table_NM, const at::Tensor& id_R, std::int64_t first, const at::Tensor& x_RM);
  // into[id_r - first] += x_r if `into` has that row, in order of r. `into`: as in add_scatter.
  void (*add_look_up_backward)(const at::Tensor& x_RM, const at::Tensor& id_R, std::int64_t first,
                               const at::Tensor& into_NM);
  // into[row_r] = x_r, of one dtype; rows do not repeat. Both may have a row stride.
  void (*scatter)(const at::Tensor& x_RM, const at::Tensor& row_R, const at::Tensor& into_NM);
  // Copies rows [from, from + count) to rows [to, to + count); the ranges may overlap.
  void (*move_rows)(const at::Tensor& x_NM, std::int64_t from, std::int64_t to, std::int64_t count);
  // out = in, rounded to the dtype of out. The dtypes are equal, or one of them is float32. Rows with strides, or both
  // contiguous.
  void (*convert)(const at::Tensor& in, const at::Tensor& out);
  // x_r = 0 for rows with id_r == id; contiguous.
  void (*zero_rows)(const at::Tensor& x_RM, const at::Tensor& id_R, std::int64_t id);
  // out = base + factor x; in bfloat16 the product is rounded first. An undefined base is 0; out may be base or x.
  // Contiguous.
  void (*add_scaled)(const at::Tensor& base_RM, const at::Tensor& x_RM, double factor, const at::Tensor& out_RM);
  // x = 0; contiguous.
  void (*zero)(const at::Tensor& x);
  // x = factor x, rounded once; contiguous.
  void (*scale)(const at::Tensor& x, double factor);
};

}  // namespace espalier
