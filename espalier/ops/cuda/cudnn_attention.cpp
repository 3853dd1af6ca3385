#include "espalier/ops/cuda/cudnn_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/cuda/aten.h"
#include "espalier/ops/cuda/cudnn.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/open_attention.h"

namespace espalier::cuda {
namespace {

// A tile of cuDNN's: smaller classes would be other graphs for the same work.
const std::int64_t kFewestRows = row_of(AttentionKernels::cudnn).fewest_rows;
constexpr std::int64_t kMostSequences = 1024;

// Sequences behind each other in rows of a tensor, as a graph reads them.
struct Sequences {
  at::Tensor begin;    // int64 [B + 1], rows
  at::Tensor length;   // int32 [B]
  std::int64_t count;  // B
  std::int64_t longest;
};

Sequences one_sequence(const at::Tensor& rows) {
  const std::int64_t n = rows.size(0);
  return {at::arange(0, 2 * n, n, rows.options().dtype(at::kLong)), at::full({1}, n, rows.options().dtype(at::kInt)), 1,
          size_class(n, kFewestRows)};
}

// Squares that one graph attends within.
struct Batch {
  std::int64_t first, count;  // squares
  std::int64_t row, rows, longest;
};

// Batches of squares in their order: as many as leave no more than three quarters of a graph's rows empty and no more
// pairs of rows than `most_pairs`.
std::vector<Batch> batches_of(const std::vector<std::int32_t>& begin, std::int64_t most_pairs) {
  std::vector<Batch> batches;
  const auto fits = [&](const Batch& batch, std::int64_t rows) {
    const std::int64_t longest = size_class(std::max(batch.longest, rows), kFewestRows);
    const std::int64_t count = size_class(batch.count + 1, 1);
    return count <= kMostSequences && count * longest <= std::max(4 * (batch.rows + rows), 64 * kFewestRows) &&
           count * longest <= most_pairs / longest;
  };
  for (std::size_t s = 0; s + 1 < begin.size(); ++s) {
    const std::int64_t row = begin[s], rows = begin[s + 1] - row;
    if (batches.empty() || !fits(batches.back(), rows)) batches.push_back({static_cast<std::int64_t>(s), 0, row, 0, 0});
    Batch& batch = batches.back();
    ++batch.count;
    batch.rows += rows;
    batch.longest = std::max(batch.longest, rows);
  }
  return batches;
}

Sequences sequences_of(const CausalSquares& squares, const Batch& batch) {
  const std::int64_t count = size_class(batch.count, 1);
  at::Tensor begin = squares.begin_S1.narrow(0, batch.first, batch.count + 1) - batch.row;
  begin = at::cat({begin, begin.narrow(0, batch.count, 1).expand({count - batch.count})});
  return {begin.to(at::kLong), begin.narrow(0, 1, count) - begin.narrow(0, 0, count), count,
          size_class(batch.longest, kFewestRows)};
}

// Rows [n, heads, D] whose addresses are multiples of 16 bytes, heads behind each other.
at::Tensor aligned(const at::Tensor& x) {
  constexpr std::int64_t kBytes = 16;
  const bool fits = x.stride(2) == 1 && x.stride(1) == x.size(2) && x.stride(0) * x.element_size() % kBytes == 0 &&
                    reinterpret_cast<std::uintptr_t>(x.data_ptr()) % kBytes == 0;
  return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}

// A run of a graph.
class Call {
 public:
  Call(const Sequences& queries, const Sequences& keys, bool causal, double scale) : queries_(queries), keys_(keys) {
    shape_.causal = causal;
    shape_.sequences = queries.count, shape_.queries = queries.longest, shape_.keys = keys.longest;
    shape_.scale = scale;
    addresses_.queries = queries.length.data_ptr(), addresses_.keys = keys.length.data_ptr();
  }

  void forward(SequenceGraphs& graphs, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const LibraryAttention::Result& result) {
    inputs(q, k, v);
    put(Operand::out, queries_, result.out, &shape_.out_row);
    put(Operand::stats, queries_, result.lse, nullptr);
    run(graphs);
  }

  void backward(SequenceGraphs& graphs, bool deterministic, const LibraryAttention::Saved& saved, const at::Tensor& q,
                const at::Tensor& k, const at::Tensor& v, const LibraryAttention::Gradients& gradients) {
    shape_.backward = true, shape_.deterministic = deterministic;
    inputs(q, k, v);
    put(Operand::out, queries_, aligned(saved.out), &shape_.out_row);
    put(Operand::grad_out, queries_, aligned(saved.grad_out), &shape_.grad_out_row);
    put(Operand::stats, queries_, saved.lse.t().contiguous(), nullptr);
    put(Operand::grad_q, queries_, gradients.q, nullptr);
    put(Operand::grad_k, keys_, gradients.k, nullptr);
    put(Operand::grad_v, keys_, gradients.v, nullptr);
    run(graphs);
  }

 private:
  void inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    shape_.query_heads = q.size(1), shape_.key_heads = k.size(1), shape_.head_size = q.size(2);
    put(Operand::q, queries_, aligned(q), &shape_.q_row);
    put(Operand::k, keys_, aligned(k), &shape_.k_row);
    put(Operand::v, keys_, aligned(v), &shape_.v_row);
  }

  void put(Operand operand, const Sequences& of, const at::Tensor& rows, std::int64_t* row) {
    if (row != nullptr) *row = rows.stride(0);
    addresses_.operand[static_cast<std::size_t>(operand)] = rows.data_ptr();
    addresses_.offset[static_cast<std::size_t>(operand)] = offset_of(of, rows.stride(0)).data_ptr();
    kept_.push_back(rows);
  }

  // Offsets of rows that stand so many elements apart: mostly the same ones for several operands.
  at::Tensor offset_of(const Sequences& of, std::int64_t row) {
    const auto found = std::ranges::find_if(
        offsets_, [&](const Offset& each) { return each.row == row && each.of_queries == (&of == &queries_); });
    if (found != offsets_.end()) return found->offset;
    offsets_.push_back({row, &of == &queries_, of.begin * row});
    return offsets_.back().offset;
  }

  void run(SequenceGraphs& graphs) {
    const at::Tensor workspace =
        at::empty({graphs.workspace_bytes(shape_)}, queries_.length.options().dtype(at::kByte));
    graphs.run(shape_, addresses_, workspace.data_ptr());
  }

  struct Offset {
    std::int64_t row;
    bool of_queries;
    at::Tensor offset;
  };

  const Sequences& queries_;
  const Sequences& keys_;
  SequenceGraph shape_;
  SequenceAddresses addresses_;
  std::vector<Offset> offsets_;
  std::vector<at::Tensor> kept_;  // copies live until the graph was given to the stream
};

// Room for a result: lse as cuDNN writes it, [n, H].
LibraryAttention::Result room_for_result(const at::Tensor& q) {
  return {at::empty(q.sizes(), q.options()),
          at::empty({q.size(0), q.size(1)}, q.options().dtype(accumulator_type(q.scalar_type())))};
}
LibraryAttention::Gradients room_for_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
  return {like(q), like(k), like(v)};
}

}  // namespace

LibraryAttention::Result CudnnAttention::rectangle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   double scale) const {
  const Sequences queries = one_sequence(q), keys = one_sequence(k);
  const Result result = room_for_result(q);
  Call(queries, keys, false, scale).forward(graphs_, q, k, v, result);
  return {result.out, result.lse.t()};
}

LibraryAttention::Result CudnnAttention::squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 const CausalSquares& squares, double scale) const {
  const Result result = room_for_result(q);
  for (const Batch& batch : batches_of(squares.begin, kAnyRows)) {
    const Sequences rows = sequences_of(squares, batch);
    const auto of = [&](const at::Tensor& x) { return x.narrow(0, batch.row, batch.rows); };
    Call(rows, rows, true, scale).forward(graphs_, of(q), of(k), of(v), {of(result.out), of(result.lse)});
  }
  return {result.out, result.lse.t()};
}

LibraryAttention::Gradients CudnnAttention::rectangle_backward(const Saved& saved, const at::Tensor& q,
                                                               const at::Tensor& k, const at::Tensor& v,
                                                               double scale) const {
  const Sequences queries = one_sequence(q), keys = one_sequence(k);
  const Gradients gradients = room_for_gradients(q, k, v);
  Call(queries, keys, false, scale).backward(graphs_, deterministic(), saved, q, k, v, gradients);
  return gradients;
}

LibraryAttention::Gradients CudnnAttention::squares_backward(const Saved& saved, const at::Tensor& q,
                                                             const at::Tensor& k, const at::Tensor& v,
                                                             const CausalSquares& squares, double scale) const {
  const Gradients gradients = room_for_gradients(q, k, v);
  const std::int64_t most_pairs = deterministic() ? backward_rows_ * backward_rows_ : kAnyRows;
  for (const Batch& batch : batches_of(squares.begin, most_pairs)) {
    const Sequences rows = sequences_of(squares, batch);
    const auto of = [&](const at::Tensor& x) { return x.narrow(0, batch.row, batch.rows); };
    Call(rows, rows, true, scale)
        .backward(graphs_, deterministic(),
                  {of(saved.grad_out), of(saved.out), saved.lse.narrow(1, batch.row, batch.rows)}, of(q), of(k), of(v),
                  {of(gradients.q), of(gradients.k), of(gradients.v)});
  }
  return gradients;
}

namespace {

// The library with the graphs that it runs.
class OpenedCudnn final : public CudnnAttention {
 public:
  OpenedCudnn(std::unique_ptr<SequenceGraphs> graphs, std::int64_t backward_rows)
      : CudnnAttention(*graphs, backward_rows), graphs_(std::move(graphs)) {}

 private:
  std::unique_ptr<SequenceGraphs> graphs_;
};

}  // namespace

AttentionOperations open_cudnn_attention(const AttentionGpu& gpu) {
  const std::int64_t rows = row_of(AttentionKernels::cudnn).backward_rows(gpu.deterministic);
  return composed_operations("--attention cudnn", gpu.index, [&] {
    return std::make_unique<const OpenedCudnn>(open_cudnn(stream(), gpu.major), rows);
  });
}

}  // namespace espalier::cuda
