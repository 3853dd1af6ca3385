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
#include <vector>

#include "espalier/base/error.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/head_kernels.h"

namespace espalier {

namespace {

constexpr std::int64_t kBlockRows = 256;
constexpr std::int64_t kBlockBytes = std::int64_t{64} << 20;    // of logits
constexpr std::int64_t kWidenedBytes = std::int64_t{16} << 20;  // of weights held in float32 at once

// How many rows have logits at once, and how many vocabulary rows are widened at once (all, where none need it).
struct Extent {
  std::int64_t rows = 0, vocabulary_run = 0;

  Extent(std::int64_t outputs, std::int64_t vocabulary, std::int64_t width, at::ScalarType dtype) {
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(accumulator_type(dtype)));
    rows = std::min(outputs, std::clamp<std::int64_t>(kBlockBytes / (vocabulary * bytes), 1, kBlockRows));
    vocabulary_run = dtype == at::kBFloat16
                         ? std::min(vocabulary, std::max<std::int64_t>(1, kWidenedBytes / (width * bytes)))
                         : vocabulary;
  }
};

class HeadPass {
 public:
  HeadPass(const HeadProblem& problem, const HeadGradients* out, Arena& arena);

  // Every block in turn. `logprob` and `entropy` are overwritten where not empty; `gradient` is asked where there are
  // gradients to write.
  void run(const EdgeGradientFunction& gradient, std::span<double> logprob, std::span<double> entropy);
  // The logits of every block in turn, nothing else.
  void run_logits(const LogitsFunction& visit);

 private:
  void check() const;
  void compute_logits();
  template <class T>
  void compute_sums();
  template <class T>
  void visit_edges(const EdgeGradientFunction& gradient, std::span<double> logprob, std::span<double> entropy);
  template <class T>
  void compute_logit_gradients();
  void add_gradients();
  template <class T>
  void run_block(const EdgeGradientFunction& gradient, std::span<double> logprob, std::span<double> entropy);

  const HeadProblem& problem_;
  const HeadGradients* out_;
  std::int64_t outputs_, vocabulary_, width_;
  bool widens_;
  Extent extent_;
  // Buffers for the largest block; those of a block are their first rows. The last three exist for bfloat16 only.
  at::Tensor logits_, hidden_, grad_hidden_, weight_run_;

  // The block in work: rows [first_row_, first_row_ + rows_), and where the edges of each row begin.
  std::int64_t first_row_ = 0, rows_ = 0;
  std::vector<std::size_t> edge_begin_;
  std::vector<HeadRowSums> sums_;
  std::vector<HeadEdgeGradient> edge_gradient_;
  at::Tensor block_logits_, block_hidden_;
};

HeadPass::HeadPass(const HeadProblem& problem, const HeadGradients* out, Arena& arena)
    : problem_(problem),
      out_(out),
      outputs_(problem.hidden_OM.size(0)),
      vocabulary_(problem.weight_VM.size(0)),
      width_(problem.weight_VM.size(1)),
      widens_(problem.hidden_OM.scalar_type() == at::kBFloat16),
      extent_(outputs_, vocabulary_, width_, problem.hidden_OM.scalar_type()) {
  check();
  if (outputs_ == 0) return;
  const at::ScalarType accumulator = accumulator_type(problem.hidden_OM.scalar_type());
  logits_ = arena.take({extent_.rows, vocabulary_}, accumulator);
  if (!widens_) return;
  weight_run_ = arena.take({extent_.vocabulary_run, width_}, accumulator);
  hidden_ = arena.take({extent_.rows, width_}, accumulator);
  if (out_) grad_hidden_ = arena.take({extent_.rows, width_}, accumulator);
}

void HeadPass::check() const {
  const at::ScalarType dtype = problem_.hidden_OM.scalar_type();
  ESPALIER_INTERNAL(dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16, "hidden of dtype ",
                    c10::toString(dtype));
  ESPALIER_INTERNAL(problem_.weight_VM.scalar_type() == dtype && problem_.hidden_OM.size(1) == width_ &&
                        problem_.hidden_OM.is_contiguous() && problem_.weight_VM.is_contiguous() && vocabulary_ > 0,
                    "hidden ", problem_.hidden_OM.sizes(), ", weight ", problem_.weight_VM.sizes());
  ESPALIER_INTERNAL_EQ(static_cast<std::int64_t>(problem_.temperature.size()), outputs_);
  std::int32_t last = 0;
  for (const HeadEdge& edge : problem_.edges) {
    ESPALIER_INTERNAL(edge.output >= last && edge.output < outputs_ && edge.target >= 0 && edge.target < vocabulary_,
                      "edge from row ", edge.output, " to token ", edge.target, " after row ", last, "; ", outputs_,
                      " rows, vocabulary ", vocabulary_);
    last = edge.output;
  }
  if (!out_) return;
  ESPALIER_INTERNAL(out_->grad_hidden_OM.sizes() == problem_.hidden_OM.sizes() &&
                        out_->grad_hidden_OM.scalar_type() == dtype && out_->grad_hidden_OM.is_contiguous(),
                    "grad_hidden ", out_->grad_hidden_OM.sizes());
  ESPALIER_INTERNAL(out_->grad_weight_VM.sizes() == problem_.weight_VM.sizes() &&
                        out_->grad_weight_VM.scalar_type() == accumulator_type(dtype),
                    "grad_weight ", out_->grad_weight_VM.sizes());
}

void HeadPass::compute_logits() {
  block_hidden_ = problem_.hidden_OM.narrow(0, first_row_, rows_);
  block_logits_ = logits_.narrow(0, 0, rows_);
  if (!widens_) {
    at::mm_out(block_logits_, block_hidden_, problem_.weight_VM.t());
    return;
  }
  block_hidden_ = hidden_.narrow(0, 0, rows_).copy_(block_hidden_);
  for (std::int64_t begin = 0; begin < vocabulary_; begin += extent_.vocabulary_run) {
    const std::int64_t count = std::min(extent_.vocabulary_run, vocabulary_ - begin);
    const at::Tensor weights = weight_run_.narrow(0, 0, count).copy_(problem_.weight_VM.narrow(0, begin, count));
    at::Tensor columns = block_logits_.narrow(1, begin, count);
    at::mm_out(columns, block_hidden_, weights.t());
  }
}

template <class T>
void HeadPass::compute_sums() {
  const T* logits = block_logits_.const_data_ptr<T>();
#pragma omp parallel for schedule(static) if (rows_ * vocabulary_ >= kParallelLogits)
  for (std::int64_t row = 0; row < rows_; ++row)
    sums_[row] =
        compute_row_sums(logits + row * vocabulary_, vocabulary_, 1.0 / problem_.temperature[first_row_ + row]);
}

template <class T>
void HeadPass::visit_edges(const EdgeGradientFunction& gradient, std::span<double> logprob, std::span<double> entropy) {
  const T* logits = block_logits_.const_data_ptr<T>();
  edge_gradient_.clear();
  for (std::int64_t row = 0; row < rows_; ++row) {
    const double inverse = 1.0 / problem_.temperature[first_row_ + row];
    for (std::size_t e = edge_begin_[row]; e < edge_begin_[row + 1]; ++e) {
      const double raw = static_cast<double>(logits[row * vocabulary_ + problem_.edges[e].target]);
      const double value = token_logprob(raw, inverse, sums_[row]);
      if (!logprob.empty()) logprob[e] = value;
      if (!entropy.empty()) entropy[e] = sums_[row].entropy;
      if (out_) edge_gradient_.push_back(gradient(static_cast<std::int64_t>(e), value, sums_[row].entropy));
    }
  }
}

template <class T>
void HeadPass::compute_logit_gradients() {
  T* logits = block_logits_.mutable_data_ptr<T>();
#pragma omp parallel for schedule(static) if (rows_ * vocabulary_ >= kParallelLogits)
  for (std::int64_t row = 0; row < rows_; ++row) {
    T* raw = logits + row * vocabulary_;
    const double inverse = 1.0 / problem_.temperature[first_row_ + row];
    HeadEdgeGradient total;
    for (std::size_t e = edge_begin_[row]; e < edge_begin_[row + 1]; ++e) {
      total.logprob += edge_gradient_[e - edge_begin_[0]].logprob;
      total.entropy += edge_gradient_[e - edge_begin_[0]].entropy;
    }
    compute_row_gradient(raw, vocabulary_, inverse, sums_[row], total.logprob, total.entropy);
    for (std::size_t e = edge_begin_[row]; e < edge_begin_[row + 1]; ++e)
      raw[problem_.edges[e].target] += static_cast<T>(edge_gradient_[e - edge_begin_[0]].logprob * inverse);
  }
}

void HeadPass::add_gradients() {
  at::Tensor grad_hidden = out_->grad_hidden_OM.narrow(0, first_row_, rows_);
  if (!widens_) {
    at::mm_out(grad_hidden, block_logits_, problem_.weight_VM);
  } else {
    at::Tensor sum = grad_hidden_.narrow(0, 0, rows_);
    for (std::int64_t begin = 0; begin < vocabulary_; begin += extent_.vocabulary_run) {
      const std::int64_t count = std::min(extent_.vocabulary_run, vocabulary_ - begin);
      const at::Tensor weights = weight_run_.narrow(0, 0, count).copy_(problem_.weight_VM.narrow(0, begin, count));
      const at::Tensor columns = block_logits_.narrow(1, begin, count);
      if (begin == 0)
        at::mm_out(sum, columns, weights);
      else
        sum.addmm_(columns, weights);
    }
    grad_hidden.copy_(sum);
  }
  out_->grad_weight_VM.addmm_(block_logits_.t(), block_hidden_);
}

template <class T>
void HeadPass::run_block(const EdgeGradientFunction& gradient, std::span<double> logprob, std::span<double> entropy) {
  compute_sums<T>();
  visit_edges<T>(gradient, logprob, entropy);
  if (!out_) return;
  compute_logit_gradients<T>();
  add_gradients();
}

void HeadPass::run(const EdgeGradientFunction& gradient, std::span<double> logprob, std::span<double> entropy) {
  std::size_t edge = 0;
  sums_.resize(extent_.rows);
  for (first_row_ = 0; first_row_ < outputs_; first_row_ += extent_.rows) {
    rows_ = std::min(extent_.rows, outputs_ - first_row_);
    edge_begin_.assign(1, edge);
    for (std::int64_t row = first_row_; row < first_row_ + rows_; ++row) {
      while (edge < problem_.edges.size() && problem_.edges[edge].output == row) ++edge;
      edge_begin_.push_back(edge);
    }
    compute_logits();
    if (logits_.scalar_type() == at::kDouble)
      run_block<double>(gradient, logprob, entropy);
    else
      run_block<float>(gradient, logprob, entropy);
  }
}

void HeadPass::run_logits(const LogitsFunction& visit) {
  for (first_row_ = 0; first_row_ < outputs_; first_row_ += extent_.rows) {
    rows_ = std::min(extent_.rows, outputs_ - first_row_);
    compute_logits();
    visit(first_row_, block_logits_);
  }
}

void check_series(const HeadProblem& problem, std::span<const double> logprob, std::span<const double> entropy) {
  ESPALIER_INTERNAL_EQ(logprob.size(), problem.edges.size());
  ESPALIER_INTERNAL_EQ(entropy.size(), problem.edges.size());
}

}  // namespace

std::int64_t head_scratch_bytes(std::int64_t outputs, std::int64_t vocabulary, std::int64_t width,
                                at::ScalarType dtype) {
  if (outputs == 0) return 0;
  const Extent extent(outputs, vocabulary, width, dtype);
  const auto taken = [&](std::int64_t rows, std::int64_t columns) {
    return Arena::bytes_taken(rows * columns * static_cast<std::int64_t>(c10::elementSize(accumulator_type(dtype))));
  };
  std::int64_t total = taken(extent.rows, vocabulary);
  if (dtype == at::kBFloat16) total += taken(extent.vocabulary_run, width) + 2 * taken(extent.rows, width);
  return total;
}

void for_each_logits(const at::Tensor& hidden_OM, const at::Tensor& weight_VM, const LogitsFunction& visit,
                     Arena& arena) {
  const ArenaScope scope(arena);
  const std::vector<double> unused(static_cast<std::size_t>(hidden_OM.size(0)), 1.0);
  HeadPass({hidden_OM, weight_VM, unused, {}}, nullptr, arena).run_logits(visit);
}

void head_forward(const HeadProblem& problem, std::span<double> logprob, std::span<double> entropy, Arena& arena) {
  check_series(problem, logprob, entropy);
  const ArenaScope scope(arena);
  HeadPass(problem, nullptr, arena).run({}, logprob, entropy);
}

void head_backward(const HeadProblem& problem, std::span<const double> grad_logprob,
                   std::span<const double> grad_entropy, const HeadGradients& out, Arena& arena) {
  check_series(problem, grad_logprob, grad_entropy);
  const ArenaScope scope(arena);
  const auto recorded = [&](std::int64_t edge, double, double) {
    return HeadEdgeGradient{grad_logprob[edge], grad_entropy[edge]};
  };
  HeadPass(problem, &out, arena).run(recorded, {}, {});
}

void head_forward_backward(const HeadProblem& problem, const EdgeGradientFunction& gradient, std::span<double> logprob,
                           std::span<double> entropy, const HeadGradients& out, Arena& arena) {
  check_series(problem, logprob, entropy);
  const ArenaScope scope(arena);
  HeadPass(problem, &out, arena).run(gradient, logprob, entropy);
}

}  // namespace espalier
