// Shared-prefix attention, the contract of every device's kernels: the rows of one set attend to the whole path above
// and, tree-causally, to each other.
//
//   S_ij = scale * q_i . k_j ;  row i sees path row j always, own row j iff j <= r_i < subtree_end_j
//   with a window W it sees only the rows at depths above depth(r_i) - W: itself and the W - 1 before it in its rollout
//   with a soft cap C: S = C tanh(scale q . k / C)
//   out_i = sum_j softmax(S_i)_j v_j ;  lse_i = log sum_j exp S_ij   (mathematics, sections 1, 4, 5)
//
// The backward, with dO = grad_out and the out and lse of the forward:
//   D_i = dO_i . out_i ;  A = exp(S - lse) ;  dS = A o (dO V^T - D)
//   with a soft cap dS is multiplied by 1 - (S / C)^2
//   dQ = scale dS K ;  gK += scale dS^T Q ;  gV += A^T dO
//
// Shapes: T own rows, Q query rows, P path rows, H query heads, J key/value heads (H a multiple of J; query head h
// reads key/value head h / (H/J)), D head size, Dv head size of values (default D). Query row i is own row r_i =
// query_row ? query_row[i] : i (ascending; an own row may occur twice). T, Q and P may be 0. Every own row sees at
// least itself. Path row j has depth j, own row j has depth[j]. Strides count elements between consecutive rows; heads
// are D elements apart (Dv for v, out and their gradients), and elements are adjacent. Own rows that no row sees may be
// read with visible ones, so they must be finite. Sums use accumulator_t<T>. The same machine and problem give the same
// bits.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::attention {

// Rows of one operand: data + row * stride.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t stride = 0;
};

struct Shape {
  std::int64_t query_rows = 0, own_rows = 0, path_rows = 0;  // Q, T, P
  std::int64_t heads = 0, kv_heads = 0, head_dim = 0;        // H, J, D
  double scale = 1;
  const std::int32_t* query_row = nullptr;    // [Q] or null
  const std::int32_t* subtree_end = nullptr;  // [T], one per own row
  std::int64_t window = 0;                    // W; 0: none
  const std::int32_t* depth = nullptr;        // [T], one per own row; read if there is a window
  double soft_cap = 0;                        // C: S = C tanh(scale q k / C); 0: none
  bool keys_whole = false;                    // the forward does not split a query row's keys over threads
  std::int64_t value_dim = 0;                 // Dv; 0: D

  std::int64_t values() const { return value_dim > 0 ? value_dim : head_dim; }
  // The same shape for operands with heads of Dv.
  Shape of_values() const {
    Shape shape = *this;
    shape.head_dim = values();
    return shape;
  }
};

template <class T>
struct Inputs {
  Rows<const T> q;               // [Q, H, D]
  Rows<const T> own_k, own_v;    // [T, J, D], [T, J, Dv]
  Rows<const T> path_k, path_v;  // [P, J, D], [P, J, Dv]
};

template <class T>
struct Gradients {
  Rows<T> q;                              // [Q, H, D], overwritten
  Rows<accumulator_t<T>> own_k, own_v;    // [T, J, D], [T, J, Dv], added to
  Rows<accumulator_t<T>> path_k, path_v;  // [P, J, D], [P, J, Dv], added to
};

}  // namespace espalier::attention
