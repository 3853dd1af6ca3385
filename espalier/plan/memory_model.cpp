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
// Numbers of an item on the host and in its control block (phase/item_rows.h): id, position and subtree end of a row;
// row, position, temperature, target and edge of an output. The head's sums of one block (objective/fused_head.cpp).
constexpr std::int64_t kNumberBytesPerRow = 2 * 12, kNumberBytesPerOutput = 72, kHeadSumBytes = 256 * 56;
// Of experts: a slot's place among those sorted, and its choice in every layer (model/expert_mlp.cpp).
constexpr std::int64_t kSortedBytesPerSlot = 12, kChoiceBytesPerSlot = 4;

}  // namespace

std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype) {
  return 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_of(dtype);
}

ActivationBytes::ActivationBytes(const ModelShape& shape, DType dtype, const StepKind& kind)
    : shape_(shape),
      kind_(kind),
      dtype_(dtype),
      widens_products_(dtype == DType::bfloat16 && !kind.cuda && bfloat16_products() == Bfloat16Products::converted),
      rounds_weight_gradients_(dtype == DType::bfloat16 && !kind.cuda && !widens_products_) {
  const auto experts = [&](std::int64_t layer) {
    return !shape.expert_layer.empty() && shape.expert_layer[layer] != 0;
  };
  last_has_experts_ = shape.layers > 0 && experts(shape.layers - 1);
  last_is_narrow_ = !(kind.all_rows_choose && last_has_experts_);
  std::int64_t of_kind[2] = {0, 0};
  for (std::int64_t layer = 0; layer < shape.layers - (last_is_narrow_ ? 1 : 0); ++layer) {
    ++of_kind[experts(layer)];
    std::erase_if(full_kinds_, [&](const FullKind& kind_before) { return kind_before.experts == experts(layer); });
    full_kinds_.push_back({experts(layer), of_kind[0], of_kind[1]});
  }
}

std::int64_t ActivationBytes::model() const {
  const ElementBytes bytes = element_bytes(dtype_);
  std::int64_t per_parameter = bytes.activation;
  if (kind_.gradients) per_parameter += bytes.accumulator;
  const std::int64_t state = kind_.optimizer ? 2 * bytes.accumulator + (dtype_ == DType::bfloat16 ? 4 : 0) : 0;
  const std::int64_t own = (shape_.parameters() + kind_.optimizer_shares - 1) / kind_.optimizer_shares;
  return shape_.parameters() * per_parameter + own * state;
}

std::int64_t ActivationBytes::constant() const {
  const std::int64_t process =
      kind_.cuda ? kCudaBytes : kProcessBytes + (dtype_ == DType::bfloat16 ? kBfloat16CodeBytes : 0);
  return process + kind_.beside_bytes + model();
}

std::int64_t ActivationBytes::number_bytes(std::int64_t rows, std::int64_t path_rows) const {
  const std::int64_t of_experts =
      shape_.experts_per_token * (kSortedBytesPerSlot + shape_.expert_layers() * kChoiceBytesPerSlot);
  return rows * (kNumberBytesPerOutput + of_experts) + (rows + path_rows) * kNumberBytesPerRow + kHeadSumBytes;
}

std::int64_t ActivationBytes::scratch(std::int64_t rows, std::int64_t path_rows) const {
  const std::int64_t q_width = shape_.heads * shape_.head_dim;
  const ElementBytes bytes = element_bytes(dtype_);
  const std::int64_t numbers = number_bytes(rows, path_rows);
  if (kind_.cuda) return numbers + arena_bytes(rows * q_width * 4);  // attention's backward sums dL/dq in float32
  const std::int64_t widest =
      std::max({shape_.value_head ? 1 : shape_.vocabulary, q_width, 2 * shape_.inner, 2 * shape_.expert_inner});
  const std::int64_t panels =
      std::min(kWidenedPanelBytes, (shape_.hidden * widest + rows * 2 * widest) * bytes.accumulator);
  return numbers +
         std::min(kMostPackedBytes + kMostPackedElements * bytes.activation,
                  shape_.hidden * widest * bytes.accumulator) +
         (widens_products_ ? panels : 0) + std::min(kMostAttentionBytes, rows * kAttentionBytesPerRow);
}

std::int64_t ActivationBytes::path(std::int64_t path_rows) const {
  return shape_.layers * PathBuffers(block(), path_rows, kind_.gradients).peak();
}

std::int64_t ActivationBytes::head(const Work& work, bool with_gradient) const {
  if (shape_.value_head) return 0;
  return HeadBuffers(element_bytes(dtype_), work.outputs, shape_.vocabulary, shape_.hidden, with_gradient).peak();
}

std::int64_t ActivationBytes::full_saved(const Work& work, const FullKind& upto) const {
  return (upto.dense_layers > 0 ? upto.dense_layers * layer_saved(full(work, true, false)) : 0) +
         (upto.expert_layers > 0 ? upto.expert_layers * layer_saved(full(work, true, true)) : 0);
}

std::int64_t ActivationBytes::beside_layers(const Work& work) const {
  return outputs_held(work) + (last_is_narrow_ ? 0 : stream(work.rows));
}

void ActivationBytes::for_each_layer_kind(const Work& work, bool wave, auto&& visit) const {
  for (const FullKind& kind : full_kinds_) visit(full(work, wave, kind.experts));
  if (last_is_narrow_) visit(narrow(work, wave));
}

std::int64_t ActivationBytes::stored(const Work& work) const {
  if (!kind_.gradients) return 0;
  constexpr std::int64_t kPage = 4096;  // every layer begins at one
  return saved(work, SavedState::keep) - beside_layers(work) + shape_.layers * kPage;
}

std::int64_t ActivationBytes::in_flight(std::int64_t stored_bytes) const {
  if (stored_bytes == 0) return 0;
  return std::clamp(stored_bytes / (8 * kSpillChunkBytes), kFewestSpillChunks, kMostSpillChunks) * kSpillChunkBytes;
}

std::int64_t ActivationBytes::saved(const Work& work, SavedState state) const {
  std::int64_t sum = outputs_held(work);
  if (!kind_.gradients) return sum;
  if (state == SavedState::offload) return beside_layers(work);
  sum += streams() * stream(work.rows);
  if (state == SavedState::recompute) return sum;
  if (!full_kinds_.empty()) sum += full_saved(work, full_kinds_.back());
  return sum + (last_is_narrow_ ? layer_saved(narrow(work, true)) : 0);
}

std::int64_t ActivationBytes::forward_peak(const Work& work, SavedState state, bool wave) const {
  const std::int64_t outputs = outputs_held(work), after = saved(work, state);
  if (state == SavedState::offload && kind_.gradients) {
    std::int64_t most = after + head(work, !kind_.whole_rollout);
    for_each_layer_kind(work, wave, [&](const BlockRows& rows) {  // its input, and unless it is narrow the next one's
      const std::int64_t streams = (rows.narrow ? 1 : 2) * stream(work.rows);
      most = std::max(most, outputs + streams + layer_saved(rows) + layer_forward(rows, true));
    });
    return most;
  }
  const bool dropped = state == SavedState::recompute || !kind_.gradients;
  // What is held while a layer runs: `streams` inputs of layers (one serves all of them in a forward alone).
  const auto in_layer = [&](const BlockRows& rows, std::int64_t streams, std::int64_t layers_saved) {
    return outputs + (kind_.gradients ? streams : 1) * stream(work.rows) +
           (dropped ? layer_saved(rows) : layers_saved) + layer_forward(rows, true);
  };
  std::int64_t most = after + head(work, kind_.gradients && !kind_.whole_rollout);
  for (const FullKind& kind : full_kinds_)
    most = std::max(most, in_layer(full(work, wave, kind.experts), kind.layers() + 1, full_saved(work, kind)));
  if (last_is_narrow_)
    most = std::max(most, in_layer(narrow(work, wave), streams(), after - outputs - streams() * stream(work.rows)));
  return most;
}

std::int64_t ActivationBytes::backward_peak(const Work& work, SavedState state, bool wave) const {
  std::int64_t most = 0;
  for_each_layer_kind(work, wave, [&](const BlockRows& rows) {
    std::int64_t layer = LayerBackwardBuffers(block(), rows).peak();
    if (state == SavedState::recompute) layer = std::max(layer, layer_forward(rows, false)) + layer_saved(rows);
    if (state == SavedState::offload) layer += stream(work.rows) + layer_saved(rows);
    most = std::max(most, layer);
  });
  const std::int64_t gradients = DecoderBackwardBuffers(block(), work.rows, work.outputs).peak();
  return saved(work, state) + std::max(gradients + most, kind_.whole_rollout ? head(work, true) : 0);
}

Work ActivationBytes::share_of(const Work& trunk) const {
  Work share = trunk;
  share.rows = RowShares(trunk.rows, kind_.cp).most();
  share.outputs = std::min(share.outputs, share.rows);
  return share;
}

void PeakWalk::wave(const Work& work, SavedState state, std::int64_t held) {
  std::int64_t peak = bytes_.forward_peak(work, state, true);
  if (bytes_.gradients()) peak = std::max(peak, bytes_.backward_peak(work, state, true));
  b_ = std::max(b_, held + peak);
}

std::int64_t PeakWalk::open_trunk(const Work& work, SavedState state, std::int64_t held) {
  const Work share = bytes_.share_of(work);
  a_ = std::max(a_, held + bytes_.forward_peak(share, state, false));
  if (state == SavedState::offload) stored_ += bytes_.stored(share);
  most_stored_ = std::max(most_stored_, stored_);
  return held + bytes_.saved(share, state);
}

void PeakWalk::close_trunk(const Work& work, SavedState state, std::int64_t held) {
  const Work share = bytes_.share_of(work);
  if (bytes_.gradients()) c_ = std::max(c_, held + bytes_.backward_peak(share, state, false));
  if (state == SavedState::offload) stored_ -= bytes_.stored(share);
}

PhasePeaks PeakWalk::peaks(std::int64_t base) const {
  const auto total = [base](std::int64_t bytes) { return bytes < 0 ? std::int64_t{0} : base + bytes; };
  return {total(a_), total(b_), total(c_)};
}

}  // namespace espalier
