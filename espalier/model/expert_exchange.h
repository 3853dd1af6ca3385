// Sends rows to the ranks of their chosen experts, and results back.
//
// Each rank of ep has E / ep whole experts. Ranks of tp have the same rows; each sends one run of them, so that every
// row is sent once. A row shared by rollouts is one row. Rows are sorted by expert on both sides, so the ranks exchange
// only counts.
//
// Shapes: R rows, M width, k experts a row, S slots (row and expert) of this rank's run of rows, N slots that arrive
// here, E experts of this rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/model/layer_context.h"

namespace espalier {

class ExpertExchange {
 public:
  // Every rank of ep creates one with the choices of its rows; it may have no rows.
  ExpertExchange(const LayerContext& context, const at::Tensor& choice_RK);

  // The rows sent by this rank: [begin, begin + count) of R.
  at::Tensor run_of(const at::Tensor& x_R) const { return x_R.narrow(0, begin_, count_); }
  const SortedSlots& sent() const { return sent_; }          // slots of the run, for all experts
  const SortedSlots& received() const { return received_; }  // slots that arrive here, for E experts, one slot a row
  std::int64_t arriving() const { return arriving_; }        // N

  // The inputs of this rank's experts, [N, ...], from the rows of a run; taken from the arena.
  at::Tensor rows_to_experts(const at::Tensor& x_R) const;
  // The same for one number per slot, [rows of the run, k] to [N, 1].
  at::Tensor slots_to_experts(const at::Tensor& x_RK) const;
  // The way back: [N, ...] to [S, ...] in the order of sent(), taken from the arena.
  at::Tensor from_experts(const at::Tensor& y_N) const;

 private:
  at::Tensor to_experts(const at::Tensor& x, const at::Tensor& row_S) const;

  const LayerContext& context_;
  Group& ep_;
  std::int64_t begin_, count_, slots_, arriving_ = 0;
  SortedSlots sent_, received_;
  std::vector<std::int64_t> sent_to_, received_from_;  // slots, by rank of ep
};

}  // namespace espalier
