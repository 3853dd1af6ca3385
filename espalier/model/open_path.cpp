#include "espalier/model/open_path.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <span>

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

OpenPath::OpenPath(const ModelShape& shape, std::int64_t capacity, at::ScalarType dtype, bool with_gradients,
                   Arena& arena, PathKeeper* keeper, std::int64_t layers_awake, std::int64_t window_capacity,
                   bool latents)
    : device_(arena.device()),
      capacity_(capacity),
      window_capacity_(window_capacity),
      first_layer_(static_cast<std::size_t>(shape.trained.first_layer)),
      window_rows_(window_capacity == kAllRows ? 0 : shape.window()),
      layers_(shape.layer.size()),
      carries_latents_(latents) {
  const BufferSizes sizes{shape, element_bytes(dtype), false};
  if (latents) {
    const auto narrow =
        std::ranges::find_if(shape.layer, [](const LayerShape& one) { return one.mixer->narrows_path(); });
    // A stage of pp may have none of these layers.
    if (narrow != shape.layer.end()) take_room({sizes, *narrow}, with_gradients, dtype, arena);
  }
  if (keeper != nullptr && layers_awake < shape.layers())
    window_.emplace(*keeper, layers_awake, shape.trained.first_layer);
  take_layers(shape, sizes, with_gradients, dtype, arena);
}

namespace {

// The buffers that several layers, from this one on, take in turn: as much as the largest of them needs. `stays`:
// layers with buffers of their own.
const LayerShape* largest_of(const BufferSizes& sizes, std::int64_t first, auto&& stays, std::int64_t rows,
                             bool with_gradients, bool latents) {
  const LayerShape* largest = nullptr;
  std::int64_t most = -1;
  for (const LayerShape& layer : std::span(sizes.shape.layer).subspan(static_cast<std::size_t>(first)))
    if (stays(layer))
      continue;
    else if (const std::int64_t bytes = PathBuffers({sizes, layer}, rows, with_gradients, latents).peak(); bytes > most)
      most = bytes, largest = &layer;
  return largest;
}

}  // namespace

void OpenPath::take_layers(const ModelShape& shape, const BufferSizes& sizes, bool with_gradients, at::ScalarType dtype,
                           Arena& arena) {
  std::vector<PathKeeper::Member> shared;  // members of layers that use the buffers of each other
  const auto never_sleeps = [&](const LayerShape& layer) {
    return layer.is_read_later || (window_rows_ > 0 && layer.mixer->window() > 0);
  };
  for (std::int64_t number = 0; number < shape.layers(); ++number) {
    const LayerShape& own = shape.at(number);
    LayerRows& layer = layers_[static_cast<std::size_t>(number)];
    layer.first_state = shape.states_before(number), layer.state = own.mixer->state();
    if (const std::int64_t source = own.mixer->source(); source >= 0)
      layers_[static_cast<std::size_t>(source)].readers.push_back(static_cast<std::size_t>(number));
    window_of_.push_back(window_rows_ > 0 ? own.mixer->window() : 0);
    const std::vector<PathKind> kinds = own.mixer->path_kinds(carries_latents_);
    const bool keeps_last = window_of_.back() > 0, stays = never_sleeps(own);
    if (kinds.empty()) {
      if (window_) window_->add_layer_without_rows();
      continue;
    }
    const bool sums = with_gradients && (window_ || own.is_read_later || number >= shape.trained.first_layer),
               shares = !stays && window_ && window_->shares_places();
    const std::int64_t rows = keeps_last ? window_capacity_ : capacity_;
    const bool first_that_sleeps = window_ && !stays && !shares && !window_->next_stays();
    const LayerShape& taken = first_that_sleeps && window_->keeper_has_one_place()
                                  ? *largest_of(sizes, number, never_sleeps, rows, sums, carries_latents_)
                                  : own;
    const PathBuffers room({sizes, taken}, rows, sums, carries_latents_);
    std::vector<PathKeeper::Member> members;
    for (std::size_t i = 0; i < 2 * kinds.size(); ++i) {
      PathKeeper::Member member{.layer = number, .number = i, .kinds = kinds.size()};
      member.name = i < kinds.size() ? kinds[i].name : kinds[i - kinds.size()].gradient_name;
      if (shares) {
        member.range = shared[i].range, member.rows_PW = shared[i].rows_PW;
      } else {
        const std::int64_t begin = arena.in_use();
        if (i < room.rows_PW.size()) member.rows_PW = arena.take(room, room.rows_PW[i], dtype);
        member.range = {begin, arena.in_use()};
      }
      members.push_back(std::move(member));
    }
    if (first_that_sleeps) shared = members;
    for (PathKeeper::Member& member : members) {  // of a buffer that is large enough for all layers
      if (!member.rows_PW.defined()) continue;
      const std::int64_t width = kinds[member.number % kinds.size()].width;
      if (member.rows_PW.size(1) != width)
        member.rows_PW = member.rows_PW.view({-1}).narrow(0, 0, rows * width).view({rows, width});
    }
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      layer.kinds.push_back({members[i].rows_PW, members[kinds.size() + i].rows_PW});
      layer.heads.push_back(kinds[i].heads);
    }
    if (window_ && stays)
      window_->add_layer_without_rows();
    else if (window_)
      window_->add_layer(members);
  }
}

void OpenPath::take_room(const BlockShape& block, bool with_gradients, at::ScalarType dtype, Arena& arena) {
  const PathRoomBuffers room(block, capacity_, with_gradients);
  const std::int64_t of_heads = block.layer.mixer->path_kinds(false).front().heads;
  const auto taken = [&](BufferList::Place place) { return arena.take(room, place, dtype); };
  const auto heads = [&](BufferList::Place place) { return by_heads(taken(place), of_heads); };
  room_ = {heads(room.k_PW), heads(room.v_PW), heads(room.grad_k_PW), heads(room.grad_v_PW)};
  latent_block_ = {taken(room.kv_BW), taken(room.grad_latent_BC), taken(room.sum_latent_BC), taken(room.sum_rotary_BK)};
}

void OpenPath::push(std::int64_t rows, std::int64_t contributions, const States& states) {
  ESPALIER_INTERNAL(rows_ + rows <= capacity_, rows_, " + ", rows, " rows on a path of ", capacity_);
  const std::int64_t kept_begin = trunks_.empty() ? 0 : trunks_.back().kept_end,
                     kept_end = kept_begin + window_rows_kept(rows_, rows_ + rows, window_rows_);
  ESPALIER_INTERNAL(window_rows_ == 0 || kept_end <= window_capacity_, kept_end, " rows kept for windows of ",
                    window_capacity_);
  trunks_.push_back(
      {rows_, rows_ + rows, kept_begin, kept_end, contributions, std::vector<std::int64_t>(layers_.size(), 0), states});
  if (states.grad_states_N.defined()) device_.operations().zero(states.grad_states_N);
  rows_ += rows;
  for (std::int64_t layer = 0; layer < static_cast<std::int64_t>(layers_.size()); ++layer) {
    if (!keeps_all(layer))
      zero_gradients(layer, kept_begin, kept_end);
    else if (!window_ || !window_->sleeps(layer))
      zero_gradients(layer, rows_ - rows, rows_);
  }
}

void OpenPath::pop() {
  ESPALIER_INTERNAL(!trunks_.empty());
  rows_ = trunks_.back().begin;
  trunks_.pop_back();
  room_rows_ = std::min(room_rows_, rows_);
  if (window_) window_->forget_from(rows_);
}

void OpenPath::begin_forward(std::int64_t layer) {
  if (window_ && rows_ > 0) window_->begin_forward(layer, rows_);
}

void OpenPath::begin_backward(std::int64_t layer, std::int64_t rows_above) {
  if (!window_ || rows_ == 0) return;
  const std::int64_t valid = window_->begin_backward(layer, rows_, rows_above);
  if (keeps_all(layer)) zero_gradients(layer, valid, rows_);
}

void OpenPath::end_backward(std::int64_t layer) {
  if (window_) window_->end_backward(layer);
}

void OpenPath::zero_gradients(std::int64_t layer, std::int64_t begin, std::int64_t end) {
  if (begin == end) return;
  for (std::size_t kind = 0; kind < layers_.at(static_cast<std::size_t>(layer)).kinds.size(); ++kind)
    if (const Rows rows = slice(layer, kind, begin, end); rows.gradients.defined())
      device_.operations().zero(rows.gradients);
}

OpenPath::Rows OpenPath::slice(std::int64_t layer, std::size_t kind, std::int64_t begin, std::int64_t end) const {
  const std::vector<Rows>& kinds = layers_.at(static_cast<std::size_t>(layer)).kinds;
  if (kind >= kinds.size()) return {};
  return {espalier::rows_of(kinds[kind].values, begin, end), espalier::rows_of(kinds[kind].gradients, begin, end)};
}

OpenPath::Layer OpenPath::heads_of(std::int64_t layer, std::int64_t begin, std::int64_t end) const {
  if (carries_latents()) {
    const auto rows = [&](const at::Tensor& tensor) { return espalier::rows_of(tensor, begin, end); };
    return {rows(room_.k), rows(room_.v), rows(room_.grad_k), rows(room_.grad_v)};
  }
  const Rows keys = slice(layer, 0, begin, end), values = slice(layer, 1, begin, end);
  const std::vector<std::int64_t>& heads = layers_.at(static_cast<std::size_t>(layer)).heads;
  if (heads.empty()) return {};
  return {by_heads(keys.values, heads[0]), by_heads(values.values, heads[1]), by_heads(keys.gradients, heads[0]),
          by_heads(values.gradients, heads[1])};
}

OpenPath::Latents OpenPath::latents_of(std::int64_t layer, std::int64_t begin, std::int64_t end) const {
  const Rows latents = slice(layer, 0, begin, end), shared_keys = slice(layer, 1, begin, end);
  return {latents.values, shared_keys.values, latents.gradients, shared_keys.gradients};
}
OpenPath::Latents OpenPath::latents(std::int64_t layer, std::int64_t rows) const { return latents_of(layer, 0, rows); }
OpenPath::Latents OpenPath::top_latents(std::int64_t layer) const {
  return latents_of(layer, trunks_.back().begin, trunks_.back().end);
}

std::vector<at::Tensor> OpenPath::rows_of(std::int64_t layer) const {
  std::vector<at::Tensor> out;
  for (const Rows& rows : layers_.at(static_cast<std::size_t>(layer)).kinds) out.push_back(rows.values);
  return out;
}

const OpenPath::Trunk& OpenPath::trunk_above(std::int64_t rows) const {
  const auto found = std::ranges::find(trunks_, rows, &Trunk::end);
  ESPALIER_INTERNAL(found != trunks_.end(), "no trunk ends at path row ", rows);
  return *found;
}

OpenPath::Layer OpenPath::path(std::int64_t layer, std::int64_t rows) const {
  if (keeps_all(layer) || rows == 0) return heads_of(layer, 0, rows);
  const std::int64_t end = trunk_above(rows).kept_end;
  return heads_of(layer, end - (rows - first_row(rows)), end);
}
OpenPath::Layer OpenPath::top(std::int64_t layer) const {
  const Trunk& trunk = trunks_.back();
  return keeps_all(layer) ? heads_of(layer, trunk.begin, trunk.end) : heads_of(layer, trunk.kept_begin, trunk.kept_end);
}

at::Tensor OpenPath::state_in(const at::Tensor& states_N, std::int64_t layer) const {
  if (!states_N.defined()) return {};
  const LayerRows& of_layer = layers_.at(static_cast<std::size_t>(layer));
  return states_N.narrow(0, of_layer.first_state, of_layer.state);
}

OpenPath::State OpenPath::state_of(std::int64_t layer, std::size_t trunks) const {
  if (trunks == 0) return {};
  const States& all = trunks_.at(trunks - 1).states;
  return {state_in(all.states_N, layer), state_in(all.grad_states_N, layer)};
}

OpenPath::State OpenPath::state_above(std::int64_t layer, std::int64_t rows) const {
  std::size_t trunks = 0;
  while (trunks < trunks_.size() && trunks_[trunks].end <= rows) ++trunks;
  return state_of(layer, trunks);
}

void OpenPath::count_contribution(std::int64_t layer, std::int64_t rows) {
  for (Trunk& trunk : trunks_) {
    if (trunk.end > rows) break;
    std::int64_t& arrived = trunk.arrived.at(static_cast<std::size_t>(layer));
    ++arrived;
    ESPALIER_INTERNAL(arrived <= trunk.expected, "layer ", layer, ": contribution ", arrived, " of ", trunk.expected);
  }
}

void OpenPath::expect_complete(std::int64_t layer) const {
  const Trunk& trunk = trunks_.back();
  const auto expect = [&](std::size_t of) {
    if (of < first_layer_) return;
    ESPALIER_INTERNAL_EQ(trunk.arrived.at(of), trunk.expected, "gradient contributions of layer ", of);
  };
  const auto own = static_cast<std::size_t>(layer);
  expect(own);
  for (const std::size_t reader : layers_.at(own).readers) expect(reader);
}

}  // namespace espalier
