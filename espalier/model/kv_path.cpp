#include "espalier/model/kv_path.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/operations.h"

namespace espalier {

namespace {

// As a tensor with a dimension for heads; undefined stays undefined.
at::Tensor by_heads(const at::Tensor& rows_PW, std::int64_t heads) {
  return rows_PW.defined() ? rows_PW.view({rows_PW.size(0), heads, rows_PW.size(1) / heads}) : rows_PW;
}

at::Tensor rows_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t end) {
  return tensor.defined() ? tensor.narrow(0, begin, end - begin) : tensor;
}

}  // namespace

KvPath::KvPath(const ModelShape& shape, std::int64_t capacity, at::ScalarType dtype, bool with_gradients, Arena& arena,
               PathKeeper* keeper, std::int64_t layers_awake, std::int64_t window_capacity, bool latents)
    : device_(arena.device()),
      capacity_(capacity),
      window_capacity_(window_capacity),
      window_rows_(window_capacity == kAllRows ? 0 : shape.window),
      layers_(static_cast<std::size_t>(shape.layers)) {
  const BlockShape block{shape, element_bytes(dtype), false};
  const PathBuffers with(block, capacity, with_gradients, latents), without(block, capacity, false, latents),
      with_window(block, window_capacity, with_gradients), without_window(block, window_capacity, false);
  if (latents) take_room(block, with_gradients, dtype, arena);
  if (keeper != nullptr && layers_awake < shape.layers)
    window_.emplace(*keeper, layers_awake, shape.trained.first_layer);
  std::array<PathKeeper::Member, PathKeeper::kKinds> members;
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    state_.push_back(shape.states_in(0, static_cast<std::int64_t>(layer)));
    window_of_.push_back(window_rows_ > 0 ? shape.window_of(static_cast<std::int64_t>(layer)) : 0);
    if (shape.mixer_of(static_cast<std::int64_t>(layer)) != Mixer::attention) {
      if (window_) window_->add_layer_without_rows();
      continue;
    }
    const bool has_backward = window_ || static_cast<std::int64_t>(layer) >= shape.trained.first_layer;
    const bool keeps_last = window_of_.back() > 0;
    const PathBuffers& declared = keeps_last     ? has_backward ? with_window : without_window
                                  : has_backward ? with
                                                 : without;
    const BufferList::Place places[] = {declared.first_PW, declared.second_PW, declared.grad_first_PW,
                                        declared.grad_second_PW};
    for (int kind = 0; kind < PathKeeper::kKinds && (keeps_last || !(window_ && window_->shares_places())); ++kind) {
      const std::int64_t begin = arena.in_use();
      const at::Tensor taken_PW = arena.take(declared, places[kind], dtype);
      members[static_cast<std::size_t>(kind)] = {
          static_cast<PathKeeper::Kind>(kind), 0, {begin, arena.in_use()}, taken_PW};
    }
    const auto rows_PW = [&](std::size_t kind) { return members[kind].rows_PW; };
    const auto heads = [&](std::size_t kind) { return by_heads(rows_PW(kind), shape.kv_heads); };
    if (latents)
      layers_[layer] = room_, latents_[layer] = {rows_PW(0), rows_PW(1), rows_PW(2), rows_PW(3)};
    else
      layers_[layer] = {heads(0), heads(1), heads(2), heads(3)};
    for (PathKeeper::Member& member : members) member.layer = static_cast<std::int64_t>(layer);
    if (window_ && keeps_last)
      window_->add_layer_without_rows();
    else if (window_)
      window_->add_layer(members);
  }
}

void KvPath::take_room(const BlockShape& block, bool with_gradients, at::ScalarType dtype, Arena& arena) {
  const PathRoomBuffers room(block, capacity_, with_gradients);
  const auto taken = [&](BufferList::Place place) { return arena.take(room, place, dtype); };
  const auto heads = [&](BufferList::Place place) { return by_heads(taken(place), block.shape.kv_heads); };
  room_ = {heads(room.k_PW), heads(room.v_PW), heads(room.grad_k_PW), heads(room.grad_v_PW)};
  latent_block_ = {taken(room.kv_BW), taken(room.grad_latent_BC), taken(room.sum_latent_BC), taken(room.sum_rotary_BK)};
  latents_.resize(layers_.size());
}

void KvPath::push(std::int64_t rows, std::int64_t contributions, const States& states) {
  ESPALIER_INTERNAL(rows_ + rows <= capacity_, rows_, " + ", rows, " rows on a path of ", capacity_);
  const std::int64_t kept_begin = trunks_.empty() ? 0 : trunks_.back().kept_end,
                     kept_end = kept_begin + window_rows_kept(rows_, rows_ + rows, window_rows_);
  ESPALIER_INTERNAL(window_rows_ == 0 || kept_end <= window_capacity_, kept_end, " rows kept for windows of ",
                    window_capacity_);
  trunks_.push_back(
      {rows_, rows_ + rows, kept_begin, kept_end, contributions, std::vector<std::int64_t>(layers_.size(), 0), states});
  if (states.grad_states_LN.defined()) device_.operations().zero(states.grad_states_LN);
  rows_ += rows;
  for (std::int64_t layer = 0; layer < static_cast<std::int64_t>(layers_.size()); ++layer) {
    if (!keeps_all(layer))
      zero_gradients(layer, kept_begin, kept_end);
    else if (!window_ || !window_->sleeps(layer))
      zero_gradients(layer, rows_ - rows, rows_);
  }
}

void KvPath::pop() {
  ESPALIER_INTERNAL(!trunks_.empty());
  rows_ = trunks_.back().begin;
  trunks_.pop_back();
  room_rows_ = std::min(room_rows_, rows_);
  if (window_) window_->forget_from(rows_);
}

void KvPath::begin_forward(std::int64_t layer) {
  if (window_ && rows_ > 0) window_->begin_forward(layer, rows_);
}

void KvPath::begin_backward(std::int64_t layer, std::int64_t rows_above) {
  if (!window_ || rows_ == 0) return;
  const std::int64_t valid = window_->begin_backward(layer, rows_, rows_above);
  if (keeps_all(layer)) zero_gradients(layer, valid, rows_);
}

void KvPath::end_backward(std::int64_t layer) {
  if (window_) window_->end_backward(layer);
}

void KvPath::zero_gradients(std::int64_t layer, std::int64_t begin, std::int64_t end) {
  if (carries_latents()) {
    const Latents rows = slice_of_latents(layer, begin, end);
    if (begin == end || !rows.grad_latent_PC.defined()) return;
    device_.operations().zero(rows.grad_latent_PC);
    device_.operations().zero(rows.grad_rotary_PK);
    return;
  }
  const Layer rows = slice(layer, begin, end);
  if (begin == end || !rows.grad_k.defined()) return;
  device_.operations().zero(rows.grad_k);
  device_.operations().zero(rows.grad_v);
}

KvPath::Layer KvPath::slice(std::int64_t layer, std::int64_t begin, std::int64_t end) const {
  const Layer& whole = layers_.at(static_cast<std::size_t>(layer));
  const auto rows = [&](const at::Tensor& tensor) { return rows_of(tensor, begin, end); };
  return {rows(whole.k), rows(whole.v), rows(whole.grad_k), rows(whole.grad_v)};
}

KvPath::Latents KvPath::slice_of_latents(std::int64_t layer, std::int64_t begin, std::int64_t end) const {
  const Latents& whole = latents_.at(static_cast<std::size_t>(layer));
  const auto rows = [&](const at::Tensor& tensor) { return rows_of(tensor, begin, end); };
  return {rows(whole.latent_PC), rows(whole.rotary_PK), rows(whole.grad_latent_PC), rows(whole.grad_rotary_PK)};
}
KvPath::Latents KvPath::latents(std::int64_t layer, std::int64_t rows) const {
  return slice_of_latents(layer, 0, rows);
}
KvPath::Latents KvPath::top_latents(std::int64_t layer) const {
  return slice_of_latents(layer, trunks_.back().begin, trunks_.back().end);
}

const KvPath::Trunk& KvPath::trunk_above(std::int64_t rows) const {
  const auto found = std::ranges::find(trunks_, rows, &Trunk::end);
  ESPALIER_INTERNAL(found != trunks_.end(), "no trunk ends at path row ", rows);
  return *found;
}

KvPath::Layer KvPath::path(std::int64_t layer, std::int64_t rows) const {
  if (keeps_all(layer) || rows == 0) return slice(layer, 0, rows);
  const std::int64_t end = trunk_above(rows).kept_end;
  return slice(layer, end - (rows - first_row(rows)), end);
}
KvPath::Layer KvPath::top(std::int64_t layer) const {
  const Trunk& trunk = trunks_.back();
  return keeps_all(layer) ? slice(layer, trunk.begin, trunk.end) : slice(layer, trunk.kept_begin, trunk.kept_end);
}

KvPath::State KvPath::state_of(std::int64_t layer, std::size_t trunks) const {
  if (trunks == 0) return {};
  const States& all = trunks_.at(trunks - 1).states;
  const std::int64_t at = number_of_state(layer);
  return {all.states_LN[at], all.grad_states_LN.defined() ? all.grad_states_LN[at] : at::Tensor()};
}

KvPath::State KvPath::state_above(std::int64_t layer, std::int64_t rows) const {
  std::size_t trunks = 0;
  while (trunks < trunks_.size() && trunks_[trunks].end <= rows) ++trunks;
  return state_of(layer, trunks);
}

void KvPath::count_contribution(std::int64_t layer, std::int64_t rows) {
  for (Trunk& trunk : trunks_) {
    if (trunk.end > rows) break;
    std::int64_t& arrived = trunk.arrived.at(static_cast<std::size_t>(layer));
    ++arrived;
    ESPALIER_INTERNAL(arrived <= trunk.expected, "layer ", layer, ": contribution ", arrived, " of ", trunk.expected);
  }
}

void KvPath::expect_complete(std::int64_t layer) const {
  const Trunk& trunk = trunks_.back();
  ESPALIER_INTERNAL_EQ(trunk.arrived.at(static_cast<std::size_t>(layer)), trunk.expected,
                       "gradient contributions of layer ", layer);
}

}  // namespace espalier
