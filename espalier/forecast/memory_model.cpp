#include "espalier/forecast/memory_model.h"

#include <algorithm>
#include <list>
#include <map>

#include "espalier/base/defined_sums.h"
#include "espalier/base/instruction_set.h"
#include "espalier/forecast/communicators.h"
#include "espalier/model/mlp_buffers.h"
#include "espalier/program/row_shares.h"
#include "espalier/shape/parameter_shapes.h"
#include "espalier/shape/path_leaves.h"
#include "espalier/shape/units.h"

namespace espalier {
namespace {

// Measured (bench/memory_sweep.py) at widths of 64 to 1,024, vocabularies of 500 to 150,000, up to 16,384 rows, every
// dtype, one thread and two. Program, libraries and heap before any model; where the matrix library multiplies bfloat16
// also the code of its kernels for sets of few rows, that of those for whole pieces (ops/cpu/compiled_products.h), and
// that of those for small ones, beside which the head and rows beyond the whole pieces are multiplied in float32.
constexpr std::int64_t kProcessBytes = 128 << 20, kCodeBytes = 10 << 20, kPieceCodeBytes = 19 << 20, kPieceRows = 256,
                       kSmallPieceCodeBytes = 8 << 20;
// A GPU's bytes beside tensors: its context, the libraries' code and the matrix library's workspace. On a GPU that this
// process has opened, only what comes after the context. Round, not measured.
constexpr std::int64_t kCudaBytes = std::int64_t{1} << 30, kOpenedCudaBytes = std::int64_t{128} << 20;
// The matrix library packs a product's factors, each thread up to a limit, in float64 up to one that grows with the
// rows. Products of a few rows pack nothing.
constexpr std::int64_t kMostPackedBytes = 7 << 20, kFewestPackedRows = 16;
constexpr std::int64_t kMostPackedBytes64 = 15 << 20, kPackedBytes64 = 5 << 20, kPackedBytesPerRow64 = 10 << 10;
constexpr std::int64_t kWidenedPanelBytes = 12 << 20;  // ops/cpu/widened_products.cpp
// Numbers of an item on the host and in its control block (execute/item_input.h): id, position and subtree end of a
// row; row, position, temperature, target and edge of an output. The head's sums of one block
// (objective/fused_head.cpp).
constexpr std::int64_t kNumberBytesPerRow = 2 * 12, kNumberBytesPerOutput = 72, kHeadSumBytes = 256 * 56;
// Kept sets of a block of logits: columns twice, being made and being copied, or of two blocks on a GPU. Records hold
// all sets of the mini-batch on the host.
constexpr std::int64_t kBytesPerKeptId = 8, kRecordBytesPerKeptId = 4;
// Experts need a slot's place among the sorted slots, and its choice in every layer (model/expert_mlp.cpp).
constexpr std::int64_t kSortedBytesPerSlot = 12, kChoiceBytesPerSlot = 4;

constexpr std::int64_t kPage = 4096;  // where something begins in a store
constexpr std::int64_t whole_pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

ActivationBytes::ActivationBytes(const LocalShape& local, DType dtype, const StepKind& kind, const StepSetting& setting)
    : shape_(local.own()),
      trained_(local.degrees().full ? 0 : local.parameters(Parameters::trained)),
      held_(local.degrees().full ? 0 : local.parameters(Parameters::held)),
      narrow_(local.parameters(Parameters::narrow) + local.parameters(Parameters::mapped)),
      quantised_(local.parameters(Parameters::quantised)),
      kind_(kind),
      setting_(setting),
      cp_(local.degrees().cp),
      communicator_bytes_(setting.device.cuda ? communicator_bytes(local.degrees(), local.whole()) : 0),
      in_flight_(local.waves_in_flight()),
      window_(shape_.window()),
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
  const std::int64_t layers = shape_.layers();
  last_is_narrow_ = has_outputs_ && !(kind.all_rows_choose && layers > 0 && shape_.layer.back().has_experts());
  for (const LayerShape& layer : shape_.layer) kind_of(layer);
  std::vector<std::int64_t> of_kind(kinds_.size(), 0);
  for (std::int64_t number = 0; number < layers - (last_is_narrow_ ? 1 : 0); ++number) {
    const std::size_t of_layer = kind_of(shape_.at(number));
    of_kind[of_layer] += number >= forward_only() ? 1 : 0;
    std::erase_if(full_kinds_, [&](const FullKind& before) { return before.kind == of_layer; });
    full_kinds_.push_back({of_layer, number >= forward_only(), of_kind});
  }
}

std::size_t ActivationBytes::kind_of(const LayerShape& layer) {
  const auto alike = [&](const LayerShape& other) {
    return other.mixer == layer.mixer && other.mlp == layer.mlp && other.inner == layer.inner &&
           other.norm_place == layer.norm_place && other.is_read_later == layer.is_read_later;
  };
  const auto found = std::ranges::find_if(kinds_, alike);
  if (found != kinds_.end()) return static_cast<std::size_t>(found - kinds_.begin());
  kinds_.push_back(layer);
  return kinds_.size() - 1;
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
  return trained_ * per_parameter + held_ * bytes.activation + narrow_ * narrow + quantised_ + own * state + rooms;
}

std::int64_t ActivationBytes::constant() const {
  const std::int64_t process = setting_.device.opened ? kOpenedCudaBytes
                               : setting_.device.cuda ? kCudaBytes
                                                      : kProcessBytes + (rounds_weight_gradients_ ? kCodeBytes : 0);
  return process + communicator_bytes_ + setting_.held.beside_bytes + model();
}

std::int64_t ActivationBytes::number_bytes(std::int64_t rows, std::int64_t path_rows) const {
  const std::int64_t of_experts =
      shape_.experts_per_token * (kSortedBytesPerSlot + shape_.expert_layers() * kChoiceBytesPerSlot);
  std::int64_t kept = 0;
  if (kind_.kept_ids > 0) {
    kept = kBytesPerKeptId * std::min(kind_.kept_ids, head_block_rows(rows) * kind_.largest_kept_set);
    if (!setting_.device.cuda) kept += kRecordBytesPerKeptId * kind_.kept_ids;
  }
  return rows * (kNumberBytesPerOutput + of_experts) + (rows + path_rows) * kNumberBytesPerRow + kHeadSumBytes + kept;
}

std::int64_t ActivationBytes::scratch(std::int64_t rows, std::int64_t path_rows, int threads) const {
  const ElementBytes bytes = element_bytes(dtype_);
  const std::int64_t numbers = number_bytes(rows, path_rows);
  const ScratchRows of{setting_.device, dtype_, rows, path_rows, threads, kind_.gradients};
  if (setting_.device.cuda) {
    GpuScratch most;
    for (const LayerShape& layer : kinds_) {
      const GpuScratch one = layer.mixer->gpu_scratch(of);
      most = {std::max(most.given_back, one.given_back), std::max(most.kept, one.kept)};
    }
    return numbers + most.kept + most.given_back;
  }
  std::int64_t widest = std::max(shape_.value_head ? 1 : shape_.vocabulary, 2 * shape_.expert_inner);
  std::map<MixerKind, std::int64_t> of_kind;  // threads keep it
  for (const LayerShape& layer : kinds_) {
    widest = std::max({widest, layer.mixer->widest_row(), 2 * layer.inner});
    std::int64_t& most = of_kind[layer.mixer->kind()];
    most = std::max(most, layer.mixer->cpu_scratch(of));
  }
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
  else if ((narrow_ > 0 && dtype_ == DType::float32) || quantised_ > 0)
    of_products += shape_.hidden * widest * bytes.accumulator;  // one matrix, widened (ops/cpu/product_operations.cpp)
  std::int64_t of_mixers = 0;
  for (const auto& [kind, of_one] : of_kind) of_mixers += of_one;
  return numbers + of_products + of_mixers + (widens_products_ ? panels : 0);
}

namespace {

// The bytes of one layer's rows, in the forms in which a path may hold them.
class LayerBytes {
 public:
  LayerBytes(const BufferSizes& sizes, const LayerShape& layer, bool latents, std::int64_t cp)
      : leaves_rows(leaves(*layer.mixer, cp)), block_(sizes, layer), latents_(latents) {}

  std::int64_t of(std::int64_t rows, bool sums) const {
    for (const Known& known : known_)
      if (known.rows == rows && known.sums == sums) return known.bytes;
    known_.push_back({rows, sums, PathBuffers(block_, rows, sums, latents_).peak()});
    return known_.back().bytes;
  }
  std::int64_t stored(std::int64_t rows, bool sums) const {
    std::int64_t bytes = 0;  // every buffer begins at a page
    const PathBuffers buffers(block_, rows, sums, latents_);
    for (const Buffer& buffer : buffers.buffers()) bytes += whole_pages(buffer.bytes);
    return bytes;
  }
  bool is_for(const LayerShape& layer) const { return block_.layer.mixer == layer.mixer; }

  const PathLeaves leaves_rows;

 private:
  struct Known {
    std::int64_t rows;
    bool sums;
    std::int64_t bytes;
  };
  BlockShape block_;
  bool latents_;
  mutable std::vector<Known> known_;  // a few
};

// The same for all layers: those with one mixer have the same bytes, which are counted once.
class BytesOfLayers {
 public:
  BytesOfLayers(const BufferSizes& sizes, bool latents, std::int64_t cp) : sizes_(sizes), latents_(latents), cp_(cp) {}

  const LayerBytes& at(std::int64_t number) {
    const LayerShape& layer = sizes_.shape.at(number);
    const auto found = std::ranges::find_if(kinds_, [&](const LayerBytes& kind) { return kind.is_for(layer); });
    return found != kinds_.end() ? *found : kinds_.emplace_back(sizes_, layer, latents_, cp_);
  }

 private:
  const BufferSizes sizes_;
  bool latents_;
  std::int64_t cp_;
  std::list<LayerBytes> kinds_;
};

bool is_awake(const ModelShape& shape, const PathPlan& path, std::int64_t layer) {
  return layer < path.layers_awake || shape.at(layer).is_read_later;
}

}  // namespace

PathBytes path_bytes(const BufferSizes& sizes, PathRows rows, bool with_gradients, const PathPlan& path,
                     std::int64_t cp) {
  const ModelShape& shape = sizes.shape;
  const bool latents = path.latents && rows.all > 0;
  BytesOfLayers bytes(sizes, latents, cp);
  std::int64_t room = 0, asleep = 0;
  for (std::int64_t i = 0; i < shape.layers(); ++i) {
    const LayerShape& layer = shape.at(i);
    if (latents && layer.mixer->narrows_path())
      room = std::max(room, PathRoomBuffers({sizes, layer}, rows.all, with_gradients).peak());
    asleep += bytes.at(i).leaves_rows == PathLeaves::all_rows && !is_awake(shape, path, i);
  }
  const bool sleeps = asleep > 0 && rows.all > 0;
  PathBytes out{room, room, 0, sleeps};
  // Where layers sleep: the buffers that they share, without and with sums.
  std::int64_t shared = 0, shared_with_sums = 0, gathered = 0;
  const std::int64_t of_rank = PathShares{rows.all, cp}.most();
  for (std::int64_t i = 0; i < shape.layers(); ++i) {
    const LayerBytes& layer = bytes.at(i);
    const PathLeaves leaves_rows = layer.leaves_rows;
    if (leaves_rows == PathLeaves::no_rows) continue;
    // Layers without a backward have no accumulators where all are in memory.
    const bool sums = with_gradients && (sleeps || shape.at(i).is_read_later || i >= shape.trained.first_layer);
    std::int64_t held = 0;
    if (leaves_rows == PathLeaves::window_rows) {
      held = layer.of(rows.window, sums);
    } else if (!sleeps || is_awake(shape, path, i)) {
      held = layer.of(rows.all, sums);
    } else if (path.sharded) {
      held = layer.of(of_rank, with_gradients);
      gathered = std::max(gathered, layer.of(cp * of_rank, with_gradients));
    } else {
      out.stored += layer.stored(rows.all, with_gradients);
    }
    if (sleeps && leaves_rows == PathLeaves::all_rows && !is_awake(shape, path, i)) {
      shared = std::max(shared, layer.of(rows.all, false));
      shared_with_sums = std::max(shared_with_sums, layer.of(rows.all, with_gradients));
    }
    out.forward += held, out.backward += held;
  }
  out.forward += path.sharded ? shared_with_sums + gathered : shared;
  out.backward += path.sharded ? shared_with_sums + gathered : shared_with_sums;
  return out;
}

PathTraffic ActivationBytes::path_traffic_of(std::int64_t rows_above, std::int64_t own_rows,
                                             const PathPlan& path) const {
  PathTraffic out;
  const std::int64_t of_others = own_rows - (own_rows + cp_ - 1) / cp_, rows = rows_above + own_rows;
  BytesOfLayers bytes(sizes(), path.latents, cp_);
  for (std::int64_t i = 0; i < shape_.layers(); ++i) {
    const Mixer& mixer = shape_.mixer(i);
    const bool stays = is_awake(shape_, path, i) || path.sharded;
    if (stays && !mixer.narrows_path()) continue;
    const LayerBytes& layer = bytes.at(i);
    if (layer.leaves_rows != PathLeaves::all_rows) continue;
    const bool backward = kind_.gradients && i >= shape_.trained.first_layer;
    if (mixer.narrows_path()) {
      std::int64_t expanded = of_others * (backward ? 3 : 1);
      if (path.latents) expanded += rows_above + (backward ? 3 * rows_above + own_rows : 0);
      out.flops += 2.0 * static_cast<double>(mixer.path_kinds(true)[0].width * mixer.expanded_width() * expanded);
    }
    if (stays) continue;
    const auto sums = [&](std::int64_t of) { return layer.of(of, true) - layer.of(of, false); };
    out.forward += layer.of(rows_above, false) + layer.of(own_rows, false);
    if (kind_.gradients) out.backward += layer.of(rows, true) + sums(rows_above);
  }
  return out;
}

std::int64_t ActivationBytes::read_later(const Work& work, bool wave, bool gradients) const {
  std::int64_t sum = 0;
  for (const LayerShape& layer : shape_.layer) {
    const bool in_path = !wave && cp_ == 1 && layer.mixer->window() == 0;
    if (layer.is_read_later && !in_path) sum += ReadLaterBuffers(block(layer), work.rows, gradients).peak();
  }
  if (!gradients) return sum + LayerInputBuffers(sizes(), work.rows).peak();
  return sum + (shape_.trained.input ? LayerInputGradients(sizes(), work.rows).peak() : 0);
}

std::int64_t ActivationBytes::head(const Work& work, bool with_gradient) const {
  if (shape_.value_head || !has_outputs_) return 0;
  return head_buffers(work.outputs, with_gradient).peak();
}

HeadBuffers ActivationBytes::head_buffers(std::int64_t outputs, bool with_gradient) const {
  const DeviceTraits& device = setting_.device;
  const HeadWay way{.ahead = device.cuda || device.queued,
                    .writes_sums = device.cuda || device.writes_sums,
                    .rank = adapted_head(shape_).rank};
  return {element_bytes(dtype_), outputs, shape_.vocabulary, shape_.hidden, with_gradient, way};
}

std::int64_t ActivationBytes::head_block_rows(std::int64_t outputs) const {
  return shape_.value_head ? outputs : std::max<std::int64_t>(1, head_buffers(outputs, false).block_rows);
}

namespace {

std::int64_t mixer_half_saved(const BlockShape& block, const BlockRows& rows) {
  return MixerHalfSaved(block, rows).peak() + block.layer.mixer->saved_bytes(block, rows);
}

}  // namespace

std::int64_t ActivationBytes::members(const LayerShape& layer, const BlockRows& rows) const {
  return mixer_half_saved(block(layer), rows) + MlpSavedBuffers(block(layer), rows).peak();
}

std::int64_t ActivationBytes::members(const LayerShape& layer, const BlockRows& rows, ItemState state,
                                      ItemState::Member place) const {
  return (state.attention == place ? mixer_half_saved(block(layer), rows) : 0) +
         (state.mlp == place ? MlpSavedBuffers(block(layer), rows).peak() : 0);
}

std::int64_t ActivationBytes::full_members(const Work& work, const FullKind& upto, ItemState state, bool wave,
                                           ItemState::Member place) const {
  std::int64_t sum = 0;
  for (std::size_t kind = 0; kind < kinds_.size(); ++kind)
    if (const std::int64_t layers = upto.of_kind[kind]; layers > 0)
      sum += layers * members(kinds_[kind], full(work, wave, kinds_[kind]), state, place);
  return sum;
}

void ActivationBytes::for_each_layer_kind(const Work& work, bool wave, auto&& visit) const {
  for (const FullKind& kind : full_kinds_)
    if (kind.has_backward) visit(kinds_[kind.kind], full(work, wave, kinds_[kind.kind]));
  if (last_is_narrow_ && saved_layers() > 0) visit(shape_.layer.back(), narrow(work, wave));
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
  return in_full +
         (last_is_narrow_ && saved_layers() > 0 ? members(shape_.layer.back(), narrow(work, wave), state, place) : 0);
}

std::int64_t ActivationBytes::in_flight(std::int64_t stored_bytes) const {
  return stored_bytes == 0 || setting_.device.cuda ? 0 : chunks_in_flight(stored_bytes) * kSpillChunkBytes;
}

std::int64_t ActivationBytes::saved_of(const Work& work, ItemState state, bool wave) const {
  std::int64_t sum = outputs_held(work) + read_later(work, wave, false);
  if (!kind_.gradients) return sum;
  // The stream behind a last layer that runs all rows stays in any case.
  sum += (state.stream == kKeep ? streams() : streams() - saved_layers()) * stream(work.rows);
  return sum + saved_members(work, state, wave, kKeep);
}

std::int64_t ActivationBytes::forward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t after) const {
  const std::int64_t outputs = outputs_held(work) + read_later(work, wave, false) + states(wave);
  const bool keeps = kind_.gradients;
  // Bytes held while a layer runs: all its members, the kept members of the layers before it, and inputs of layers: all
  // so far and the next one's, without inputs stored away. A forward alone has one input, which serves all layers.
  const auto in_layer = [&](const LayerShape& layer, const BlockRows& rows, bool saved, std::int64_t streams,
                            std::int64_t kept) {
    const std::int64_t inputs = !saved ? 1 : state.stream == kKeep ? streams : rows.narrow ? 1 : 2;
    const std::int64_t before = saved ? kept - members(layer, rows, state, kKeep) : 0;
    return outputs + inputs * stream(work.rows) + before + members(layer, rows) + layer_forward(layer, rows, true);
  };
  std::int64_t most = std::max(after + head(work, keeps && !kind_.whole_rollout),
                               outputs + stream(work.rows) + LookUpBuffers(sizes(), work.rows, false).peak());
  for (const FullKind& kind : full_kinds_)
    most = std::max(most, in_layer(kinds_[kind.kind], full(work, wave, kinds_[kind.kind]), keeps && kind.has_backward,
                                   kind.layers() + 1, full_members(work, kind, state, wave, kKeep)));
  if (!last_is_narrow_) return most;
  return std::max(most, in_layer(shape_.layer.back(), narrow(work, wave), keeps && saved_layers() > 0, streams(),
                                 saved_members(work, state, wave, kKeep)));
}

std::int64_t ActivationBytes::backward_peak_of(const Work& work, ItemState state, bool wave, std::int64_t saved) const {
  std::int64_t most = 0;
  for_each_layer_kind(work, wave, [&](const LayerShape& layer, const BlockRows& rows) {
    std::int64_t bytes = layer_backward_bytes(block(layer), rows);
    if (state.recomputes_attention())
      bytes = std::max(bytes, layer_forward(layer, rows, false));
    else if (state.recomputes_mlp())
      bytes = std::max(bytes, mlp_forward_bytes(block(layer), rows, false));
    if (state.stream == kOffload) bytes += stream(work.rows);
    most = std::max(most, bytes + members(layer, rows) - members(layer, rows, state, kKeep));
  });
  const std::int64_t gradients =
      DecoderBackwardBuffers(sizes(), work.rows, has_outputs_ ? work.outputs : 0).peak() + read_later(work, wave, true);
  if (shape_.trained.input) most = std::max(most, LookUpBuffers(sizes(), work.rows, true).peak());
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
