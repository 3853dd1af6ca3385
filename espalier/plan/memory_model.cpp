// The arena of the decoder, in numbers.
#include "espalier/plan/memory_model.h"

#include <algorithm>

namespace espalier {
namespace {

// Program, libraries and heap before any model. What products and attention take beside the arena grows with the width,
// and with width x rows; resident memory of steps at widths of 64 to 512 and up to 2,048 rows is met within 3 MiB.
constexpr std::int64_t kProcessBytes = 126 << 20, kScratchPerColumn = 26 << 10, kScratchPerElement = 20;

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
      q_width_(shape.heads * shape.head_dim),
      kv_width_(shape.kv_heads * shape.head_dim) {
  const auto expert = [&](std::int64_t layer) { return !shape.expert_layer.empty() && shape.expert_layer[layer] != 0; };
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    inner_ = std::max(inner_, expert(layer) ? shape.experts_per_token * shape.expert_inner : shape.inner);
}

std::int64_t ActivationBytes::constant() const {
  std::int64_t per_parameter = b_;
  if (kind_.gradients) per_parameter += a_;
  if (kind_.optimizer) per_parameter += 2 * a_ + (b_ == 2 ? 4 : 0);
  return kProcessBytes + shape_.parameters() * per_parameter;
}

std::int64_t ActivationBytes::scratch(std::int64_t rows) const {
  return shape_.hidden * (kScratchPerColumn + kScratchPerElement * rows);
}

std::int64_t ActivationBytes::path(std::int64_t path_rows) const {
  const std::int64_t gradient = kind_.gradients ? tensor(path_rows, kv_width_, a_) : 0;
  return shape_.layers * 2 * (tensor(path_rows, kv_width_, b_) + gradient);
}

std::int64_t ActivationBytes::layer_saved(const LayerRows& r) const {
  return tensor(r.all, 1, a_) + tensor(r.all, 2 * kv_width_, b_) +                          // 1/rms; k and v
         2 * tensor(r.continuing, q_width_, b_) + tensor(shape_.heads, r.continuing, a_) +  // q, attended; lse
         stream(r.continuing) + tensor(r.continuing, 1, a_) + tensor(r.continuing, 2 * inner_, b_);
}

// In bfloat16 a weight's gradient is rounded once, in a tensor of its own, before it is added.
std::int64_t ActivationBytes::rounded_product(std::int64_t outputs, std::int64_t inputs) const {
  return b_ == a_ ? 0 : tensor(outputs, inputs, b_);
}

std::int64_t ActivationBytes::layer_forward(const LayerRows& r, bool wave, bool with_output) const {
  const std::int64_t gathered = r.last ? stream(r.continuing) : 0;
  const std::int64_t projection = stream(r.all) + gathered;
  const std::int64_t operands = tensor(r.continuing, q_width_, b_) + (wave ? tensor(r.all, kv_width_, b_) : 0);
  const std::int64_t activation = with_output ? tensor(r.continuing, inner_, b_) : 0;
  return std::max({projection, operands, gathered, stream(r.continuing), activation});
}

std::int64_t ActivationBytes::layer_backward(const LayerRows& r, bool wave) const {
  const bool any = r.continuing > 0;
  const auto product = [&](std::int64_t outputs, std::int64_t inputs) {
    return any ? rounded_product(outputs, inputs) : 0;
  };
  const std::int64_t M = shape_.hidden, q = tensor(r.continuing, q_width_, b_);
  const std::int64_t mlp =
      tensor(r.continuing, inner_, b_) + std::max(product(M, inner_), stream(r.continuing) + product(2 * inner_, M));
  std::int64_t attention = 2 * q;  // rotated queries, their gradient
  if (wave) attention += tensor(r.all, kv_width_, b_) + 2 * tensor(r.all, kv_width_, a_);
  const std::int64_t projections = q + tensor(r.all, 2 * kv_width_, b_);
  const std::int64_t gathered = r.last ? stream(r.continuing) : 0;
  const std::int64_t weights =
      stream(r.all) + std::max(rounded_product(2 * kv_width_, M), gathered + product(q_width_, M));
  return q + std::max({mlp, product(M, q_width_), projections + std::max(attention, weights)});
}

std::int64_t ActivationBytes::head(std::int64_t outputs, bool with_gradient) const {
  if (outputs == 0) return 0;
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

std::int64_t ActivationBytes::saved(const Work& work, bool keep) const {
  std::int64_t sum = head_outputs(work.outputs);
  if (!kind_.gradients) return sum;
  sum += shape_.layers * stream(work.rows);
  if (!keep) return sum;
  return sum + (shape_.layers - 1) * layer_saved({work.rows, work.rows, false}) +
         layer_saved({work.rows, work.outputs, true});
}

// The layers are alike, so the most is held in the last of them or in the one before it.
std::int64_t ActivationBytes::forward_peak(const Work& work, bool keep, bool wave) const {
  const LayerRows full{work.rows, work.rows, false}, last{work.rows, work.outputs, true};
  const std::int64_t after = saved(work, keep);
  const bool dropped = !keep || !kind_.gradients;
  const std::int64_t before = kind_.gradients ? after : after + stream(work.rows);  // one stream serves all layers then
  const std::int64_t in_last = before + (dropped ? layer_saved(last) : 0) + layer_forward(last, wave, true);
  const std::int64_t in_full = shape_.layers < 2 ? 0
                               : dropped         ? before + layer_saved(full) + layer_forward(full, wave, true)
                                                 : before - layer_saved(last) + layer_forward(full, wave, true);
  return std::max({in_last, in_full, after + head(work.outputs, kind_.gradients && !kind_.whole_rollout)});
}

std::int64_t ActivationBytes::backward_peak(const Work& work, bool keep, bool wave) const {
  const LayerRows full{work.rows, work.rows, false}, last{work.rows, work.outputs, true};
  const std::int64_t held = saved(work, keep);
  const auto layer = [&](const LayerRows& rows) {
    const std::int64_t backward = layer_backward(rows, wave);
    return keep ? backward : layer_saved(rows) + std::max(layer_forward(rows, wave, false), backward);
  };
  const std::int64_t most = shape_.layers < 2 ? layer(last) : std::max(layer(last), layer(full));
  const std::int64_t gradients = stream(work.outputs) + stream(work.rows);
  return held + std::max(gradients + most, kind_.whole_rollout ? head(work.outputs, true) : 0);
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
