// Rows to the ranks that have the experts they chose, and back.
//
// Ranks of ep have E / ep whole experts each. Rows that ranks of tp have in common are dealt to them in runs, so that
// each is sent by one; a row that rollouts share is one row. Rows stand sorted by expert on both sides, so neither side
// needs to be told more than how many come.
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
  // Every rank of ep makes one with the choices of its rows, which may be none.
  ExpertExchange(const LayerContext& context, const at::Tensor& choice_RK);

  // The rows that this rank sends: [begin, begin + count) of R.
  at::Tensor run_of(const at::Tensor& x_R) const { return x_R.narrow(0, begin_, count_); }
  const SortedSlots& sent() const { return sent_; }          // of the run, all experts
  const SortedSlots& received() const { return received_; }  // E experts, one a row
  std::int64_t arriving() const { return arriving_; }        // N

  // From the rows of a run: what the slots' experts get, [N, ...], taken from the arena.
  at::Tensor rows_to_experts(const at::Tensor& x_R) const;
  // The same of numbers of slots, [rows of the run, k] to [N, 1].
  at::Tensor slots_to_experts(const at::Tensor& x_RK) const;
  // Back: [N, ...] to [S, ...] in the order of sent(), taken from the arena.
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
