#include "espalier/ops/cuda/cudnn_attention.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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
  std::vector<std::int64_t> begin;  // [B + 1], rows
  std::int64_t longest;

  std::int64_t count() const { return static_cast<std::int64_t>(begin.size()) - 1; }  // B
  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> out;
    for (std::size_t s = 0; s + 1 < begin.size(); ++s) out.push_back(begin[s + 1] - begin[s]);
    return out;
  }
  // The elements before each of them, in rows that stand so many elements apart.
  std::vector<std::int64_t> offsets(std::int64_t row) const {
    std::vector<std::int64_t> out;
    for (const std::int64_t rows : begin) out.push_back(rows * row);
    return out;
  }
};

Sequences one_sequence(const at::Tensor& rows) {
  const std::int64_t n = rows.size(0);
  return {{0, n}, size_class(n, kFewestRows)};
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
  std::vector<std::int64_t> begin;
  for (std::int64_t s = 0; s <= batch.count; ++s)
    begin.push_back(squares.begin[static_cast<std::size_t>(batch.first + s)] - batch.row);
  begin.resize(static_cast<std::size_t>(size_class(batch.count, 1) + 1), begin.back());
  return {std::move(begin), size_class(batch.longest, kFewestRows)};
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
  Call(const CudnnAttention& library, ListsOnDevice& lists, const Sequences& queries, const Sequences& keys,
       bool causal, double scale)
      : library_(library), lists_(lists), queries_(queries), keys_(keys) {
    shape_.causal = causal;
    shape_.sequences = queries.count(), shape_.queries = queries.longest, shape_.keys = keys.longest;
    shape_.scale = scale;
    addresses_.queries = list(queries.lengths(), at::kInt);
    addresses_.keys = list(keys.lengths(), at::kInt);
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
    addresses_.offset[static_cast<std::size_t>(operand)] = list(of.offsets(rows.stride(0)), at::kLong);
    kept_.push_back(rows);
  }

  void* list(const std::vector<std::int64_t>& numbers, at::ScalarType type) const {
    return lists_.of(library_, numbers, type).data_ptr();
  }

  void run(SequenceGraphs& graphs) {
    const at::Tensor workspace = at::empty({graphs.workspace_bytes(shape_)}, kept_.front().options().dtype(at::kByte));
    graphs.run(shape_, addresses_, workspace.data_ptr());
  }

  const CudnnAttention& library_;
  ListsOnDevice& lists_;
  const Sequences& queries_;
  const Sequences& keys_;
  SequenceGraph shape_;
  SequenceAddresses addresses_;
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
                                                   double scale, ListsOnDevice& lists) const {
  const Sequences queries = one_sequence(q), keys = one_sequence(k);
  const Result result = room_for_result(q);
  Call(*this, lists, queries, keys, false, scale).forward(graphs_, q, k, v, result);
  return {result.out, result.lse.t()};
}

LibraryAttention::Result CudnnAttention::squares(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 const CausalSquares& squares, double scale,
                                                 ListsOnDevice& lists) const {
  const Result result = room_for_result(q);
  for (const Batch& batch : batches_of(squares.begin, kAnyRows)) {
    const Sequences rows = sequences_of(squares, batch);
    const auto of = [&](const at::Tensor& x) { return x.narrow(0, batch.row, batch.rows); };
    Call(*this, lists, rows, rows, true, scale).forward(graphs_, of(q), of(k), of(v), {of(result.out), of(result.lse)});
  }
  return {result.out, result.lse.t()};
}

LibraryAttention::Gradients CudnnAttention::rectangle_backward(const Saved& saved, const at::Tensor& q,
                                                               const at::Tensor& k, const at::Tensor& v, double scale,
                                                               ListsOnDevice& lists) const {
  const Sequences queries = one_sequence(q), keys = one_sequence(k);
  const Gradients gradients = room_for_gradients(q, k, v);
  Call(*this, lists, queries, keys, false, scale).backward(graphs_, deterministic_, saved, q, k, v, gradients);
  return gradients;
}

LibraryAttention::Gradients CudnnAttention::squares_backward(const Saved& saved, const at::Tensor& q,
                                                             const at::Tensor& k, const at::Tensor& v,
                                                             const CausalSquares& squares, double scale,
                                                             ListsOnDevice& lists) const {
  const Gradients gradients = room_for_gradients(q, k, v);
  const std::int64_t most_pairs = backward_rows_ == kAnyRows ? kAnyRows : backward_rows_ * backward_rows_;
  for (const Batch& batch : batches_of(squares.begin, most_pairs)) {
    const Sequences rows = sequences_of(squares, batch);
    const auto of = [&](const at::Tensor& x) { return x.narrow(0, batch.row, batch.rows); };
    Call(*this, lists, rows, rows, true, scale)
        .backward(graphs_, deterministic_,
                  {of(saved.grad_out), of(saved.out), saved.lse.narrow(1, batch.row, batch.rows)}, of(q), of(k), of(v),
                  {of(gradients.q), of(gradients.k), of(gradients.v)});
  }
  return gradients;
}

namespace {

// The library with the graphs that it runs.
class OpenedCudnn final : public CudnnAttention {
 public:
  OpenedCudnn(std::unique_ptr<SequenceGraphs> graphs, bool deterministic, int capability)
      : CudnnAttention(*graphs, deterministic), graphs_(std::move(graphs)), capability_(capability) {}
  int capability() const override { return capability_; }

 private:
  std::unique_ptr<SequenceGraphs> graphs_;
  int capability_;
};

}  // namespace

AttentionOperations open_cudnn_attention(const AttentionGpu& gpu) {
  bool adds_in_turn = false;
  AttentionOperations all = composed_operations("--attention cudnn", gpu.index, [&] {
    std::unique_ptr<SequenceGraphs> graphs = open_cudnn(stream(), gpu.major);
    adds_in_turn = graphs->adds_in_turn();
    return std::make_unique<const OpenedCudnn>(std::move(graphs), gpu.deterministic, 10 * gpu.major + gpu.minor);
  });
  all.adds_in_turn = adds_in_turn;
  return all;
}

}  // namespace espalier::cuda
