// The arena of the decoder, in numbers.
#include "espalier/plan/memory_model.h"

#include <algorithm>

#include "espalier/base/instruction_set.h"

namespace espalier {
namespace {

// Measured (bench/memory_sweep.py) at widths of 64 to 1,024, vocabularies of 500 to 150,000, up to 16,384 rows, every
// dtype, one thread and two; met within 8 MiB, and rather above. Program, libraries and heap before any model; in
// bfloat16 also the code that the matrix library writes for its products.
constexpr std::int64_t kProcessBytes = 130 << 20, kBfloat16CodeBytes = 13 << 20;
// Of a GPU: its context, the libraries' code and the matrix library's workspace. Round, not measured.
constexpr std::int64_t kCudaBytes = std::int64_t{1} << 30;
// The matrix library packs a product's weight (bfloat16 as float32) up to a limit; attention takes about 4 MiB at most.
constexpr std::int64_t kMostPackedBytes = 16 << 20, kMostPackedElements = 2 << 20;
constexpr std::int64_t kWidenedPanelBytes = 12 << 20;  // ops/cpu/widened_products.cpp
constexpr std::int64_t kMostAttentionBytes = 4 << 20, kAttentionBytesPerRow = 2 << 10;

// The head's block of logits: objective/fused_head.cpp.
constexpr std::int64_t kBlockRows = 256, kBlockBytes = std::int64_t{64} << 20, kWidenedBytes = std::int64_t{16} << 20;

}  // namespace

std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype) {
  return 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_of(dtype);
}

ActivationBytes::ActivationBytes(const ModelShape& shape, DType dtype, const StepKind& kind)
    : shape_(shape),
      kind_(kind),
      b_(bytes_of(dtype)),
      a_(dtype == DType::float64 ? 8 : 4),
      widens_(b_ == 2 && !kind.cuda && bfloat16_products() == Bfloat16Products::converted),
      q_width_(shape.heads * shape.head_dim),
      kv_width_(shape.kv_heads * shape.head_dim) {
  const auto experts = [&](std::int64_t layer) {
    return !shape.expert_layer.empty() && shape.expert_layer[layer] != 0;
  };
  last_has_experts_ = shape.layers > 0 && experts(shape.layers - 1);
  last_is_narrow_ = !(kind.all_routed && last_has_experts_);
  std::int64_t of_kind[2] = {0, 0};
  for (std::int64_t layer = 0; layer < shape.layers - (last_is_narrow_ ? 1 : 0); ++layer) {
    ++of_kind[experts(layer)];
    std::erase_if(full_kinds_, [&](const FullKind& kind_before) { return kind_before.experts == experts(layer); });
    full_kinds_.push_back({experts(layer), of_kind[0], of_kind[1]});
  }
}

std::int64_t ActivationBytes::model() const {
  std::int64_t per_parameter = b_;
  if (kind_.gradients) per_parameter += a_;
  if (kind_.optimizer) per_parameter += 2 * a_ + (b_ == 2 ? 4 : 0);
  return shape_.parameters() * per_parameter;
}

std::int64_t ActivationBytes::constant() const {
  const std::int64_t process = kind_.cuda ? kCudaBytes : kProcessBytes + (b_ == 2 ? kBfloat16CodeBytes : 0);
  return process + kind_.beside_bytes + model();
}

std::int64_t ActivationBytes::scratch(std::int64_t rows) const {
  if (kind_.cuda) return tensor(rows, q_width_, 4);  // attention's backward sums dL/dq in float32
  const std::int64_t widest =
      std::max({shape_.value_head ? 1 : shape_.vocabulary, q_width_, 2 * shape_.inner, 2 * shape_.expert_inner});
  const std::int64_t panels = std::min(kWidenedPanelBytes, (shape_.hidden * widest + rows * 2 * widest) * a_);
  return std::min(kMostPackedBytes + kMostPackedElements * b_, shape_.hidden * widest * a_) + (widens_ ? panels : 0) +
         std::min(kMostAttentionBytes, rows * kAttentionBytesPerRow);
}

std::int64_t ActivationBytes::path(std::int64_t path_rows) const {
  const std::int64_t gradient = kind_.gradients ? tensor(path_rows, kv_width_, a_) : 0;
  return shape_.layers * 2 * (tensor(path_rows, kv_width_, b_) + gradient);
}

std::int64_t ActivationBytes::mlp_saved(const LayerRows& r) const {
  const std::int64_t R = r.continuing, k = shape_.experts_per_token;
  const std::int64_t rstd = tensor(R, 1, a_);
  if (!r.experts) return rstd + tensor(R, 2 * shape_.inner, b_);
  return rstd + tensor(R * k, 2 * shape_.expert_inner, b_) +                                     // gate and up
         tensor(R, shape_.experts, b_) + tensor(R, k, sizeof(std::int32_t)) + tensor(R, k, a_);  // router
}

std::int64_t ActivationBytes::layer_saved(const LayerRows& r) const {
  return tensor(r.all, 1, a_) + tensor(r.all, 2 * kv_width_, b_) +                          // 1/rms; k and v
         2 * tensor(r.continuing, q_width_, b_) + tensor(shape_.heads, r.continuing, a_) +  // q, attended; lse
         stream(r.continuing) + mlp_saved(r);
}

// In bfloat16 a weight's gradient is rounded once, in a tensor of its own, before it is added; not where products are
// widened, nor on a GPU, whose products add to float32 sums.
std::int64_t ActivationBytes::rounded_product(std::int64_t outputs, std::int64_t inputs) const {
  return b_ == a_ || widens_ || kind_.cuda ? 0 : tensor(outputs, inputs, b_);
}

// Expert layers have scratch for as many rows as there are, since any expert may be everybody's.
std::int64_t ActivationBytes::mlp_forward(const LayerRows& r, bool with_output) const {
  const std::int64_t R = r.continuing;
  if (!r.experts) return std::max(stream(R), with_output ? tensor(R, shape_.inner, b_) : 0);
  return 2 * stream(R) + (with_output ? tensor(R, shape_.hidden, a_) + tensor(R, shape_.expert_inner, b_) : 0);
}

std::int64_t ActivationBytes::mlp_backward(const LayerRows& r) const {
  const std::int64_t R = r.continuing, M = shape_.hidden;
  if (R == 0) return 0;
  if (!r.experts) {
    const std::int64_t F = shape_.inner;
    return tensor(R, F, b_) + std::max(rounded_product(M, F), stream(R) + rounded_product(2 * F, M));
  }
  const std::int64_t F = shape_.expert_inner, E = shape_.experts, k = shape_.experts_per_token;
  const std::int64_t expert =
      stream(R) + tensor(R, F, b_) + tensor(R, 2 * F, b_) + std::max(rounded_product(M, F), rounded_product(2 * F, M));
  const std::int64_t router = tensor(R, E, b_) + rounded_product(E, M);
  return stream(R) + tensor(R, k, a_) + tensor(R, M, a_) + std::max(expert, router);
}

std::int64_t ActivationBytes::layer_forward(const LayerRows& r, bool wave, bool with_output) const {
  const std::int64_t gathered = r.narrow ? stream(r.continuing) : 0;
  const std::int64_t projection = stream(r.all) + gathered;
  const std::int64_t operands = tensor(r.continuing, q_width_, b_) + (wave ? tensor(r.all, kv_width_, b_) : 0);
  return std::max({projection, operands, gathered, mlp_forward(r, with_output)});
}

std::int64_t ActivationBytes::layer_backward(const LayerRows& r, bool wave) const {
  const std::int64_t M = shape_.hidden, q = tensor(r.continuing, q_width_, b_);
  const std::int64_t output_product = r.continuing > 0 ? rounded_product(M, q_width_) : 0;
  const std::int64_t query_product = r.continuing > 0 ? rounded_product(q_width_, M) : 0;
  std::int64_t attention = 2 * q;  // rotated queries, their gradient
  if (wave) attention += tensor(r.all, kv_width_, b_) + 2 * tensor(r.all, kv_width_, a_);
  const std::int64_t projections = q + tensor(r.all, 2 * kv_width_, b_);
  const std::int64_t gathered = r.narrow ? stream(r.continuing) : 0;
  const std::int64_t weights = stream(r.all) + std::max(rounded_product(2 * kv_width_, M), gathered + query_product);
  return q + std::max({mlp_backward(r), output_product, projections + std::max(attention, weights)});
}

std::int64_t ActivationBytes::head(std::int64_t outputs, bool with_gradient) const {
  if (outputs == 0 || shape_.value_head) return 0;
  const std::int64_t V = shape_.vocabulary, M = shape_.hidden;
  const std::int64_t rows = std::min(outputs, std::clamp<std::int64_t>(kBlockBytes / (V * a_), 1, kBlockRows));
  if (b_ == a_) return tensor(rows, V, a_);
  const std::int64_t run = std::min(V, std::max<std::int64_t>(1, kWidenedBytes / (M * a_)));
  return tensor(rows, V, a_) + tensor(run, M, a_) + (with_gradient ? 2 : 1) * tensor(rows, M, a_);
}

// Final stream, normed and 1/rms of the output rows, and the gradient of the normed rows.
std::int64_t ActivationBytes::head_outputs(std::int64_t outputs) const {
  return (kind_.gradients ? 3 : 2) * stream(outputs) + tensor(outputs, 1, a_);
}

std::int64_t ActivationBytes::full_saved(const Work& work, const FullKind& upto) const {
  return (upto.dense_layers > 0 ? upto.dense_layers * layer_saved(full(work, false)) : 0) +
         (upto.expert_layers > 0 ? upto.expert_layers * layer_saved(full(work, true)) : 0);
}

std::int64_t ActivationBytes::saved(const Work& work, bool keep) const {
  std::int64_t sum = head_outputs(work.outputs);
  if (!kind_.gradients) return sum;
  sum += streams() * stream(work.rows);
  if (!keep) return sum;
  if (!full_kinds_.empty()) sum += full_saved(work, full_kinds_.back());
  return sum + (last_is_narrow_ ? layer_saved(narrow(work)) : 0);
}

std::int64_t ActivationBytes::forward_peak(const Work& work, bool keep, bool wave) const {
  const std::int64_t outputs = head_outputs(work.outputs), after = saved(work, keep);
  const bool dropped = !keep || !kind_.gradients;
  // What is held while a layer runs: `streams` inputs of layers (one serves all of them in a forward alone).
  const auto in_layer = [&](const LayerRows& rows, std::int64_t streams, std::int64_t layers_saved) {
    return outputs + (kind_.gradients ? streams : 1) * stream(work.rows) +
           (dropped ? layer_saved(rows) : layers_saved) + layer_forward(rows, wave, true);
  };
  std::int64_t most = after + head(work.outputs, kind_.gradients && !kind_.whole_rollout);
  for (const FullKind& kind : full_kinds_)
    most = std::max(most, in_layer(full(work, kind.experts), kind.layers() + 1, full_saved(work, kind)));
  if (last_is_narrow_)
    most = std::max(most, in_layer(narrow(work), streams(), after - outputs - streams() * stream(work.rows)));
  return most;
}

std::int64_t ActivationBytes::backward_peak(const Work& work, bool keep, bool wave) const {
  const auto layer = [&](const LayerRows& rows) {
    const std::int64_t backward = layer_backward(rows, wave);
    return keep ? backward : layer_saved(rows) + std::max(layer_forward(rows, wave, false), backward);
  };
  std::int64_t most = last_is_narrow_ ? layer(narrow(work)) : 0;
  for (const FullKind& kind : full_kinds_) most = std::max(most, layer(full(work, kind.experts)));
  const std::int64_t gradients = stream(work.outputs) + stream(work.rows);
  return saved(work, keep) + std::max(gradients + most, kind_.whole_rollout ? head(work.outputs, true) : 0);
}

void PeakWalk::wave(const Work& work, std::int64_t held) {
  std::int64_t peak = bytes_.forward_peak(work, true, true);
  if (bytes_.gradients()) peak = std::max(peak, bytes_.backward_peak(work, true, true));
  b_ = std::max(b_, held + peak);
}

std::int64_t PeakWalk::open_trunk(const Work& work, bool keep, std::int64_t held) {
  a_ = std::max(a_, held + bytes_.forward_peak(work, keep, false));
  return held + bytes_.saved(work, keep);
}

void PeakWalk::close_trunk(const Work& work, bool keep, std::int64_t held) {
  if (bytes_.gradients()) c_ = std::max(c_, held + bytes_.backward_peak(work, keep, false));
}

PhasePeaks PeakWalk::peaks(std::int64_t base) const {
  const auto total = [base](std::int64_t bytes) { return bytes < 0 ? std::int64_t{0} : base + bytes; };
  return {total(a_), total(b_), total(c_)};
}

}  // namespace espalier
