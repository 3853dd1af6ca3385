// Attention composed of cuDNN graphs (ops/composed/attention.h).
#pragma once

#include "espalier/ops/attention.h"
#include "espalier/ops/cuda/aten_library.h"
#include "espalier/ops/cuda/sequence_graph.h"

namespace espalier::cuda {

// For GPU `index` of a compute capability (the major number): bfloat16, heads of a multiple of 8 elements up to 256,
// and a query for each own row; other problems use attention_operations(). Its memory comes from ATen's allocator. Not
// deterministic: gradients of queries are summed in any order, and a backward has rows of any number. Errors:
// DeviceError if this torch has no CUDA; those of open_cudnn.
AttentionOperations open_cudnn_attention(int index, int capability, bool deterministic);

class CudnnAttention : public AtenLibrary {
 public:
  // In one order, cuDNN keeps the gradients of all scores of a backward, in bfloat16: 8 MB a head for a square of this
  // many rows.
  static constexpr std::int64_t kBackwardRows = 2048;

  // backward_rows: kAnyRows for sums in any order.
  explicit CudnnAttention(SequenceGraphs& graphs, std::int64_t backward_rows = kBackwardRows)
      : graphs_(graphs), backward_rows_(backward_rows) {}

  bool takes(at::ScalarType dtype, std::int64_t head_dim) const override;
  std::int64_t backward_rows() const override { return backward_rows_; }
  Result rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) const override;
  Result squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CausalSquares& squares,
                 double scale) const override;
  Gradients rectangle_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double scale) const override;
  Gradients squares_backward(const Saved& saved, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const CausalSquares& squares, double scale) const override;

 private:
  bool deterministic() const { return backward_rows_ != kAnyRows; }

  SequenceGraphs& graphs_;
  std::int64_t backward_rows_;
};

}  // namespace espalier::cuda
