// The arena of the decoder, in numbers.
#include "espalier/plan/memory_model.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr std::int64_t kProcessBytes = 120 << 20;  // program, libraries and heap before any model
constexpr std::int64_t kHeadRows = 256;            // rows whose logits exist at a time

}  // namespace

std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype) {
  return 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_of(dtype);
}

ActivationBytes::ActivationBytes(const ModelShape& shape, DType dtype)
    : shape_(shape), b_(bytes_of(dtype)), a_(dtype == DType::float64 ? 8 : 4) {
  for (std::int64_t layer = 0; layer + 1 < shape_.layers; ++layer) full_inner_sum_ += inner(layer);
}

std::int64_t ActivationBytes::inner(std::int64_t layer) const {
  const bool expert = !shape_.expert_layer.empty() && shape_.expert_layer[layer];
  return expert ? shape_.experts_per_token * shape_.expert_inner : shape_.inner;
}

std::int64_t ActivationBytes::widest_inner() const {
  std::int64_t widest = 0;
  for (std::int64_t layer = 0; layer < shape_.layers; ++layer) widest = std::max(widest, inner(layer));
  return widest;
}

std::int64_t ActivationBytes::constant() const {
  const std::int64_t parameters = shape_.parameters();
  const std::int64_t masters = b_ == 2 ? 4 * parameters : 0;
  return kProcessBytes + parameters * b_ + parameters * a_ + masters + 2 * a_ * parameters;
}

std::int64_t ActivationBytes::path(std::int64_t path_rows) const {
  const std::int64_t width = shape_.kv_heads * shape_.head_dim;
  return shape_.layers * 2 * (tensor(path_rows, width, b_) + tensor(path_rows, width, a_));
}

std::int64_t ActivationBytes::saved_full_layer(std::int64_t rows, std::int64_t layer) const {
  return 2 * tensor(rows, shape_.hidden, b_) +               // stream in and in the middle
         tensor(rows, shape_.qkv_width(), b_) +              //
         tensor(rows, shape_.heads * shape_.head_dim, b_) +  // attention's result
         tensor(rows, shape_.heads, a_) +                    // lse
         tensor(rows, 2 * inner(layer), b_) +                // gate, up
         2 * tensor(rows, 1, a_);                            // 1/rms, twice
}

std::int64_t ActivationBytes::saved_last_layer(std::int64_t rows, std::int64_t outputs) const {
  return tensor(rows, shape_.hidden, b_) + tensor(rows, 2 * shape_.kv_heads * shape_.head_dim, b_) +
         tensor(rows, 1, a_) + 2 * tensor(outputs, shape_.heads * shape_.head_dim, b_) +  // q and attention's result
         tensor(outputs, shape_.heads, a_) + tensor(outputs, shape_.hidden, b_) +
         tensor(outputs, 2 * inner(shape_.layers - 1), b_) + tensor(outputs, 1, a_);
}

std::int64_t ActivationBytes::saved_outputs(std::int64_t outputs) const {
  return 2 * tensor(outputs, shape_.hidden, b_) + tensor(outputs, 1, a_);
}

std::int64_t ActivationBytes::saved(std::int64_t rows, std::int64_t outputs, bool keep) const {
  if (!keep) return shape_.layers * tensor(rows, shape_.hidden, b_);
  std::int64_t sum = saved_last_layer(rows, outputs) + saved_outputs(outputs);
  const bool alike = full_inner_sum_ == (shape_.layers - 1) * inner(0);
  if (alike) return sum + (shape_.layers - 1) * saved_full_layer(rows, 0);
  for (std::int64_t layer = 0; layer + 1 < shape_.layers; ++layer) sum += saved_full_layer(rows, layer);
  return sum;
}

std::int64_t ActivationBytes::forward_scratch(std::int64_t rows) const {
  return 2 * tensor(rows, shape_.hidden, b_) +  // normed; the projection's or the MLP's result
         tensor(rows, shape_.heads * shape_.head_dim, b_) + tensor(rows, shape_.kv_heads * shape_.head_dim, b_) +
         tensor(rows, widest_inner(), b_);
}

std::int64_t ActivationBytes::backward_scratch(std::int64_t rows, bool wave) const {
  const std::int64_t HD = shape_.heads * shape_.head_dim, JD = shape_.kv_heads * shape_.head_dim;
  std::int64_t sum = 3 * tensor(rows, shape_.hidden, b_) +  // gradient of the stream, of the sublayer, normed
                     tensor(rows, widest_inner(), b_) + tensor(rows, 2 * widest_inner(), b_) +
                     3 * tensor(rows, HD, b_) + tensor(rows, JD, b_) +  // q, k, gradients of q and of the result
                     tensor(rows, shape_.qkv_width(), b_);
  if (wave) sum += 2 * tensor(rows, JD, a_);  // a trunk's K/V gradients are in the path's accumulators
  return sum;
}

std::int64_t ActivationBytes::last_backward_scratch(std::int64_t rows, std::int64_t outputs, bool wave) const {
  const std::int64_t HD = shape_.heads * shape_.head_dim, JD = shape_.kv_heads * shape_.head_dim;
  std::int64_t sum = 2 * tensor(rows, shape_.hidden, b_) + tensor(rows, JD, b_) + tensor(rows, 2 * JD, b_) +
                     3 * tensor(outputs, shape_.hidden, b_) + 3 * tensor(outputs, widest_inner(), b_) +
                     3 * tensor(outputs, HD, b_);
  if (wave) sum += 2 * tensor(rows, JD, a_);
  return sum;
}

std::int64_t ActivationBytes::head_scratch(std::int64_t outputs) const {
  return tensor(std::min(outputs, kHeadRows), shape_.vocabulary, a_) + tensor(outputs, shape_.hidden, b_) +
         tensor(outputs, 4, 8);
}

std::int64_t PeakWalk::forward_peak(const Work& work, std::int64_t saved) const {
  return saved + std::max(bytes_.forward_scratch(work.rows), bytes_.head_scratch(work.outputs));
}

// Layers are freed as the backward leaves them, so the peak is in the last layer or in the one before it.
std::int64_t PeakWalk::backward_peak(const Work& work, bool wave) const {
  const std::int64_t all = bytes_.saved(work.rows, work.outputs, true);
  std::int64_t peak =
      all + std::max(bytes_.last_backward_scratch(work.rows, work.outputs, wave), bytes_.head_scratch(work.outputs));
  if (bytes_.layers() > 1)
    peak = std::max(peak,
                    all - bytes_.saved_last_layer(work.rows, work.outputs) + bytes_.backward_scratch(work.rows, wave));
  return peak;
}

void PeakWalk::wave(const Work& work, std::int64_t held) {
  const std::int64_t saved = bytes_.saved(work.rows, work.outputs, true);
  b_ = std::max({b_, held + forward_peak(work, saved), held + backward_peak(work, true)});
}

std::int64_t PeakWalk::open_trunk(const Work& work, bool keep, std::int64_t held) {
  const std::int64_t saved = bytes_.saved(work.rows, work.outputs, keep);
  // With recompute a layer's state is dropped as soon as the layer is done.
  const std::int64_t passing = keep ? 0 : bytes_.saved_full_layer(work.rows, 0);
  a_ = std::max(a_, held + passing + forward_peak(work, saved));
  return held + saved;
}

void PeakWalk::close_trunk(const Work& work, bool keep, std::int64_t held) {
  if (keep) {
    c_ = std::max(c_, held + backward_peak(work, false));
    return;
  }
  const std::int64_t saved = bytes_.saved(work.rows, work.outputs, false);
  const std::int64_t layer = bytes_.saved_full_layer(work.rows, 0);
  const std::int64_t last = bytes_.saved_last_layer(work.rows, work.outputs);
  const std::int64_t head = bytes_.head_scratch(work.outputs);
  c_ = std::max(
      {c_, held + saved + last + std::max(head, bytes_.last_backward_scratch(work.rows, work.outputs, false)),
       held + saved + layer + std::max(bytes_.forward_scratch(work.rows), bytes_.backward_scratch(work.rows, false))});
}

PhasePeaks PeakWalk::peaks(std::int64_t base) const {
  const auto total = [base](std::int64_t bytes) { return bytes < 0 ? std::int64_t{0} : base + bytes; };
  return {total(a_), total(b_), total(c_)};
}

}  // namespace espalier
