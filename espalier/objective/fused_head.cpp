// The head block by block of rows: logits of a block, what the objective wants of them, their gradient in place, and
// the two products that carry it on. Equations: fused_head.h.
//
// Products. float32 and float64: as they are. bfloat16: hidden rows and a run of weight rows are widened to float32
// first and everything is then float32, so logits and gradients are as accurate as float32 sums of exact bfloat16
// products; rounding the logits themselves to bfloat16 would cost two decimal digits of every log-prob. Widening the
// weights costs one multiplication's worth in `rows of the block`.
// The gradient of a raw logit already holds 1 / temperature, so both products can use it.
#include "espalier/objective/fused_head.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/held_buffers.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"
#include "espalier/plan/block_buffers.h"

namespace espalier {

namespace {

class HeadPass {
 public:
  // `out` is null in forward-only passes.
  HeadPass(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
           const HeadGradients* out, Arena& arena);

  // The logits of every block in turn, their first row and their number: visit(first, rows).
  template <class Visit>
  void run(Visit visit);
  const at::Tensor& logits() const { return block_logits_; }
  // From the logits' gradient, which is in logits() now: overwrites the hidden rows', adds to the weights'.
  void add_gradients();

 private:
  void compute_logits();
  // Calls with a run of weight rows in the accumulator type: body(begin, weights, the logits' columns).
  template <class Body>
  void for_each_weight_run(Body body);

  const at::Tensor hidden_OM_, weight_VM_;
  Group& tp_;
  const HeadGradients* out_;
  const Operations& ops_;
  std::int64_t outputs_, vocabulary_, width_;
  // For the largest block; those of a block are their first rows. All but the logits exist for bfloat16 only.
  HeadBuffers declared_;
  HeldBuffers held_;

  // The block in work: rows [first_row_, first_row_ + rows_).
  std::int64_t first_row_ = 0, rows_ = 0;
  at::Tensor block_logits_, block_hidden_;
};

HeadPass::HeadPass(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
                   const HeadGradients* out, Arena& arena)
    : hidden_OM_(hidden_OM),
      weight_VM_(weight_VM),
      tp_(part.tp),
      out_(out),
      ops_(arena.device().operations()),
      outputs_(hidden_OM.size(0)),
      vocabulary_(weight_VM.size(0)),
      width_(weight_VM.size(1)),
      declared_(element_bytes(hidden_OM.scalar_type()), outputs_, std::max(vocabulary_, part.largest), width_,
                out != nullptr),
      held_(arena, declared_, hidden_OM.scalar_type()) {
  held_.enter(0);
}

template <class Body>
void HeadPass::for_each_weight_run(Body body) {
  for (std::int64_t begin = 0; begin < vocabulary_; begin += declared_.vocabulary_run) {
    const std::int64_t count = std::min(declared_.vocabulary_run, vocabulary_ - begin);
    const at::Tensor weights = held_[declared_.weight_run_NM].narrow(0, 0, count);
    ops_.convert(weight_VM_.narrow(0, begin, count), weights);
    body(begin, weights, block_logits_.narrow(1, begin, count));
  }
}

void HeadPass::compute_logits() {
  block_hidden_ = hidden_OM_.narrow(0, first_row_, rows_);
  // The buffer is that of the largest part of the vocabulary.
  block_logits_ = held_[declared_.logits_BV].view({-1}).narrow(0, 0, rows_ * vocabulary_).view({rows_, vocabulary_});
  if (!declared_.widens()) return ops_.linear(block_logits_, block_hidden_, weight_VM_, at::Tensor());
  const at::Tensor wide = held_[declared_.hidden_BM].narrow(0, 0, rows_);
  ops_.convert(block_hidden_, wide);
  block_hidden_ = wide;
  for_each_weight_run([&](std::int64_t, const at::Tensor& weights, const at::Tensor& columns) {
    ops_.linear(columns, block_hidden_, weights, at::Tensor());
  });
}

void HeadPass::add_gradients() {
  const at::Tensor grad_hidden = out_->grad_hidden_OM.narrow(0, first_row_, rows_);
  if (!declared_.widens()) {
    ops_.linear_grad_input(grad_hidden, block_logits_, weight_VM_);
    tp_.add_over_ranks(grad_hidden);
  } else {
    const at::Tensor sum = held_[declared_.grad_hidden_BM].narrow(0, 0, rows_);
    for_each_weight_run([&](std::int64_t begin, const at::Tensor& weights, const at::Tensor& columns) {
      begin == 0 ? ops_.linear_grad_input(sum, columns, weights) : ops_.add_linear_grad_input(sum, columns, weights);
    });
    tp_.add_over_ranks(sum);
    ops_.convert(sum, grad_hidden);
  }
  ops_.add_linear_grad_weight(out_->grad_weight_VM, at::Tensor(), block_logits_, block_hidden_, at::Tensor());
}

template <class Visit>
void HeadPass::run(Visit visit) {
  for (first_row_ = 0; first_row_ < outputs_; first_row_ += declared_.block_rows) {
    rows_ = std::min(declared_.block_rows, outputs_ - first_row_);
    compute_logits();
    visit(first_row_, rows_);
  }
}

void check(const HeadProblem& problem, const HeadGradients* out) {
  const at::Tensor &hidden = problem.hidden_OM, &weight = problem.weight_VM;
  const at::ScalarType dtype = hidden.scalar_type();
  ESPALIER_INTERNAL(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16, "hidden of dtype ",
                    c10::toString(dtype));
  ESPALIER_INTERNAL(weight.scalar_type() == dtype && hidden.size(1) == weight.size(1) && hidden.is_contiguous() &&
                        weight.is_contiguous() && weight.size(0) > 0,
                    "hidden ", hidden.sizes(), ", weight ", weight.sizes());
  ESPALIER_INTERNAL_EQ(problem.edges.temperature_O.size(0), hidden.size(0));
  if (!out) return;
  ESPALIER_INTERNAL(out->grad_hidden_OM.sizes() == hidden.sizes() && out->grad_hidden_OM.scalar_type() == dtype &&
                        out->grad_hidden_OM.is_contiguous(),
                    "grad_hidden ", out->grad_hidden_OM.sizes());
  ESPALIER_INTERNAL(
      out->grad_weight_VM.sizes() == weight.sizes() && out->grad_weight_VM.scalar_type() == accumulator_type(dtype),
      "grad_weight ", out->grad_weight_VM.sizes());
}

// The edges of a head on the device, block by block, and their numbers.
class EdgeNumbers {
 public:
  EdgeNumbers(const HeadProblem& problem, Arena& arena)
      : edges_(problem.edges), first_token_(problem.part.first), tp_(problem.part.tp), device_(arena.device()) {}

  // The edges of rows [first, first + rows).
  struct Block {
    EdgeBlock edges;
    std::int64_t begin, count;  // of the edges
    LogitSums sums;
    at::Tensor series_2E;  // log-probs, then entropies
  };
  Block score(std::int64_t first, std::int64_t rows, const at::Tensor& logits_BV) const {
    const std::int64_t begin = edges_.begin[static_cast<std::size_t>(first)];
    const std::int64_t count = edges_.begin[static_cast<std::size_t>(first + rows)] - begin;
    const EdgeBlock edges{edges_.temperature_O.narrow(0, first, rows), edges_.begin_O1.narrow(0, first, rows + 1),
                          edges_.target_E.narrow(0, begin, count)};
    // The maximum over all ranks; then this rank's numbers, the last three to be summed over ranks in one call.
    const at::Tensor numbers = device_.allocate({4 * rows + count}, at::kDouble), max_B = numbers.narrow(0, 0, rows);
    const LogitSums sums{numbers.narrow(0, rows, rows), numbers.narrow(0, 2 * rows, rows),
                         numbers.narrow(0, 3 * rows, rows)};
    const at::Tensor raw_E = numbers.narrow(0, 4 * rows, count);
    const Operations& ops = device_.operations();
    ops.logit_sums(edges, first_token_, logits_BV, sums, raw_E);
    ops.convert(sums.max_B, max_B);
    tp_.max_over_ranks(max_B);
    ops.raise_maximum(edges, max_B, sums);
    tp_.add_over_ranks(numbers.narrow(0, 2 * rows, 2 * rows + count));
    const at::Tensor series_2E = device_.allocate({2 * count}, at::kDouble);
    ops.score_edges(edges, raw_E, sums, series_2E.narrow(0, 0, count), series_2E.narrow(0, count, count));
    return {edges, begin, count, sums, series_2E};
  }
  at::Tensor series(const Block& block) const { return device_.to_host(block.series_2E); }

  // Turns the logits into their gradient; derivatives by log-prob, then by entropy, of the block's edges.
  void compute_gradient(const Block& block, std::vector<double> derivatives, const at::Tensor& logits_BV) const {
    const at::Tensor of_edges = device_.upload(std::move(derivatives));
    device_.operations().logit_gradients(block.edges, first_token_, block.sums, of_edges.narrow(0, 0, block.count),
                                         of_edges.narrow(0, block.count, block.count), logits_BV);
  }

 private:
  const HeadEdges& edges_;
  std::int64_t first_token_;
  Group& tp_;
  Device& device_;
};

void check_series(const HeadProblem& problem, std::span<const double> logprob, std::span<const double> entropy) {
  ESPALIER_INTERNAL_EQ(logprob.size(), problem.edges.size());
  ESPALIER_INTERNAL_EQ(entropy.size(), problem.edges.size());
}

}  // namespace

void HeadEdges::add_to(ControlBlock& block, std::span<const double> temperature, std::span<const HeadEdge> edges,
                       std::int64_t vocabulary) {
  std::vector<std::int32_t> targets;
  targets.reserve(edges.size());
  begin.reserve(temperature.size() + 1);
  for (const HeadEdge& edge : edges) {
    const auto row = static_cast<std::int64_t>(begin.size()) - 1,
               outputs = static_cast<std::int64_t>(temperature.size());
    ESPALIER_INTERNAL(edge.output >= row && edge.output < outputs && edge.target >= 0 && edge.target < vocabulary,
                      "edge from row ", edge.output, " to token ", edge.target, " after row ", row, "; ", outputs,
                      " rows, vocabulary ", vocabulary);
    begin.resize(static_cast<std::size_t>(edge.output) + 1, static_cast<std::int32_t>(targets.size()));
    targets.push_back(edge.target);
  }
  begin.resize(temperature.size() + 1, static_cast<std::int32_t>(targets.size()));
  block.add(temperature, temperature_O);
  block.add(begin, begin_O1);
  block.add(targets, target_E);
}

void for_each_logits(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
                     const LogitsFunction& visit, Arena& arena) {
  HeadPass pass(hidden_OM, weight_VM, part, nullptr, arena);
  pass.run([&](std::int64_t first, std::int64_t) { visit(first, pass.logits()); });
}

void head_forward(const HeadProblem& problem, std::span<double> logprob, std::span<double> entropy, Arena& arena) {
  check(problem, nullptr);
  check_series(problem, logprob, entropy);
  HeadPass pass(problem.hidden_OM, problem.weight_VM, problem.part, nullptr, arena);
  const EdgeNumbers numbers(problem, arena);
  std::vector<EdgeNumbers::Block> blocks;
  pass.run([&](std::int64_t first, std::int64_t rows) { blocks.push_back(numbers.score(first, rows, pass.logits())); });
  for (const EdgeNumbers::Block& block : blocks) {
    const auto count = static_cast<std::size_t>(block.count);
    const at::Tensor series = numbers.series(block);
    const auto values = host_values<const double>(series);
    std::ranges::copy(values.first(count), logprob.begin() + block.begin);
    std::ranges::copy(values.last(count), entropy.begin() + block.begin);
  }
}

void add_head_backward(const HeadProblem& problem, std::span<const double> grad_logprob,
                       std::span<const double> grad_entropy, const HeadGradients& out, Arena& arena) {
  check_series(problem, grad_logprob, grad_entropy);
  const auto recorded = [&](std::size_t first, std::span<const double> logprob, std::span<const double>,
                            std::span<double> by_logprob, std::span<double> by_entropy) {
    std::ranges::copy(grad_logprob.subspan(first, logprob.size()), by_logprob.begin());
    std::ranges::copy(grad_entropy.subspan(first, logprob.size()), by_entropy.begin());
  };
  add_head_forward_backward(problem, recorded, out, arena);
}

void add_head_forward_backward(const HeadProblem& problem, const HeadObjective& objective, const HeadGradients& out,
                               Arena& arena) {
  check(problem, &out);
  HeadPass pass(problem.hidden_OM, problem.weight_VM, problem.part, &out, arena);
  const EdgeNumbers numbers(problem, arena);
  pass.run([&](std::int64_t first, std::int64_t rows) {
    const EdgeNumbers::Block block = numbers.score(first, rows, pass.logits());
    const at::Tensor series = numbers.series(block);
    const auto values = host_values<const double>(series);
    const auto count = static_cast<std::size_t>(block.count);
    std::vector<double> derivatives(2 * count);
    objective(static_cast<std::size_t>(block.begin), values.first(count), values.last(count),
              std::span(derivatives).first(count), std::span(derivatives).last(count));
    numbers.compute_gradient(block, std::move(derivatives), pass.logits());
    pass.add_gradients();
  });
}

}  // namespace espalier
