#include "espalier/forecast/memory_model.h"

#include <algorithm>

#include "espalier/base/defined_sums.h"
#include "espalier/base/instruction_set.h"
#include "espalier/forecast/library_attention.h"
#include "espalier/forecast/recurrent_scratch.h"
#include "espalier/shape/units.h"

namespace espalier {
namespace {

// Measured (bench/memory_sweep.py) at widths of 64 to 1,024, vocabularies of 500 to 150,000, up to 16,384 rows, every
// dtype, one thread and two. Program, libraries and heap before any model; where the matrix library multiplies bfloat16
// also the code of its kernels for sets of few rows, that of those for whole pieces (ops/cpu/compiled_products.h), and
// that of those for small ones, beside which the head and rows beyond the whole pieces are multiplied in float32.
constexpr std::int64_t kProcessBytes = 128 << 20, kCodeBytes = 10 << 20, kPieceCodeBytes = 19 << 20, kPieceRows = 256,
                       kSmallPieceCodeBytes = 8 << 20;
// Of a GPU: its context, the libraries' code and the matrix library's workspace; of one that this process has opened,
// what comes after the context. Round, not measured.
constexpr std::int64_t kCudaBytes = std::int64_t{1} << 30, kOpenedCudaBytes = std::int64_t{128} << 20;
// The matrix library packs a product's factors, each thread up to a limit, in float64 up to one that grows with the
// rows; attention takes more where rows see a path. Products of a few rows pack nothing.
constexpr std::int64_t kMostPackedBytes = 7 << 20, kFewestPackedRows = 16;
constexpr std::int64_t kMostPackedBytes64 = 15 << 20, kPackedBytes64 = 5 << 20, kPackedBytesPerRow64 = 10 << 10;
constexpr std::int64_t kWidenedPanelBytes = 12 << 20;  // ops/cpu/widened_products.cpp
constexpr std::int64_t kMostAttentionBytes = 3 << 20, kMostPathAttentionBytes = 17 << 18,
                       kAttentionNumbers = 12;  // for an element of a query
// Numbers of an item on the host and in its control block (execute/item_input.h): id, position and subtree end of a
// row; row, position, temperature, target and edge of an output. The head's sums of one block
// (objective/fused_head.cpp).
constexpr std::int64_t kNumberBytesPerRow = 2 * 12, kNumberBytesPerOutput = 72, kHeadSumBytes = 256 * 56;
constexpr std::int64_t kStateBlockRows = 64;      // ops/cpu/delta_rule_ranges.h
constexpr std::int64_t kChannelBlockStates = 21;  // ops/cpu/channel_decay_ranges.h
// Of experts: a slot's place among those sorted, and its choice in every layer (model/expert_mlp.cpp).
constexpr std::int64_t kSortedBytesPerSlot = 12, kChoiceBytesPerSlot = 4;

constexpr std::int64_t kPage = 4096;  // where something begins in a store
constexpr std::int64_t whole_pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::int64_t chunks_in_flight(std::int64_t stored_bytes) {
  return std::clamp(stored_bytes / (8 * kSpillChunkBytes), kFewestSpillChunks, kMostSpillChunks);
}

std::int64_t kv_bytes_per_token(const ModelShape& shape, DType dtype) {
  return (shape.layers - shape.states_in(0, shape.layers)) * (shape.key_width() + shape.value_width()) *
         bytes_of(dtype);
}

ActivationBytes::ActivationBytes(const LocalShape& local, DType dtype, const StepKind& kind, const StepSetting& setting)
    : shape_(local.own()),
      trained_(local.degrees().full ? 0 : local.parameters(Parameters::trained)),
      held_(local.degrees().full ? 0 : local.parameters(Parameters::held)),
      narrow_(local.parameters(Parameters::narrow) + local.parameters(Parameters::mapped)),
      nf4_(local.parameters(Parameters::nf4)),
      kind_(kind),
      setting_(setting),
      cp_(local.degrees().cp),
      in_flight_(local.waves_in_flight()),
      dtype_(dtype),
      has_outputs_(local.is_last_stage()),
      widens_products_(dtype == DType::bfloat16 && !setting.device.cuda && !defined_sums(dtype) &&
                       bfloat16_products() == Bfloat16Products::converted),
      rounds_weight_gradients_(dtype == DType::bfloat16 && !setting.device.cuda && !defined_sums(dtype) &&
                               !widens_products_) {
  if (local.degrees().full) {
    const Units trained = units_of(local, Parameters::trained), held = units_of(local, Parameters::held);
    trained_ = trained.kept, rooms_ = trained.rooms, sums_ = trained.sums;
    held_ = held.kept + held.rooms;
  }
  const ModelShape& shape = shape_;
  if (shape.layers > 0) last_mlp_ = mlp_of(shape.layers - 1);
  last_is_narrow_ = has_outputs_ && !(kind.all_rows_choose && last_mlp_ == MlpKind::experts);
  if (shape.layers > 0) last_leaves_ = left_by(shape.layers - 1);
  std::array<std::int64_t, 9> of_kind{};
  for (std::int64_t layer = 0; layer < shape.layers - (last_is_narrow_ ? 1 : 0); ++layer) {
    const Leaves leaves = left_by(layer);
    const MlpKind mlp = mlp_of(layer);
    of_kind[kind_of(mlp, leaves)] += layer >= forward_only() ? 1 : 0;
    std::erase_if(full_kinds_,
                  [&](const FullKind& kind_before) { return kind_before.mlp == mlp && kind_before.leaves == leaves; });
    full_kinds_.push_back({mlp, leaves, layer >= forward_only(), of_kind});
  }
}

std::int64_t ActivationBytes::model() const {
  const ElementBytes bytes = element_bytes(dtype_);
  std::int64_t per_parameter = bytes.activation;
  const HeldState& held = setting_.held;
  const bool gradients = kind_.gradients && held.gradients;
  if (gradients) per_parameter += bytes.accumulator;
  const std::int64_t state =
      gradients && held.optimizer ? 2 * bytes.accumulator + (dtype_ == DType::bfloat16 ? 4 : 0) : 0;
  const std::int64_t own = (trained_ + held.optimizer_shares - 1) / held.optimizer_shares;
  const std::int64_t rooms = rooms_ * per_parameter + (gradients ? sums_ * bytes.accumulator : 0);
  const std::int64_t narrow = setting_.device.cuda ? bytes.activation : bytes_of(DType::bfloat16);
  return trained_ * per_parameter + held_ * bytes.activation + narrow_ * narrow + nf4_ + own * state + rooms;
}

std::int64_t ActivationBytes::constant() const {
  const std::int64_t process = setting_.device.opened ? kOpenedCudaBytes
                               : setting_.device.cuda ? kCudaBytes
                                                      : kProcessBytes + (rounds_weight_gradients_ ? kCodeBytes : 0);
  return process + setting_.held.beside_bytes + model();
}

std::int64_t ActivationBytes::number_bytes(std::int64_t rows, std::int64_t path_rows) const {
  const std::int64_t of_experts =
      shape_.experts_per_token * (kSortedBytesPerSlot + shape_.expert_layers() * kChoiceBytesPerSlot);
  return rows * (kNumberBytesPerOutput + of_experts) + (rows + path_rows) * kNumberBytesPerRow + kHeadSumBytes;
}

std::int64_t ActivationBytes::scratch(std::int64_t rows, std::int64_t path_rows, int threads) const {
  const std::int64_t q_width = shape_.query_width();
  const ElementBytes bytes = element_bytes(dtype_);
  const std::int64_t numbers = number_bytes(rows, path_rows);
  if (setting_.device.cuda) {
    const std::int64_t of_library =
        dtype_ == DType::bfloat16 ? library_attention_bytes(shape_, setting_.device, rows, path_rows, kind_.gradients)
                                  : 0;
    const std::int64_t of_states = kind_.gradients && shape_.has_states()
                                       ? recurrent_scratch_bytes(shape_.delta_rule, rows, bytes.accumulator)
                                       : 0;
    // Own kernels sum dL/dq in float32. A layer has attention or a state, and gives its scratch back.
    return numbers + of_library + std::max(of_states, arena_bytes(rows * q_width * 4));
  }
  const std::int64_t widest = std::max({shape_.value_head ? 1 : shape_.vocabulary, q_width, shape_.key_value_width(),
                                        2 * shape_.inner, 2 * shape_.expert_inner});
  const std::int64_t panels =
      std::min(kWidenedPanelBytes, (shape_.hidden * widest + rows * 2 * widest) * bytes.accumulator);
  const std::int64_t most_packed = dtype_ == DType::float64
                                       ? std::min(kMostPackedBytes64, kPackedBytes64 + rows * kPackedBytesPerRow64)
                                       : kMostPackedBytes;
  std::int64_t of_products = 0;
  if (rows >= kFewestPackedRows) {
    of_products = std::min(threads * most_packed, shape_.hidden * widest * bytes.accumulator);
    if (rounds_weight_gradients_) of_products += kSmallPieceCodeBytes;
  }
  if (rounds_weight_gradients_ && rows >= kPieceRows) of_products = std::max(of_products, kPieceCodeBytes);
  if (defined_sums(dtype_))
    of_products = threads * kOwnProductBytes;
  else if ((narrow_ > 0 && dtype_ == DType::float32) || nf4_ > 0)
    of_products += shape_.hidden * widest * bytes.accumulator;  // one matrix, widened (ops/cpu/product_operations.cpp)
  std::int64_t of_states = 0;  // of a key head: at starts of blocks, and for the rows of one
  if (shape_.has_states()) {
    const DeltaRuleShape& s = shape_.delta_rule;
    const std::int64_t of_head = s.key_dim * s.value_dim, each = s.value_heads / s.key_heads,
                       width = 2 * s.key_dim + each * s.value_dim;
    const std::int64_t of_block =
        s.decays_channels() ? kChannelBlockStates * of_head + kStateBlockRows * 3 * s.key_dim
                            : 2 * of_head + kStateBlockRows * (5 * kStateBlockRows + 4 * s.value_dim + s.key_dim);
    of_states = threads * bytes.accumulator *
                ((rows / kStateBlockRows + 3) * each * of_head + of_block + 64 * s.key_dim + 3 * s.kernel * width +
                 kStateBlockRows * (4 * width + 4 * s.key_dim + (each + 2) * s.value_dim));
  }
  const std::int64_t most_of_attention = path_rows > 0 ? kMostPathAttentionBytes : kMostAttentionBytes;
  return numbers + of_products + of_states + (widens_products_ ? panels : 0) +
         threads * std::min(most_of_attention, rows * q_width * kAttentionNumbers * bytes.accumulator);
}

namespace {

// Of the first `upto` layers those with all rows of the path in it.
std::int64_t layers_with_all_rows(const ModelShape& shape, std::int64_t upto, std::int64_t cp) {
  std::int64_t count = 0;
  for (std::int64_t layer = 0; layer < upto; ++layer)
    count += shape.mixer_of(layer) == Mixer::attention && !(keeps_windows(shape, cp) && shape.window_of(layer) > 0);
  return count;
}

}  // namespace

PathBytes path_bytes(const BlockShape& block, PathRows rows, bool with_gradients, const PathPlan& path,
                     std::int64_t cp) {
  const bool latents = path.latents && rows.all > 0;
  const PathBuffers all(block, rows.all, with_gradients, latents), without_sums(block, rows.all, false, latents);
  const std::int64_t room = latents ? PathRoomBuffers(block, rows.all, with_gradients).peak() : 0;
  const ModelShape& shape = block.shape;
  const auto with_path = [&](std::int64_t upto) { return layers_with_all_rows(shape, upto, cp); };
  const std::int64_t layers = with_path(shape.layers),
                     awake = with_path(std::min<std::int64_t>(path.layers_awake, shape.layers)),
                     asleep = layers - awake;
  const bool sleeps = asleep > 0 && rows.all > 0;
  // Layers without a backward have no accumulators where all are in memory.
  const auto with_window = [&](std::int64_t upto) { return upto - shape.states_in(0, upto) - with_path(upto); };
  const std::int64_t forward_only = sleeps ? 0 : shape.trained.first_layer;
  const std::int64_t always =
      room + with_window(forward_only) * PathBuffers(block, rows.window, false).peak() +
      (with_window(shape.layers) - with_window(forward_only)) * PathBuffers(block, rows.window, with_gradients).peak();
  if (!sleeps) {
    const std::int64_t held =
        always + (layers - with_path(forward_only)) * all.peak() + with_path(forward_only) * without_sums.peak();
    return {held, held};
  }
  if (path.divided) {
    const std::int64_t most = PathShares{rows.all, cp}.most();
    const std::int64_t held = room + (awake + 1) * all.peak() +
                              asleep * PathBuffers(block, most, with_gradients, latents).peak() +
                              PathBuffers(block, cp * most, with_gradients, latents).peak();
    return {held, held, 0, true};
  }
  std::int64_t stored = 0;  // every buffer begins at a page
  for (const Buffer& buffer : all.buffers()) stored += whole_pages(buffer.bytes);
  return {always + awake * all.peak() + without_sums.peak(), always + (awake + 1) * all.peak(), asleep * stored, true};
}

PathTraffic ActivationBytes::path_traffic(std::int64_t rows_above, std::int64_t own_rows, const PathPlan& path) const {
  PathTraffic out;
  const std::int64_t layers = layers_with_all_rows(shape_, shape_.layers, cp_);
  if (shape_.has_latents()) {
    const std::int64_t with_backward =
        kind_.gradients ? layers - layers_with_all_rows(shape_, shape_.trained.first_layer, cp_) : 0;
    const std::int64_t of_others = own_rows - (own_rows + cp_ - 1) / cp_;
    std::int64_t expanded = of_others * (layers + 2 * with_backward);
    if (path.latents) expanded += layers * rows_above + with_backward * (rows_above + own_rows + 2 * rows_above);
    out.flops = 2.0 * static_cast<double>(shape_.latent.key_value * shape_.key_value_width() * expanded);
  }
  const std::int64_t asleep =
      layers - layers_with_all_rows(shape_, std::min<std::int64_t>(path.layers_awake, shape_.layers), cp_);
  if (asleep <= 0 || path.divided) return out;
  const auto bytes_of = [&](std::int64_t rows, bool sums) {
    return PathBuffers(block(), rows, sums, path.latents).peak();
  };
  const auto sums = [&](std::int64_t rows) { return bytes_of(rows, true) - bytes_of(rows, false); };
  const std::int64_t rows = rows_above + own_rows;
  out.forward = asleep * (bytes_of(rows_above, false) + bytes_of(own_rows, false));
  if (kind_.gradients) out.backward = asleep * (bytes_of(rows, true) + sums(rows_above));
  return out;
}

std::int64_t ActivationBytes::head(const Work& work, bool with_gradient) const {
  if (shape_.value_head || !has_outputs_) return 0;
  return head_buffers(work.outputs, with_gradient).peak();
}

HeadBuffers ActivationBytes::head_buffers(std::int64_t outputs, bool with_gradient) const {
  const DeviceTraits& device = setting_.device;
  const AdapterShape& adapter = shape_.trained.adapter;
  const HeadWay way{.ahead = device.cuda || device.queued,
                    .writes_sums = device.cuda || device.writes_sums,
                    .rank = adapter.head ? adapter.rank : 0};
  return {element_bytes(dtype_), outputs, shape_.vocabulary, shape_.hidden, with_gradient, way};
}

std::int64_t ActivationBytes::head_block_rows(std::int64_t outputs) const {
  return shape_.value_head ? outputs : std::max<std::int64_t>(1, head_buffers(outputs, false).block_rows);
}

std::int64_t ActivationBytes::members(const BlockRows& rows) const {
  return AttentionSavedBuffers(block(), rows).peak() + MlpSavedBuffers(block(), rows).peak();
}

std::int64_t ActivationBytes::members(const BlockRows& rows, ItemState state, ItemState::Member place) const {
  return (state.attention == place ? AttentionSavedBuffers(block(), rows).peak() : 0) +
         (state.mlp == place ? MlpSavedBuffers(block(), rows).peak() : 0);
}

std::int64_t ActivationBytes::full_members(const Work& work, const FullKind& upto, ItemState state, bool wave,
                                           ItemState::Member place) const {
  std::int64_t sum = 0;
  for (const MlpKind mlp : kMlpKinds)
    for (const Leaves leaves : kLeaves) {
      const std::int64_t layers = upto.of_kind[kind_of(mlp, leaves)];
      if (layers > 0) sum += layers * members(full(work, wave, mlp, leaves), state, place);
    }
  return sum;
}

void ActivationBytes::for_each_layer_kind(const Work& work, bool wave, auto&& visit) const {
  for (const FullKind& kind : full_kinds_)
    if (kind.has_backward) visit(full(work, wave, kind.mlp, kind.leaves));
  if (last_is_narrow_ && saved_layers() > 0) visit(narrow(work, wave));
}

const ActivationBytes::Item& ActivationBytes::item(const Work& work, ItemState state, bool wave) const {
  if (asked_.empty() || (misses_ > kFewItems && asked_.size() == kFewItems))
    asked_.assign(asked_.empty() ? kFewItems : kManyItems, Item());
  std::uint64_t hash = wave ? 1 : 0;
  for (const std::int64_t part : {work.rows, work.outputs, work.forks, static_cast<std::int64_t>(state.stream),
                                  static_cast<std::int64_t>(state.attention), static_cast<std::int64_t>(state.mlp)})
    hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9E3779B97F4A7C15u;
  Item& out = asked_[(hash >> 32) % asked_.size()];
  if (out.rows == work.rows && out.outputs == work.outputs && out.forks == work.forks && out.wave == wave &&
      out.state == state)
    return out;
  ++misses_;
  out = {work.rows,
         work.outputs,
         work.forks,
         state,
         wave,
         saved_of(work, state, wave) + states(wave),
         stored_of(work, state)};
  out.forward_peak = forward_peak_of(work, state, wave, out.saved);
  out.backward_peak = backward_peak_of(work, state, wave, out.saved);
  return out;
}

std::int64_t ActivationBytes::stored_of(const Work& work, ItemState state) const {
  if (!kind_.gradients || !state.stores()) return 0;
  std::int64_t sum = saved_layers() * kPage;  // every layer begins at one
  if (state.stream == kOffload) sum += saved_layers() * stream(work.rows);
  return sum + saved_members(work, state, false, kOffload);
}

std::int64_t ActivationBytes::saved_members(const Work& work, ItemState state, bool wave,
                                            ItemState::Member place) const {
  const std::int64_t in_full = full_kinds_.empty() ? 0 : full_members(work, full_kinds_.back(), state, wave, place);
  return in_full + (last_is_narrow_ && saved_layers() > 0 ? members(narrow(work, wave), state, place) : 0);
}

std::int64_t ActivationBytes::in_flight(std::int64_t stored_bytes) const {
  return stored_bytes == 0 || setting_.device.cuda ? 0 : chunks_in_flight(stored_bytes) * kSpillChunkBytes;
}

std::int64_t ActivationBytes::saved_of(const Work& work, ItemState state, bool wave) const {
  std::int64_t sum = outputs_held(work);
  if (!kind_.gradients) return sum;
  // The stream behind a last layer that runs all rows stays in any case.
  sum += (state.stream == kKeep ? streams() : streams() - saved_layers()) * stream(work.rows);
  return sum + saved_members(work, state, wave, kKeep);
}

std::int64_t ActivationBytes::forward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t after) const {
  const std::int64_t outputs = outputs_held(work) + states(wave);
  const bool keeps = kind_.gradients;
  // What is held while a layer runs: its members all, those of the layers before it that are kept, and inputs of
  // layers: all so far and the next one's; without those stored away; in a forward alone one that serves all of them.
  const auto in_layer = [&](const BlockRows& rows, bool saved, std::int64_t streams, std::int64_t kept) {
    const std::int64_t inputs = !saved ? 1 : state.stream == kKeep ? streams : rows.narrow ? 1 : 2;
    const std::int64_t before = saved ? kept - members(rows, state, kKeep) : 0;
    return outputs + inputs * stream(work.rows) + before + members(rows) + layer_forward(rows, true);
  };
  std::int64_t most = after + head(work, keeps && !kind_.whole_rollout);
  for (const FullKind& kind : full_kinds_)
    most = std::max(most, in_layer(full(work, wave, kind.mlp, kind.leaves), keeps && kind.has_backward,
                                   kind.layers() + 1, full_members(work, kind, state, wave, kKeep)));
  if (!last_is_narrow_) return most;
  return std::max(most, in_layer(narrow(work, wave), keeps && saved_layers() > 0, streams(),
                                 saved_members(work, state, wave, kKeep)));
}

std::int64_t ActivationBytes::backward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t saved) const {
  std::int64_t most = 0;
  for_each_layer_kind(work, wave, [&](const BlockRows& rows) {
    std::int64_t layer = layer_backward_bytes(block(), rows);
    if (state.recomputes_attention())
      layer = std::max(layer, layer_forward(rows, false));
    else if (state.recomputes_mlp())
      layer = std::max(layer, mlp_forward_bytes(block(), rows, false));
    if (state.stream == kOffload) layer += stream(work.rows);
    most = std::max(most, layer + members(rows) - members(rows, state, kKeep));
  });
  const std::int64_t gradients = DecoderBackwardBuffers(block(), work.rows, has_outputs_ ? work.outputs : 0).peak();
  return saved + std::max(gradients + most, kind_.whole_rollout ? head(work, true) : 0);
}

std::int64_t ActivationBytes::wave_peak(const Work& work, ItemState state) const {
  std::int64_t peak = forward_peak(work, state, true);
  if (gradients()) peak = std::max(peak, backward_peak(work, state, true));
  return peak + (waves_in_flight() - 1) * saved(work, state, true);
}

Work ActivationBytes::share_of(const Work& trunk) const {
  if (cp_ == 1) return trunk;
  Work share = trunk;
  share.rows = RowShares(trunk.rows, cp_).most();
  share.outputs = std::min(share.outputs, share.rows * kind_.temperatures);
  return share;
}

void PeakWalk::take(Pass pass, ItemKind kind, const Work& whole, ItemState state) {
  const bool wave = kind == ItemKind::wave, forward = pass == Pass::forward;
  const Work work = wave ? whole : bytes_.share_of(whole);
  const std::int64_t saved = bytes_.saved(work, state, wave), stored = wave ? 0 : bytes_.stored(work, state);
  if (forward) {
    std::int64_t& most = wave ? b_forward_ : a_;
    most = std::max(most, held_ + bytes_.forward_peak(work, state, wave));
    held_ += saved, stored_ += stored;
    most_stored_ = std::max(most_stored_, stored_);
    return;
  }
  held_ -= saved, stored_ -= stored;
  std::int64_t& most = wave ? b_backward_ : c_;
  if (bytes_.gradients()) most = std::max(most, held_ + bytes_.backward_peak(work, state, wave));
}

PhasePeaks PeakWalk::peaks(std::int64_t base, const PathBytes& path) const {
  const auto total = [base](std::int64_t bytes, std::int64_t of_path) {
    return bytes < 0 ? std::int64_t{0} : base + of_path + bytes;
  };
  return {total(a_, path.forward), std::max(total(b_forward_, path.forward), total(b_backward_, path.backward)),
          total(c_, path.backward)};
}

}  // namespace espalier
