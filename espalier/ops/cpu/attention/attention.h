// Shared-prefix attention on a CPU; equations and shapes: ops/attention/rows.h.
//
// Deterministic: the same bits for the same machine, thread count (the backward: any up to 16) and problem. The path is
// not copied. The cost is proportional to the visible (row, key) pairs, in blocks of keys and vectors of neighbouring
// rows; blocks without a visible pair are skipped. If bfloat16 is multiplied directly (Bfloat16Products dot and tiles),
// the weights A and the slopes dS are rounded to bfloat16 as factors of A V, A^T dO, dS K and dS^T Q, and nothing else
// is. With sums of defined order (base/defined_sums.h), out and lse of a query row have the same bits beside any other
// rows, for any split of its keys into path and own rows, and with any number of threads; the forward then multiplies
// bfloat16 as float32.
#pragma once

#include "espalier/ops/attention/rows.h"

namespace espalier::attention {

// Overwrites out [Q, H, Dv] and lse [H, Q] (natural log; row stride Q).
template <class T>
void forward(const Shape& shape, const Inputs<T>& in, Rows<T> out, accumulator_t<T>* lse_HQ);

// Problems with fewer multiply-adds (H (D + Dv) for each pair of a query row and a key) run on the calling thread,
// because waking other threads would take longer. Tests of threads set 0.
inline constexpr std::int64_t kLeastSharedWork = 1 << 19;
void set_least_shared_work(std::int64_t multiply_adds);

// Overwrites the gradient of queries and adds to the others.
template <class T>
void add_backward(const Shape& shape, const Inputs<T>& in, Rows<const T> out, const accumulator_t<T>* lse_HQ,
                  Rows<const T> grad_out, const Gradients<T>& grads);

}  // namespace espalier::attention
