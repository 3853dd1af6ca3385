// The head block by block of rows: logits of a block, what the objective wants of them, their gradient in place, and
// the two products that carry it on. Equations: fused_head.h.
//
// Products. float32 and float64: as they are. bfloat16: hidden rows and a run of weight rows are widened to float32
// first and everything is then float32, so logits and gradients are as accurate as float32 sums of exact bfloat16
// products; rounding the logits themselves to bfloat16 would cost two decimal digits of every log-prob. Widening the
// weights costs one multiplication's worth in `rows of the block`.
// The gradient of a raw logit already holds 1 / temperature, so both products can use it.
#include "espalier/objective/fused_head.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/held_buffers.h"
#include "espalier/device/host_values.h"
#include "espalier/device/scalar_type.h"
#include "espalier/objective/head_buffers.h"
#include "espalier/ops/operations.h"

namespace espalier {

namespace {

class HeadPass {
 public:
  // `out` is null in forward-only passes.
  HeadPass(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
           const HeadGradients* out, Arena& arena);

  // Rows [first, first + rows) and their logits.
  struct Block {
    std::int64_t first, rows;
    at::Tensor logits_BV, hidden_BM;
  };
  // The logits of every block in turn, which are gone when the next one is visited.
  template <class Visit>
  void run(Visit visit);
  // True if a block's logits may be computed while the logits of the block before are in use.
  bool has_two_rooms() const { return declared_.has_two(); }
  std::int64_t outputs() const { return outputs_; }
  // Logits of the block that begins at row `first`; the block before loses its logits unless there are two rooms.
  Block logits_from(std::int64_t first);
  // From the logits' gradient, which stands in their place now: overwrites the hidden rows', adds to the weights'.
  void add_gradients(const Block& block);

 private:
  // Rows of this rank's columns, in a buffer that is that of the largest part of the vocabulary.
  at::Tensor rows_of(BufferList::Place buffer_BV, std::int64_t rows) {
    return held_[buffer_BV].view({-1}).narrow(0, 0, rows * vocabulary_).view({rows, vocabulary_});
  }
  // The products of low rank of a block, whose logits hold the result of the product or its gradient.
  void add_low_rank(const Block& block);
  void add_low_rank_gradients(const Block& block, const at::Tensor& grad_hidden_BM);
  at::Tensor low_rank_rows(const Block& block);
  // Calls with a run of weight rows in the accumulator type: body(begin, weights, the logits' columns).
  template <class Body>
  void for_each_weight_run(const at::Tensor& logits_BV, Body body);

  const at::Tensor hidden_OM_, weight_VM_;
  Group& tp_;
  const LogitShape shape_;
  LowRank low_rank_;  // in the accumulator type
  const HeadGradients* out_;
  const Operations& ops_;
  std::int64_t outputs_, vocabulary_, width_;
  // For the largest block; smaller blocks use the first rows. All but the logits exist for bfloat16 only.
  HeadBuffers declared_;
  HeldBuffers held_;
};

HeadPass::HeadPass(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
                   const HeadGradients* out, Arena& arena)
    : hidden_OM_(hidden_OM),
      weight_VM_(weight_VM),
      tp_(part.tp),
      shape_(part.logits),
      low_rank_(part.low_rank),
      out_(out),
      ops_(arena.device().operations()),
      outputs_(hidden_OM.size(0)),
      vocabulary_(weight_VM.size(0)),
      width_(weight_VM.size(1)),
      declared_(element_bytes(hidden_OM.scalar_type()), outputs_, std::max(vocabulary_, part.largest), width_,
                out != nullptr,
                {.ahead = !arena.device().in_host_memory(),
                 .writes_sums = ops_.writes_sums,
                 .rank = low_rank_.defined() ? low_rank_.a_rK.size(0) : 0}),
      held_(arena, declared_, hidden_OM.scalar_type()) {
  held_.enter(0);
  if (outputs_ == 0 || declared_.low_rank_a_rM.index < 0) return;
  const at::Tensor wide_a = held_[declared_.low_rank_a_rM],
                   wide_b = held_[declared_.low_rank_b_Vr].narrow(0, 0, vocabulary_);
  ops_.convert(low_rank_.a_rK, wide_a);
  ops_.convert(low_rank_.b_Nr, wide_b);
  low_rank_.a_rK = wide_a, low_rank_.b_Nr = wide_b;
}

at::Tensor HeadPass::low_rank_rows(const Block& block) {
  if (declared_.low_rank_hidden_BM.index < 0) return block.hidden_BM;
  const at::Tensor wide = held_[declared_.low_rank_hidden_BM].narrow(0, 0, block.rows);
  ops_.convert(hidden_OM_.narrow(0, block.first, block.rows), wide);
  return wide;
}

void HeadPass::add_low_rank(const Block& block) {
  if (!low_rank_.defined()) return;
  const LowRankProducts products(ops_, ops_.scale);
  products.add(block.logits_BV, low_rank_rows(block), low_rank_, held_[declared_.low_rank_Br].narrow(0, 0, block.rows));
}

void HeadPass::add_low_rank_gradients(const Block& block, const at::Tensor& grad_hidden_BM) {
  if (!low_rank_.defined()) return;
  const LowRankProducts products(ops_, ops_.scale);
  const at::Tensor room = held_[declared_.low_rank_Br].narrow(0, 0, block.rows);
  products.add_grad_input(grad_hidden_BM, block.logits_BV, low_rank_, room);
  if (out_->low_rank.defined())
    products.add_grad_weight(out_->low_rank, block.logits_BV, low_rank_rows(block), low_rank_, room, at::Tensor());
}

template <class Body>
void HeadPass::for_each_weight_run(const at::Tensor& logits_BV, Body body) {
  for (std::int64_t begin = 0; begin < vocabulary_; begin += declared_.vocabulary_run) {
    const std::int64_t count = std::min(declared_.vocabulary_run, vocabulary_ - begin);
    const at::Tensor weights = held_[declared_.weight_run_NM].narrow(0, 0, count);
    ops_.convert(weight_VM_.narrow(0, begin, count), weights);
    body(begin, weights, logits_BV.narrow(1, begin, count));
  }
}

HeadPass::Block HeadPass::logits_from(std::int64_t first) {
  const std::int64_t rows = std::min(declared_.block_rows, outputs_ - first);
  const auto room = declared_.rooms[has_two_rooms() ? static_cast<std::size_t>(first / declared_.block_rows % 2) : 0];
  Block block{first, rows, rows_of(room.logits_BV, rows), hidden_OM_.narrow(0, first, rows)};
  if (!declared_.widens()) {
    ops_.linear(block.logits_BV, block.hidden_BM, weight_VM_, at::Tensor());
    add_low_rank(block);
    if (!shape_.is_plain()) ops_.shape_logits(shape_, block.logits_BV);
    return block;
  }
  const at::Tensor wide = held_[room.hidden_BM].narrow(0, 0, rows);
  ops_.convert(block.hidden_BM, wide);
  block.hidden_BM = wide;
  for_each_weight_run(block.logits_BV, [&](std::int64_t, const at::Tensor& weights, const at::Tensor& columns) {
    ops_.linear(columns, block.hidden_BM, weights, at::Tensor());
  });
  add_low_rank(block);
  if (!shape_.is_plain()) ops_.shape_logits(shape_, block.logits_BV);
  return block;
}

void HeadPass::add_gradients(const Block& block) {
  const at::Tensor grad_hidden = out_->grad_hidden_OM.narrow(0, block.first, block.rows);
  const bool summed_apart = declared_.narrows() || declared_.widens();
  const at::Tensor sum = summed_apart ? held_[declared_.grad_hidden_BM].narrow(0, 0, block.rows) : grad_hidden;
  at::Tensor grad_logits = block.logits_BV;
  if (declared_.narrows()) {
    grad_logits = rows_of(declared_.grad_logits_BV, block.rows);
    ops_.convert(block.logits_BV, grad_logits);
  }
  if (declared_.widens())
    for_each_weight_run(grad_logits, [&](std::int64_t begin, const at::Tensor& weights, const at::Tensor& columns) {
      begin == 0 ? ops_.linear_grad_input(sum, columns, weights) : ops_.add_linear_grad_input(sum, columns, weights);
    });
  else
    ops_.linear_grad_input(sum, grad_logits, weight_VM_);
  add_low_rank_gradients(block, sum);
  tp_.add_over_ranks(sum);
  if (summed_apart) ops_.convert(sum, grad_hidden);
  if (out_->grad_weight_VM.defined())
    ops_.add_linear_grad_weight(out_->grad_weight_VM, at::Tensor(), grad_logits, block.hidden_BM, at::Tensor());
}

template <class Visit>
void HeadPass::run(Visit visit) {
  for (std::int64_t first = 0; first < outputs_; first += declared_.block_rows) visit(logits_from(first));
}

void check(const HeadProblem& problem, const HeadGradients* out) {
  const at::Tensor &hidden = problem.hidden_OM, &weight = problem.weight_VM;
  const at::ScalarType dtype = hidden.scalar_type();
  ESPALIER_INTERNAL(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16, "hidden of dtype ",
                    c10::toString(dtype));
  const bool narrow = weight.scalar_type() == at::kBFloat16 && dtype == at::kFloat;
  ESPALIER_INTERNAL((weight.scalar_type() == dtype || narrow) && hidden.size(1) == weight.size(1) &&
                        hidden.is_contiguous() && weight.is_contiguous() && weight.size(0) > 0,
                    "hidden ", hidden.sizes(), ", weight ", weight.sizes());
  ESPALIER_INTERNAL_EQ(problem.edges.outputs(), hidden.size(0));
  if (!out) return;
  ESPALIER_INTERNAL(out->grad_hidden_OM.sizes() == hidden.sizes() && out->grad_hidden_OM.scalar_type() == dtype &&
                        out->grad_hidden_OM.is_contiguous(),
                    "grad_hidden ", out->grad_hidden_OM.sizes());
  if (!out->grad_weight_VM.defined()) return;
  ESPALIER_INTERNAL(
      out->grad_weight_VM.sizes() == weight.sizes() && out->grad_weight_VM.scalar_type() == accumulator_type(dtype),
      "grad_weight ", out->grad_weight_VM.sizes());
}

// The edges of a head on the device, block by block, and their numbers.
class EdgeNumbers {
 public:
  EdgeNumbers(const HeadEdges& edges, const VocabularyPart& part, Device& device)
      : edges_(edges), first_token_(part.first), tp_(part.tp), shape_(part.logits), device_(device) {}

  // The edges of a block's rows.
  struct Block {
    HeadEdges::OfRows edges;
    LogitSums sums;
    at::Tensor series_2E;  // log-probs, then entropies
  };
  Block score(std::int64_t first_row, const at::Tensor& logits_BV) const {
    const HeadEdges::OfRows edges =
        edges_.of_rows(first_row, logits_BV.size(0), first_token_, logits_BV.size(1), shape_, device_);
    const std::int64_t D = edges.distributions, count = edges.count;
    // The maximum over all ranks; then this rank's numbers, the last three to be summed over ranks in one call.
    const at::Tensor numbers = device_.allocate({4 * D + count}, at::kDouble), max_D = numbers.narrow(0, 0, D);
    const LogitSums sums{numbers.narrow(0, D, D), numbers.narrow(0, 2 * D, D), numbers.narrow(0, 3 * D, D)};
    const at::Tensor raw_E = numbers.narrow(0, 4 * D, count);
    const Operations& ops = device_.operations();
    ops.logit_sums(edges.block, first_token_, logits_BV, sums, raw_E);
    ops.convert(sums.max_D, max_D);
    tp_.max_over_ranks(max_D);
    ops.raise_maximum(edges.block, max_D, sums);
    tp_.add_over_ranks(numbers.narrow(0, 2 * D, 2 * D + count));
    const at::Tensor series_2E = device_.allocate({2 * count}, at::kDouble);
    ops.score_edges(edges.block, raw_E, sums, series_2E.narrow(0, 0, count), series_2E.narrow(0, count, count));
    return {edges, sums, series_2E};
  }
  Device::Coming start_series(const Block& block) const { return device_.start_to_host(block.series_2E); }
  at::Tensor series(const Device::Coming& coming) const { return device_.arrived(coming); }

  // Turns the logits into their gradient; derivatives by log-prob, then by entropy, of the block's edges.
  void compute_gradient(const Block& block, std::vector<double> derivatives, const at::Tensor& logits_BV) const {
    const at::Tensor of_edges = device_.upload(std::move(derivatives));
    const std::int64_t count = block.edges.count;
    device_.operations().logit_gradients(block.edges.block, first_token_, block.sums, of_edges.narrow(0, 0, count),
                                         of_edges.narrow(0, count, count), logits_BV);
  }

 private:
  const HeadEdges& edges_;
  std::int64_t first_token_;
  Group& tp_;
  LogitShape shape_;
  Device& device_;
};

void check_series(const HeadProblem& problem, std::span<const double> logprob, std::span<const double> entropy) {
  ESPALIER_INTERNAL_EQ(logprob.size(), problem.edges.size());
  ESPALIER_INTERNAL_EQ(entropy.size(), problem.edges.size());
}

}  // namespace

void HeadEdges::add_to(ControlBlock& block, std::span<const double> temperature_O, std::span<const HeadEdge> edges,
                       std::int64_t vocabulary) {
  const auto outputs = static_cast<std::int64_t>(temperature_O.size());
  const bool has_sets = std::ranges::any_of(edges, [](const HeadEdge& edge) { return !edge.kept.empty(); });
  std::vector<std::int32_t> targets, begin_of_sets;
  std::vector<double> temperature_of_sets;
  targets.reserve(edges.size());
  begin_.reserve(temperature_O.size() + 1);
  if (has_sets) first_.push_back(0);
  const auto begin_row = [&](std::int64_t row) {
    begin_.resize(static_cast<std::size_t>(row) + 1, static_cast<std::int32_t>(targets.size()));
    if (has_sets) first_.resize(static_cast<std::size_t>(row) + 1, static_cast<std::int32_t>(kept_.size()));
  };
  for (const HeadEdge& edge : edges) {
    const std::int64_t row = this->outputs();
    ESPALIER_INTERNAL(edge.output >= row && edge.output < outputs && edge.target >= 0 && edge.target < vocabulary,
                      "edge from row ", edge.output, " to token ", edge.target, " after row ", row, "; ", outputs,
                      " rows, vocabulary ", vocabulary);
    begin_row(edge.output);
    const bool is_first = targets.size() == size();
    ESPALIER_INTERNAL(is_first || !edge.kept.empty() || !has_sets || kept_.back().empty(), "edges of row ", row,
                      " over a kept set before those over the whole vocabulary");
    if (has_sets && (is_first || !std::ranges::equal(kept_.back(), edge.kept))) {
      kept_.push_back(edge.kept);
      begin_of_sets.push_back(static_cast<std::int32_t>(targets.size()));
      temperature_of_sets.push_back(temperature_O[static_cast<std::size_t>(edge.output)]);
    }
    targets.push_back(edge.target);
  }
  begin_row(outputs);
  if (has_sets) begin_of_sets.push_back(begin_.back());
  block.add(has_sets ? std::span<const double>(temperature_of_sets) : temperature_O, temperature_D);
  block.add(has_sets ? begin_of_sets : begin_, begin_D1);
  block.add(targets, target_E);
}

HeadEdges::OfRows HeadEdges::of_rows(std::int64_t first_row, std::int64_t rows, std::int64_t first_token,
                                     std::int64_t columns, const LogitShape& shape, Device& device) const {
  const auto from = static_cast<std::size_t>(first_row), to = static_cast<std::size_t>(first_row + rows);
  const std::int64_t begin = begin_[from], count = begin_[to] - begin;
  const std::int64_t first = first_.empty() ? first_row : first_[from];
  const std::int64_t D = first_.empty() ? rows : first_[to] - first;
  OfRows out{begin, count, D,
             EdgeBlock{temperature_D.narrow(0, first, D), begin_D1.narrow(0, first, D + 1),
                       target_E.narrow(0, begin, count), shape}};
  if (!first_.empty()) out.block.kept = sets_of(from, to, first_token, columns, device);
  return out;
}

KeptBlock HeadEdges::sets_of(std::size_t from, std::size_t to, std::int64_t first_token, std::int64_t columns,
                             Device& device) const {
  std::vector<std::int32_t> first, row, begin, end, column;
  std::size_t ids = 0;
  for (std::int32_t d = first_[from]; d < first_[to]; ++d) ids += kept_[static_cast<std::size_t>(d)].size();
  column.reserve(ids);
  for (std::size_t o = from; o < to; ++o) {
    first.push_back(static_cast<std::int32_t>(row.size()));
    for (std::int32_t d = first_[o]; d < first_[o + 1]; ++d) {
      const auto kept = kept_[static_cast<std::size_t>(d)];
      row.push_back(static_cast<std::int32_t>(o - from));
      begin.push_back(static_cast<std::int32_t>(column.size()));
      const auto here = std::ranges::lower_bound(kept, first_token),
                 behind = std::ranges::lower_bound(kept, first_token + columns);
      for (auto id = here; id != behind; ++id) column.push_back(static_cast<std::int32_t>(*id - first_token));
      end.push_back(kept.empty() ? -1 : static_cast<std::int32_t>(column.size()));
    }
  }
  first.push_back(static_cast<std::int32_t>(row.size()));
  ESPALIER_INTERNAL(column.size() < std::size_t{1} << 31, column.size(), " kept tokens in a block of logits");
  KeptBlock out;
  ControlBlock block;
  block.add(row, out.row_D);
  block.add(begin, out.begin_D);
  block.add(end, out.end_D);
  block.add(column, out.column_Z);
  block.add(first, out.first_B1);
  block.hand_over(device);
  return out;
}

void for_each_logits(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const VocabularyPart& part,
                     const LogitsFunction& visit, Arena& arena) {
  HeadPass pass(hidden_OM, weight_VM, part, nullptr, arena);
  pass.run([&](const HeadPass::Block& block) { visit(block.first, block.logits_BV); });
}

std::vector<double> logprobs_of_logits(const at::Tensor& logits_BV, const HeadEdges& edges, std::int64_t first_row,
                                       Device& device) {
  const EdgeNumbers numbers(edges, {}, device);
  const EdgeNumbers::Block block = numbers.score(first_row, logits_BV);
  const at::Tensor series = numbers.series(numbers.start_series(block));
  const auto logprobs = host_values<const double>(series).first(static_cast<std::size_t>(block.edges.count));
  return {logprobs.begin(), logprobs.end()};
}

void head_forward(const HeadProblem& problem, std::span<double> logprob, std::span<double> entropy, Arena& arena) {
  check(problem, nullptr);
  check_series(problem, logprob, entropy);
  HeadPass pass(problem.hidden_OM, problem.weight_VM, problem.part, nullptr, arena);
  const EdgeNumbers numbers(problem.edges, problem.part, arena.device());
  std::vector<EdgeNumbers::Block> blocks;
  pass.run([&](const HeadPass::Block& block) {
    blocks.push_back(numbers.score(block.first, block.logits_BV));
    blocks.back().edges.block = {};  // kept sets may be large
  });
  for (const EdgeNumbers::Block& block : blocks) {
    const auto count = static_cast<std::size_t>(block.edges.count);
    const at::Tensor series = numbers.series(numbers.start_series(block));
    const auto values = host_values<const double>(series);
    std::ranges::copy(values.first(count), logprob.begin() + block.edges.begin);
    std::ranges::copy(values.last(count), entropy.begin() + block.edges.begin);
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
  const EdgeNumbers numbers(problem.edges, problem.part, arena.device());
  struct Scored {
    HeadPass::Block block;
    EdgeNumbers::Block edges;
    Device::Coming series;
  };
  const auto scored_from = [&](std::int64_t first) {
    const HeadPass::Block block = pass.logits_from(first);
    const EdgeNumbers::Block edges = numbers.score(block.first, block.logits_BV);
    return Scored{block, edges, numbers.start_series(edges)};
  };
  std::optional<Scored> next;
  for (std::int64_t first = 0; first < pass.outputs();) {
    const Scored here = next ? *std::exchange(next, std::nullopt) : scored_from(first);
    first += here.block.rows;
    // The device goes on with the next block while the host waits for this one's log-probs and has them.
    if (pass.has_two_rooms() && first < pass.outputs()) next = scored_from(first);
    const at::Tensor series = numbers.series(here.series);
    const auto values = host_values<const double>(series);
    const auto count = static_cast<std::size_t>(here.edges.edges.count);
    std::vector<double> derivatives(2 * count);
    objective(static_cast<std::size_t>(here.edges.edges.begin), values.first(count), values.last(count),
              std::span(derivatives).first(count), std::span(derivatives).last(count));
    numbers.compute_gradient(here.edges, std::move(derivatives), here.block.logits_BV);
    pass.add_gradients(here.block);
  }
}

}  // namespace espalier
