// Attention with heads of any size by matrix products: the scores of a block of query rows with all keys stand in
// memory (mixers/attention/wide_work.h). For heads that the kernels of attention.h do not take. Contract as there;
// weights and slopes are rounded to the run's dtype as factors of the second products, sums are in its accumulator
// dtype.
//
// Shapes: Q query rows, B of them at a time, C columns of scores: path rows from 0 on, own rows from `own_column` on.
#pragma once

#include <cstdint>

#include "espalier/ops/attention/rows.h"

namespace espalier::cuda {

template <class T>
void wide_attention(const attention::Shape& shape, const attention::Inputs<T>& in, attention::Rows<T> out,
                    accumulator_t<T>* lse_HQ);
// The order of additions depends on the shape alone.
template <class T>
void add_wide_attention_backward(const attention::Shape& shape, const attention::Inputs<T>& in,
                                 attention::Rows<const T> out, const accumulator_t<T>* lse_HQ,
                                 attention::Rows<const T> grad_out, const attention::Gradients<T>& grads);

// A block of query rows of one head, and where their scores stand.
struct ScoreBlock {
  std::int64_t first = 0, rows = 0;  // B
  std::int64_t own_rows = 0;         // own rows whose scores were computed: those behind them nobody here sees
  std::int64_t own_column = 0, columns = 0;
};

// From products q.k: overwrites weight with softmax of the scores of visible keys, 0 elsewhere, and lse.
template <class T>
void weigh_scores(const attention::Shape& shape, const ScoreBlock& block, const accumulator_t<T>* score_BC,
                  T* weight_BC, accumulator_t<T>* lse_Q);
// From products q.k and dO.v: overwrites weight, and slope with scale dS.
template <class T>
void weigh_slopes(const attention::Shape& shape, const ScoreBlock& block, const accumulator_t<T>* score_BC,
                  const accumulator_t<T>* product_BC, const accumulator_t<T>* lse_Q, const accumulator_t<T>* delta_Q,
                  T* weight_BC, T* slope_BC);
// to = sum, rounded once.
template <class T>
void round_rows(std::int64_t rows, std::int64_t width, const accumulator_t<T>* sum_BW, attention::Rows<T> to);

}  // namespace espalier::cuda
