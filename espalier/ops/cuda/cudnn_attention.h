// Attention composed of cuDNN graphs (ops/attention/composed.h).
#pragma once

#include "espalier/ops/attention/operations.h"
#include "espalier/ops/cuda/aten_library.h"
#include "espalier/ops/cuda/sequence_graph.h"

namespace espalier::cuda {

// Summing in one order, cuDNN keeps the gradients of all scores of a backward, in bfloat16: 8 MB a head for a square of
// AttentionKernelsRow::ordered_rows. It keeps none of them if it adds in turn.
class CudnnAttention : public AtenLibrary {
 public:
  CudnnAttention(SequenceGraphs& graphs, bool deterministic)
      : CudnnAttention(graphs, deterministic,
                       row_of(AttentionKernels::cudnn).backward_rows(deterministic && !graphs.adds_in_turn())) {}
  CudnnAttention(SequenceGraphs& graphs, bool deterministic, std::int64_t backward_rows)
      : graphs_(graphs), deterministic_(deterministic), backward_rows_(backward_rows) {}

  const AttentionKernelsRow& row() const override { return row_of(AttentionKernels::cudnn); }
  std::int64_t backward_rows() const override { return backward_rows_; }
  Result rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                   ListsOnDevice& lists) const override;
  Result squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CausalSquares& squares,
                 double scale, ListsOnDevice& lists) const override;
  Gradients rectangle_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double scale, ListsOnDevice& lists) const override;
  Gradients squares_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const CausalSquares& squares, double scale, ListsOnDevice& lists) const override;

 private:
  SequenceGraphs& graphs_;
  bool deterministic_;
  std::int64_t backward_rows_;
};

}  // namespace espalier::cuda
