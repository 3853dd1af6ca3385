// Blocks of logits and a critic's values on a device: contracts in ops/head.h. L is the type of logits, float or
// double.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::cuda {

struct Edges {
  const double* temperature;   // [D]
  const std::int32_t* begin;   // [D + 1]
  const std::int32_t* target;  // [E]
  std::int64_t count;          // E
};
struct RowSums {
  double *max, *sum_exp, *weighted;  // [D]; after score_edges max, log of the sum, entropy
};
// The distributions of a block, if some are over kept sets.
struct Sets {
  std::int64_t count;               // D
  const std::int32_t* row;          // [D]; null: row d has the distribution d
  const std::int32_t *begin, *end;  // [D]; end -1: all columns
  const std::int32_t* column;       // [Z]
  const std::int32_t* first;        // [B + 1]
};

template <class L>
void logit_sums(std::int64_t rows, std::int64_t columns, const Edges& edges, std::int64_t first, const L* logits,
                const RowSums& sums, double* raw_E);
// The same for a block with kept sets.
template <class L>
void logit_sums(const Sets& sets, std::int64_t columns, const Edges& edges, std::int64_t first, const L* logits,
                const RowSums& sums, double* raw_E);
void raise_maximum(std::int64_t rows, const Edges& edges, const double* max, const RowSums& sums);
void score_edges(std::int64_t rows, const Edges& edges, const double* raw_E, const RowSums& sums, double* logprob_E,
                 double* entropy_E);
// cap 0: none.
template <class L>
void shape_logits(std::int64_t rows, std::int64_t columns, std::int64_t stride, L scale, L cap, L* logits);
// `scale`, `cap`: those that shape_logits has applied to the logits, else 1 and 0.
template <class L>
void logit_gradients(std::int64_t rows, std::int64_t columns, const Edges& edges, std::int64_t first,
                     const RowSums& sums, const double* grad_logprob_E, const double* grad_entropy_E, L scale, L cap,
                     L* logits);
// The same for a block with kept sets.
template <class L>
void logit_gradients(std::int64_t rows, const Sets& sets, std::int64_t columns, const Edges& edges, std::int64_t first,
                     const RowSums& sums, const double* grad_logprob_E, const double* grad_entropy_E, L scale, L cap,
                     L* logits);

// value_o = hidden_o . weight + bias, summed in double.
template <class T>
void value(std::int64_t rows, std::int64_t width, const T* hidden, const T* weight, const T* bias, double* value_O);
// grad_hidden_o = g_o weight.
template <class T>
void value_grad_hidden(std::int64_t rows, std::int64_t width, const double* grad_value, const T* weight,
                       T* grad_hidden);
// into += sum_i x_i, in one order.
template <class Out>
void add_sum(std::int64_t count, const double* x, Out* into);

}  // namespace espalier::cuda
