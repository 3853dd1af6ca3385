// `--attention cudnn` without a GPU: what a graph is told of memory, by attending over exactly these addresses, and
// that cuDNN itself builds the graphs, kernels and all, for an H100 that is described to it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "espalier/base/error.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/mixers/attention/library_work.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/ops/cuda/cudnn.h"
#include "espalier/ops/cuda/cudnn_attention.h"
#include "espalier/program/step_kind.h"
#include "espalier/selftest/operation_check.h"

namespace espalier::cuda {
namespace {

constexpr std::size_t index_of(Operand operand) { return static_cast<std::size_t>(operand); }

// Attends over the addresses that a graph was given, element by element in double.
template <class T, class A>
class Walk {
 public:
  Walk(const SequenceGraph& graph, const SequenceAddresses& addresses) : graph_(graph), addresses_(addresses) {
    for (const OperandPlace& place : places_of(graph)) places_[index_of(place.operand)] = place;
  }

  void run() {
    for (sequence_ = 0; sequence_ < graph_.sequences; ++sequence_) {
      n_ = static_cast<const std::int32_t*>(addresses_.queries)[sequence_];
      m_ = static_cast<const std::int32_t*>(addresses_.keys)[sequence_];
      ASSERT_GE(n_, 0);
      ASSERT_LE(n_, graph_.queries);
      ASSERT_LE(m_, graph_.keys);
      if (n_ == 0) continue;
      for (std::int64_t head = 0; head < graph_.query_heads; ++head) graph_.backward ? backward(head) : forward(head);
    }
  }

 private:
  template <class Number>
  Number& at(Operand operand, std::int64_t head, std::int64_t row, std::int64_t d) const {
    const OperandPlace& place = places_[index_of(operand)];
    const std::int64_t offset = static_cast<const std::int64_t*>(addresses_.offset[index_of(operand)])[sequence_];
    return static_cast<Number*>(addresses_.operand[index_of(operand)])[offset + head * place.strides[1] +
                                                                       row * place.strides[2] + d * place.strides[3]];
  }
  double value(Operand operand, std::int64_t head, std::int64_t row, std::int64_t d) const {
    return static_cast<double>(at<T>(operand, head, row, d));
  }
  std::int64_t key_head(std::int64_t head) const { return head / (graph_.query_heads / graph_.key_heads); }
  std::int64_t seen(std::int64_t query) const { return graph_.causal ? std::min(query + 1, m_) : m_; }
  double score(std::int64_t head, std::int64_t i, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t d = 0; d < graph_.head_size; ++d)
      sum += value(Operand::q, head, i, d) * value(Operand::k, key_head(head), j, d);
    return graph_.scale * sum;
  }

  void forward(std::int64_t head) const {
    for (std::int64_t i = 0; i < n_; ++i) {
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      std::vector<double> weights, out(static_cast<std::size_t>(graph_.head_size));
      for (std::int64_t j = 0; j < seen(i); ++j) largest = std::max(largest, weights.emplace_back(score(head, i, j)));
      for (double& weight : weights) sum += weight = std::exp(weight - largest);
      for (std::int64_t d = 0; d < graph_.head_size; ++d) {
        double mixed = 0;
        for (std::int64_t j = 0; j < seen(i); ++j)
          mixed += weights[static_cast<std::size_t>(j)] / sum * value(Operand::v, key_head(head), j, d);
        at<T>(Operand::out, head, i, d) = static_cast<T>(mixed);
      }
      at<A>(Operand::stats, head, i, 0) = static_cast<A>(largest + std::log(sum));
    }
  }

  // Gradients of keys and values are overwritten: the first head of a group begins the sum.
  void backward(std::int64_t head) const {
    const std::int64_t to = key_head(head), D = graph_.head_size;
    if (head % (graph_.query_heads / graph_.key_heads) == 0) sums_.assign(static_cast<std::size_t>(2 * m_ * D), 0);
    for (std::int64_t i = 0; i < n_; ++i) {
      double delta = 0;
      std::vector<double> grad_q(static_cast<std::size_t>(D));
      for (std::int64_t d = 0; d < D; ++d)
        delta += value(Operand::grad_out, head, i, d) * value(Operand::out, head, i, d);
      for (std::int64_t j = 0; j < seen(i); ++j) {
        const double p = std::exp(score(head, i, j) - static_cast<double>(at<A>(Operand::stats, head, i, 0)));
        double grad_p = 0;
        for (std::int64_t d = 0; d < D; ++d)
          grad_p += value(Operand::grad_out, head, i, d) * value(Operand::v, to, j, d);
        const double grad_score = graph_.scale * p * (grad_p - delta);
        for (std::int64_t d = 0; d < D; ++d) {
          grad_q[static_cast<std::size_t>(d)] += grad_score * value(Operand::k, to, j, d);
          sums_[static_cast<std::size_t>(j * D + d)] += grad_score * value(Operand::q, head, i, d);
          sums_[static_cast<std::size_t>((m_ + j) * D + d)] += p * value(Operand::grad_out, head, i, d);
        }
      }
      for (std::int64_t d = 0; d < D; ++d)
        at<T>(Operand::grad_q, head, i, d) = static_cast<T>(grad_q[static_cast<std::size_t>(d)]);
    }
    for (std::int64_t j = 0; j < m_; ++j)
      for (std::int64_t d = 0; d < D; ++d) {
        at<T>(Operand::grad_k, to, j, d) = static_cast<T>(sums_[static_cast<std::size_t>(j * D + d)]);
        at<T>(Operand::grad_v, to, j, d) = static_cast<T>(sums_[static_cast<std::size_t>((m_ + j) * D + d)]);
      }
  }

  const SequenceGraph& graph_;
  const SequenceAddresses& addresses_;
  std::array<OperandPlace, kOperands> places_{};
  std::int64_t sequence_ = 0, n_ = 0, m_ = 0;
  mutable std::vector<double> sums_;
};

// Rules whose breach makes cuDNN refuse or answer wrongly.
void expect_rules(const SequenceGraph& graph, const SequenceAddresses& addresses, std::int64_t element_bytes) {
  constexpr std::int64_t kBytes = 16;
  for (const OperandPlace& place : places_of(graph)) {
    if (place.operand == Operand::stats) continue;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(addresses.operand[index_of(place.operand)]) % kBytes, 0U);
    EXPECT_EQ(place.strides[2] * element_bytes % kBytes, 0);
  }
  // Sequences lie behind each other, and the last offset is the end.
  for (const OperandPlace& place : places_of(graph)) {
    const auto* const offset = static_cast<const std::int64_t*>(addresses.offset[index_of(place.operand)]);
    const auto* const length = static_cast<const std::int32_t*>(place.of_queries ? addresses.queries : addresses.keys);
    for (std::int64_t b = 0; b < graph.sequences; ++b)
      ASSERT_EQ(offset[b + 1] - offset[b], length[b] * place.strides[2]) << b;
  }
  for (const std::int64_t rows : {graph.queries, graph.keys}) EXPECT_EQ(rows, size_class(rows, 128));
  EXPECT_EQ(graph.sequences, size_class(graph.sequences, 1));
}

const std::int64_t kOrderedRows = row_of(AttentionKernels::cudnn).ordered_rows;

class WalkedGraphs final : public SequenceGraphs {
  // cuDNN keeps the gradients of all scores: no more than a square of the rows that the backward was cut into.
  void expect_room(const SequenceGraph& graph) const {
    const std::int64_t rows = size_class(backward_rows, 128);
    EXPECT_LE(graph.sequences * graph.queries * graph.keys, rows * rows);
  }

 public:
  at::ScalarType dtype = at::kDouble;
  std::int64_t backward_rows = kOrderedRows;
  bool deterministic = true, in_turn = false;
  std::map<SequenceGraph, int> runs;

  bool adds_in_turn() const override { return in_turn; }

  std::int64_t workspace_bytes(const SequenceGraph& graph) override {
    if (!graph.backward) return 1;
    return cudnn_workspace_bytes(graph.query_heads, graph.head_size, graph.sequences * graph.queries,
                                 graph.sequences * graph.keys, graph.sequences * graph.queries * graph.keys,
                                 graph.deterministic && !in_turn);
  }
  void run(const SequenceGraph& graph, const SequenceAddresses& addresses, void*) override {
    ++runs[graph];
    expect_rules(graph, addresses, static_cast<std::int64_t>(c10::elementSize(dtype)));
    if (graph.backward && backward_rows != kAnyRows) expect_room(graph);
    EXPECT_EQ(graph.deterministic, !graph.backward || deterministic);
    if (dtype == at::kBFloat16) return Walk<at::BFloat16, float>(graph, addresses).run();
    dtype == at::kDouble ? Walk<double, double>(graph, addresses).run() : Walk<float, float>(graph, addresses).run();
  }
};

// The composition over these graphs, in the host's memory and every dtype.
class Walked final : public CudnnAttention {
 public:
  using CudnnAttention::CudnnAttention;
  const AttentionKernelsRow& row() const override {
    static constexpr AttentionKernelsRow kAnyHeads{.composed = true};
    return kAnyHeads;
  }
  bool takes(at::ScalarType) const override { return true; }
  at::Tensor seen(const at::Tensor& tensor) const override { return tensor; }
  std::vector<std::int32_t> on_host(const at::Tensor& numbers) const override {
    const auto values = host_values<std::int32_t>(numbers);
    return {values.begin(), values.end()};
  }
  at::Tensor on_device(const at::Tensor& numbers) const override {
    ++uploads;
    return numbers;
  }

  mutable int uploads = 0;  // lists of numbers that went to the device
};

WalkedGraphs* graphs = nullptr;

const CudnnAttention& library() {
  static std::unique_ptr<Walked> one;
  one = std::make_unique<Walked>(*graphs, graphs->deterministic, graphs->backward_rows);
  return *one;
}

// Attention over these graphs against the own kernels in float64.
OperationCheck checked(const OperationCase& each, DType dtype) {
  static const Operations walked = [] {
    Operations changed = cpu_device().operations();
    static_cast<AttentionOperations&>(changed) = {
        [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse) {
          composed_attention(library(), problem, out, lse);
        },
        [](const AttentionProblem& problem, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& grad_out,
           const AttentionGradients& gradients) {
          add_composed_attention_backward(library(), problem, out, lse, grad_out, gradients);
        },
        nullptr, nullptr};  // no sinks
    return changed;
  }();
  std::vector<at::Tensor> arguments, results;
  for (const auto& [value, kind, result, least] : each.arguments) {
    const at::ScalarType type = scalar_type(dtype);
    arguments.push_back(kind == OperationCase::Kind::fixed ? value
                        : kind == OperationCase::Kind::sum ? value.to(accumulator_type(type), false, true)
                                                           : value.to(type, false, true));
    if (result) results.push_back(arguments.back());
  }
  each.call(walked, arguments);
  return compared(each, dtype, results, answer_of_cpu(each, dtype));
}

TEST(Cudnn, GraphsAttendOverTheMemoryThatTheyAreTold) {
  for (const std::int64_t rows : {kOrderedRows, std::int64_t{64}, std::int64_t{16}, kAnyRows})
    for (const OperationCase& each : attention_cases()) {
      const auto says = [](const std::string& text, const char* word) { return text.find(word) != std::string::npos; };
      if (says(each.sizes, "some queries") || says(each.sizes, "window") || says(each.sizes, "cap") ||
          says(each.sizes, "values of") || says(each.operation, "sinks"))
        continue;  // own kernels
      if (each.sizes.starts_with("1 rows, path 0"))
        continue;  // a row that sees itself alone: its gradients are rounding
      for (const DType dtype : {DType::float64, DType::float32}) {
        WalkedGraphs walked;
        walked.dtype = scalar_type(dtype);
        walked.backward_rows = rows;
        walked.deterministic = rows != kAnyRows;
        graphs = &walked;
        const OperationCheck check = checked(each, dtype);
        EXPECT_LE(check.error, check.allowed)
            << each.operation << ", " << each.sizes << ", " << name_of(dtype) << ", " << rows << " rows of a backward";
        EXPECT_FALSE(walked.runs.empty());
      }
    }
}

// Branches of a flat group behind a path, some of which are long: rows stand in wider ones, at multiples of 16 bytes or
// not.
struct FlatGroup {
  std::int64_t path = 5, heads = 2, key_heads = 1, size = 8;
  std::vector<std::int32_t> lengths;
  std::int64_t beside = 0;  // columns behind a row that are nobody's, by which strides differ
};

double error_of(const FlatGroup& group) {
  std::vector<std::int32_t> end;
  for (const std::int32_t length : group.lengths)
    end.insert(end.end(), static_cast<std::size_t>(length), static_cast<std::int32_t>(end.size()) + length);
  const auto T = static_cast<std::int64_t>(end.size());
  const std::int64_t H = group.heads * group.size, J = group.key_heads * group.size;
  // Rows of every tensor stand at another stride.
  const auto rows = [&](std::int64_t count, std::int64_t width, std::uint64_t seed) {
    const auto beside = static_cast<std::int64_t>(seed) * group.beside;
    return normal({count, width + beside}, seed).narrow(1, 0, width);
  };
  const AttentionProblem problem{group.size,    rows(T, H, 1),          rows(T, J, 2),
                                 rows(T, J, 3), rows(group.path, J, 4), rows(group.path, J, 5),
                                 at::Tensor(),  whole_numbers(end)};
  const at::Tensor grad_out = rows(T, H, 6);
  std::vector<std::vector<at::Tensor>> answers;
  for (const bool composed : {true, false}) {
    const at::Tensor out = at::zeros({T, H}, at::kDouble), lse = at::zeros({group.heads, T}, at::kDouble);
    const AttentionGradients to{at::zeros_like(out), at::zeros({T, J}, at::kDouble), at::zeros({T, J}, at::kDouble),
                                at::zeros({group.path, J}, at::kDouble), at::zeros({group.path, J}, at::kDouble)};
    if (composed) {
      composed_attention(library(), problem, out, lse);
      add_composed_attention_backward(library(), problem, out, lse, grad_out, to);
    } else {
      cpu_device().operations().attention(problem, out, lse);
      cpu_device().operations().add_attention_backward(problem, out, lse, grad_out, to);
    }
    answers.push_back({out, lse, to.q_Q, to.own_k_T, to.own_v_T, to.path_k_P, to.path_v_P});
  }
  double error = 0;
  for (std::size_t i = 0; i < answers[0].size(); ++i)
    error =
        std::max(error, (answers[0][i] - answers[1][i]).norm().item<double>() / answers[1][i].norm().item<double>());
  return error;
}

TEST(Cudnn, ManyShortBranchesShareFewGraphs) {
  FlatGroup group;
  for (int i = 0; i < 3000; ++i) group.lengths.push_back(1 + i % 3);
  group.lengths[0] = 300;
  WalkedGraphs walked;
  graphs = &walked;
  EXPECT_LE(error_of(group), 1e-12);
  int runs = 0;
  for (const auto& [graph, times] : walked.runs) runs += times;
  EXPECT_LE(walked.runs.size(), 10U);
  EXPECT_GT(runs, static_cast<int>(walked.runs.size()));
}

TEST(Cudnn, RowsAreReadWhereTheyStandOrCopied) {
  for (const std::int64_t beside : {0, 8, 3}) {
    WalkedGraphs walked;
    graphs = &walked;
    EXPECT_LE(error_of({.lengths = {7, 140, 1}, .beside = beside}), 1e-12) << beside;
    for (const auto& [graph, times] : walked.runs) EXPECT_EQ(graph.q_row, beside == 3 ? 16 : 16 + beside) << beside;
  }
}

// Offsets and lengths go to the device in the first layer of a set of rows. Later layers make none and send none, in
// either pass. `made` counts tensors of 32-bit and 64-bit whole numbers that ATen's operations return.
TEST(Cudnn, LaterLayersOfASetUseTheOffsetsOfTheFirst) {
  WalkedGraphs walked;
  Walked each_layer(walked, true, 64);
  std::vector<std::int32_t> end(200, 300);  // 200 rows that two branches continue
  end.insert(end.end(), 50, 250), end.insert(end.end(), 50, 300);
  constexpr std::int64_t H = 2, D = 8, T = 300, P = 130;
  const auto rows = [](std::int64_t count) { return normal({count, H * D}, 1); };
  const AttentionProblem problem{D, rows(T), rows(T), rows(T), rows(P), rows(P), at::Tensor(), whole_numbers(end)};
  const at::Tensor out = rows(T), lse = at::zeros({H, T}, at::kDouble), grad_out = rows(T);
  const AttentionGradients to{rows(T), rows(T), rows(T), rows(P), rows(P)};
  static int made = 0;
  const at::CallbackHandle counting =
      at::addThreadLocalCallback(at::RecordFunctionCallback(nullptr,
                                                            [](const at::RecordFunction& call, at::ObserverContext*) {
                                                              for (const c10::IValue& result : call.outputs()) {
                                                                if (!result.isTensor() || !result.toTensor().defined())
                                                                  continue;
                                                                const at::ScalarType type =
                                                                    result.toTensor().scalar_type();
                                                                if (type == at::kInt || type == at::kLong) ++made;
                                                              }
                                                            })
                                     .needsOutputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
  std::vector<int> made_by_layer, sent_by_layer;
  for (int layer = 0; layer < 3; ++layer) {
    made = each_layer.uploads = 0;
    composed_attention(each_layer, problem, out, lse);
    add_composed_attention_backward(each_layer, problem, out, lse, grad_out, to);
    made_by_layer.push_back(made), sent_by_layer.push_back(each_layer.uploads);
  }
  at::removeCallback(counting);
  EXPECT_GT(sent_by_layer[0], 0);
  EXPECT_GT(made_by_layer[0], 0);
  for (const std::size_t layer : {1, 2}) {
    EXPECT_EQ(sent_by_layer[layer], 0) << layer;
    EXPECT_EQ(made_by_layer[layer], 0) << layer;
  }
}

// Memory of tensors that is in use, and the most of it since reset().
class CountedMemory final : public c10::Allocator {
 public:
  void reset() { at_reset_ = most_ = live_; }
  std::int64_t most() const { return most_ - at_reset_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    live_ += static_cast<std::int64_t>(bytes), most_ = std::max(most_, live_);
    auto* const block = new Block{*this, static_cast<std::int64_t>(bytes), std::vector<Aligned>(bytes / 64 + 1)};
    return {block->memory.data(), block, &drop, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  struct alignas(64) Aligned {
    std::byte bytes[64];
  };
  struct Block {
    CountedMemory& of;
    std::int64_t bytes;
    std::vector<Aligned> memory;
  };
  static void drop(void* block) {
    auto* const dropped = static_cast<Block*>(block);
    dropped->of.live_ -= dropped->bytes;
    delete dropped;
  }

  std::int64_t live_ = 0, most_ = 0, at_reset_ = 0;
};

// Rows behind a path or none, with forks or without, all with a query or most of them: no more memory than planned.
TEST(Cudnn, TakesThePlannedBytes) {
  static CountedMemory counted;  // of tensors that are kept, too
  const c10::Allocator* const usual = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counted, 1);
  struct Case {
    bool deterministic, in_turn, every_row;
  };
  for (const auto& [deterministic, in_turn, every_row] :
       {Case{true, false, true}, {true, false, false}, {true, true, true}, {false, false, true}})
    for (const std::int64_t path : {0, 300})
      for (const std::vector<std::int32_t>& end : {std::vector<std::int32_t>(400, 400), [] {
                                                     std::vector<std::int32_t> fork(
                                                         100, 400);  // a run of 100 rows, below it two
                                                     fork.insert(fork.end(), 200, 300);
                                                     fork.insert(fork.end(), 100, 400);
                                                     return fork;
                                                   }()}) {
        constexpr std::int64_t H = 4, J = 2, D = 16;
        const auto T = static_cast<std::int64_t>(end.size());
        std::vector<std::int32_t> query_row;  // a row has none behind every hundredth one
        for (std::int32_t i = 0; i < T; ++i)
          if (every_row || i % 100 < 99) query_row.push_back(i);
        const auto Q = static_cast<std::int64_t>(query_row.size());
        WalkedGraphs walked;
        walked.dtype = at::kBFloat16;
        walked.deterministic = deterministic, walked.in_turn = in_turn;
        walked.backward_rows = CudnnAttention(walked, deterministic).backward_rows();
        EXPECT_EQ(walked.backward_rows, deterministic && !in_turn ? kOrderedRows : kAnyRows);
        graphs = &walked;
        const auto rows = [](std::int64_t count, std::int64_t heads) {
          return normal({count, heads * D}, 1).to(at::kBFloat16);
        };
        const auto sums = [](std::int64_t count) { return at::zeros({count, J * D}, at::kFloat); };
        const AttentionProblem problem{D,
                                       rows(Q, H),
                                       rows(T, J),
                                       rows(T, J),
                                       rows(path, J),
                                       rows(path, J),
                                       every_row ? at::Tensor() : whole_numbers(query_row),
                                       whole_numbers(end)};
        const at::Tensor out = rows(Q, H), lse = at::zeros({H, Q}, at::kFloat), grad_out = rows(Q, H);
        const AttentionGradients to{rows(Q, H), sums(T), sums(T), sums(path), sums(path)};
        const AttentionHeads heads{.heads = H, .kv_heads = J, .head_dim = D, .value_dim = D};
        DeviceTraits device;
        device.attention = AttentionKernels::cudnn, device.deterministic = deterministic;
        device.adds_in_turn = in_turn;
        const auto bytes_beside_arena = [&](bool gradients) {
          return library_attention_bytes(
              heads,
              {.device = device, .dtype = DType::bfloat16, .rows = T, .path_rows = path, .gradients = gradients});
        };
        constexpr std::int64_t kNumbers = 1 << 16;  // offsets and lengths of sequences
        counted.reset();
        composed_attention(library(), problem, out, lse);
        const std::int64_t forward = bytes_beside_arena(false) - kAllocatorBytes;
        EXPECT_LE(counted.most(), forward + kNumbers) << path << ' ' << end.front();
        if (end[150] != end.front()) {  // a fork: the result of squares, and rows that are merged twice
          EXPECT_GE(counted.most(), (2 + 4) * Q * H * D);
        }
        counted.reset();
        add_composed_attention_backward(library(), problem, out, lse, grad_out, to);
        const std::int64_t both = bytes_beside_arena(true) - kAllocatorBytes;
        EXPECT_LE(counted.most(), both + kNumbers) << path << ' ' << end.front() << ' ' << deterministic;
      }
  c10::SetCPUAllocator(const_cast<c10::Allocator*>(usual), 1);
}

// The device properties that cuDNN 9.19 to 9.26 ask for, of an H100 with 80 GB.
const char* const kH100 = R"({"deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0, "totalGlobalMem": 85520809984,
  "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
  "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
  "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
  "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
  "supportCoopLaunch": 1, "smCountOrigin": 0, "oversizedSharedMemoryPerBlock": 232448, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "l2CacheSize": 52428800,
  "deviceName": "NVIDIA H100 80GB HBM3"})";

// A B200 with 180 GB.
const char* const kB200 = R"({"deviceVer": 1000, "driverVer": 13000, "cudaDeviceId": 0, "totalGlobalMem": 191000000000,
  "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
  "multiProcessorCount": 148, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
  "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
  "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
  "supportCoopLaunch": 1, "smCountOrigin": 0, "oversizedSharedMemoryPerBlock": 232448, "smClockRateKHz": 1965000,
  "memClockRateKHz": 3996000, "l2CacheSize": 132120576, "deviceName": "NVIDIA B200"})";

// Why cuDNN cannot build plans here; empty where it can. A library stands in for the driver, which would load kernels.
std::string look_for_cudnn() {
#ifndef ESPALIER_WITH_CUDNN
  return "built without cudnn_frontend.h or cudnn.h";
#else
  if (dlopen("libcuda.so.1", RTLD_NOW) != nullptr) return "this machine has a driver: espalier selftest shows more";
  for (const char* needed : {ESPALIER_DRIVER_STAND_IN, "libcudnn.so.9", "libnvrtc.so.13"})
    if (dlopen(needed, RTLD_NOW | RTLD_GLOBAL) == nullptr) return dlerror();
  return "";
#endif
}

const std::string& no_plans_here() {
  static const std::string problem = look_for_cudnn();
  return problem;
}

SequenceGraph graph_of(bool backward, bool causal, std::int64_t sequences, std::int64_t queries, std::int64_t keys,
                       std::int64_t size) {
  constexpr std::int64_t kHeads = 8, kKeyHeads = 2;
  const std::int64_t fused = (kHeads + 2 * kKeyHeads) * size, out = kHeads * size;
  return {.backward = backward,
          .causal = causal,
          .sequences = sequences,
          .queries = queries,
          .keys = keys,
          .query_heads = kHeads,
          .key_heads = kKeyHeads,
          .head_size = size,
          .q_row = fused,
          .k_row = fused,
          .v_row = fused,
          .out_row = out,
          .grad_out_row = out,
          .scale = 0.1};
}

TEST(Cudnn, BuildsEveryKindOfGraphForAnH100) {
  if (!no_plans_here().empty()) GTEST_SKIP() << no_plans_here();
  const auto built = cudnn_without_gpu(kH100, 9);
  constexpr std::int64_t kSmall = 1 << 20;
  for (const std::int64_t size : {64, 128, 256})
    for (const bool causal : {true, false}) {
      const std::int64_t sequences = causal ? 4 : 1, queries = causal ? 1024 : 2048, keys = 1024;
      EXPECT_LE(built->workspace_bytes(graph_of(false, causal, sequences, 4 * queries, 4 * keys, size)), kSmall);
      for (const bool deterministic : {true, false}) {
        SequenceGraph backward = graph_of(true, causal, sequences, queries, keys, size);
        backward.deterministic = deterministic;
        const std::int64_t wanted =
            cudnn_workspace_bytes(backward.query_heads, size, sequences * queries, sequences * keys,
                                  sequences * queries * keys, deterministic && !built->adds_in_turn());
        EXPECT_GE(built->workspace_bytes(backward), wanted) << size << (deterministic ? " in one order" : "");
        EXPECT_LE(built->workspace_bytes(backward), wanted + kSmall) << size << (deterministic ? " in one order" : "");
      }
    }
}

// Blackwell runs no code of Hopper (sm_90 is not forward compatible): graphs are for its own version.
TEST(Cudnn, BuildsGraphsForBlackwell) {
  if (!no_plans_here().empty()) GTEST_SKIP() << no_plans_here();
  const auto built = cudnn_without_gpu(kB200, 10);
  EXPECT_FALSE(built->adds_in_turn());
  constexpr std::int64_t kSequences = 4, kRows = 1024, kSize = 128;
  const std::int64_t rows = kSequences * kRows;
  EXPECT_LE(built->workspace_bytes(graph_of(false, true, kSequences, kRows, kRows, kSize)), 1 << 20);
  for (const bool deterministic : {true, false}) {
    SequenceGraph backward = graph_of(true, true, kSequences, kRows, kRows, kSize);
    backward.deterministic = deterministic;
    const std::int64_t most =
        cudnn_workspace_bytes(backward.query_heads, kSize, rows, rows, rows * kRows, deterministic);
    EXPECT_LE(built->workspace_bytes(backward), most + (1 << 20)) << (deterministic ? "in one order" : "");
  }
}

TEST(Cudnn, OtherGpusAreRefusedByName) {
  for (const int capability : {8, 12}) {
    try {
      (void)open_cudnn(nullptr, capability);
      FAIL() << capability;
    } catch (const DeviceError& error) {
      EXPECT_NE(std::string(error.what()).find("9.0 or 10.x"), std::string::npos) << error.what();
    }
  }
  const AttentionKernelsRow& row = row_of(AttentionKernels::cudnn);
  for (const int capability : {90, 100, 103}) EXPECT_TRUE(row.run_on(capability)) << capability;
  for (const int capability : {80, 86, 89, 110, 120, 121}) EXPECT_FALSE(row.run_on(capability)) << capability;
  for (const int capability : {100, 103}) EXPECT_FALSE(row_of(AttentionKernels::hopper).run_on(capability));
}

TEST(Cudnn, ANewerOneCanAddInTurnOnHopper) {
  EXPECT_FALSE(can_add_in_turn(91900, 9));
  EXPECT_FALSE(can_add_in_turn(92499, 9));
  EXPECT_TRUE(can_add_in_turn(92500, 9));
  EXPECT_TRUE(can_add_in_turn(92700, 9));
  EXPECT_FALSE(can_add_in_turn(92700, 10)) << "Blackwell has another order";
}

// cudnn-frontend's limit is a variable of the process, so a library that cannot add in turn leaves it alone.
TEST(Cudnn, AnOlderOneKeepsItsLimitForGradientsOfScores) {
  if (!no_plans_here().empty()) GTEST_SKIP() << no_plans_here();
  constexpr const char* kLimit = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT";
  unsetenv(kLimit);
  (void)cudnn_without_gpu(kB200, 10);
  EXPECT_EQ(std::getenv(kLimit), nullptr);
}

// 16,384 rows against as many: gradients of scores would take 17 GB for 32 heads.
TEST(Cudnn, ABackwardInTurnTakesNoMemoryForPairs) {
  if (!no_plans_here().empty()) GTEST_SKIP() << no_plans_here();
  const auto built = cudnn_without_gpu(kH100, 9);
  if (!built->adds_in_turn()) GTEST_SKIP() << "cuDNN before 9.25";
  SequenceGraph backward = graph_of(true, false, 1, 16384, 16384, 128);
  const std::int64_t wanted = cudnn_workspace_bytes(backward.query_heads, 128, 16384, 16384, 16384 * 16384, false);
  EXPECT_LE(std::abs(built->workspace_bytes(backward) - wanted), 1 << 20);
}

TEST(Cudnn, WhatItCannotBuildIsSaid) {
  if (!no_plans_here().empty()) GTEST_SKIP() << no_plans_here();
  EXPECT_THROW(cudnn_without_gpu("{}", 9), DeviceError);
  const auto built = cudnn_without_gpu(kH100, 9);
  try {
    built->workspace_bytes(graph_of(true, true, 1, 128, 128, 264));
    FAIL() << "heads of 264 elements";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("heads of 264"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace espalier::cuda
