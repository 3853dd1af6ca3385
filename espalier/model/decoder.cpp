#include "espalier/model/decoder.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/device/held_buffers.h"
#include "espalier/device/scalar_type.h"

namespace espalier {

Decoder::Decoder(const LocalShape& shape, ModelViews weights, Device& device, const Mesh& mesh)
    : local_(shape), shape_(shape.own()), weights_(std::move(weights)), device_(device), mesh_(mesh) {}

void Decoder::reserve_positions(std::int64_t positions) {
  if (positions <= rotary_.positions()) return;
  const RotaryTables made = make_rotary_tables(shape_, positions, accumulator_type(dtype()));
  rotary_ = {device_.adopt(made.cos), device_.adopt(made.sin)};
}

BlockShape Decoder::block() const {
  return {shape_, element_bytes(dtype()), device_.operations().rounds_weight_gradients(dtype())};
}

bool Decoder::last_block_is_narrow(const ModelInput& rows) const {
  return !rows.routes_all_rows || !shape_.has_experts(shape_.layers - 1);
}

LayerContext Decoder::context(const ModelInput& rows, KvPath& path, std::int64_t layer, Arena& arena,
                              Timer* timer) const {
  return {shape_, weights_.layers[static_cast<std::size_t>(layer)],         rotary_, rows,  path,
          layer,  layer + 1 == shape_.layers && last_block_is_narrow(rows), arena,   timer, mesh_};
}

void Decoder::keep_choices(const LayerContext& c, const LayerSaved& layer, const at::Tensor& choice_LTK) const {
  const auto& kinds = shape_.expert_layer;
  const std::int64_t l = std::count(kinds.begin(), kinds.begin() + c.layer, std::uint8_t{1});
  const at::Tensor& choice_RK = layer.router_choice_RK;
  c.ops.convert(choice_RK, choice_LTK.select(0, l).narrow(0, 0, choice_RK.size(0)));
}

DecoderSaved Decoder::forward(const ModelInput& rows, KvPath& path, Keep keep, Arena& arena, Timer* timer,
                              LayerKeeper* keeper) const {
  const TimedPart timed(timer, part::kRows);
  const Operations& ops = device_.operations();
  DecoderSaved out;
  out.keep = keep;
  if (rows.outputs() > 0) {
    const ItemBuffers item(block(), rows.outputs(), false);
    out.final_stream_OM = arena.take(item, item.final_stream_OM, dtype());
    out.normed_OM = arena.take(item, item.normed_OM, dtype());
    out.final_rstd_O = arena.take(item, item.final_rstd_O, dtype());
  }
  const StreamBuffer stream(block(), rows.rows());
  // A narrow last layer has a row of them for each temperature, which may be more than there are rows.
  if (rows.keeps_choices)
    out.choice_LTK = device_.allocate(
        {shape_.expert_layers(), std::max(rows.rows(), rows.outputs()), shape_.experts_per_token}, at::kInt);
  const std::int64_t kept_from = arena.in_use();
  std::int64_t saved_from = kept_from;  // the layer's input, and what it saves
  at::Tensor stream_TM = arena.take(stream, stream.stream_TM, dtype());
  ops.look_up(weights_.embedding_VM, rows.id_T, local_.vocabulary().begin, stream_TM);
  mesh_.tp.add_over_ranks(stream_TM);
  for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
    const LayerContext c = context(rows, path, layer, arena, timer);
    at::Tensor next = c.last ? out.final_stream_OM : stream_TM;
    if (keep == Keep::streams && !c.last) next = arena.take(stream, stream.stream_TM, dtype());
    const std::int64_t mark = arena.in_use();
    LayerSaved saved = take_layer_saved(c, stream_TM);
    const std::int64_t saved_to = arena.in_use();
    if (keep == Keep::everything && !c.last) next = arena.take(stream, stream.stream_TM, dtype());
    layer_forward(c, saved, next);
    if (rows.keeps_choices && saved.router_choice_RK.defined()) keep_choices(c, saved, out.choice_LTK);
    if (keep != Keep::everything) {
      arena.release_to(mark);
      saved = LayerSaved{};
      saved.stream_in_TM = stream_TM;
    }
    if (keep != Keep::nothing) out.layers.push_back(std::move(saved));
    if (keeper != nullptr) keeper->put_away(layer, {saved_from, saved_to});
    saved_from = saved_to;
    stream_TM = next;
  }
  if (!last_block_is_narrow(rows) && rows.outputs() > 0) ops.gather(stream_TM, rows.output_row_O, out.final_stream_OM);
  if (keep == Keep::nothing) arena.release_to(kept_from);
  if (rows.outputs() > 0)
    ops.norm(out.final_stream_OM, weights_.final_norm_M, shape_.rms_norm_eps, out.normed_OM, out.final_rstd_O);
  return out;
}

void Decoder::add_backward(const ModelInput& rows, KvPath& path, DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                           ModelViews& grads, Arena& arena, Timer* timer, LayerKeeper* keeper) const {
  const TimedPart timed(timer, part::kRows);
  const Operations& ops = device_.operations();
  const DecoderBackwardBuffers declared(block(), rows.rows(), rows.outputs());
  HeldBuffers held(arena, declared, dtype());
  held.enter(0);
  at::Tensor grad_stream = held[declared.grad_stream_OM];
  const at::Tensor& grad_stream_TM = held[declared.grad_stream_TM];
  ops.zero(grad_stream);
  if (rows.outputs() > 0)
    ops.add_norm_backward(saved.final_stream_OM, weights_.final_norm_M, saved.final_rstd_O, grad_normed_OM, grad_stream,
                          grads.final_norm_M);
  if (!last_block_is_narrow(rows)) {
    ops.zero(grad_stream_TM);
    ops.add_scatter(grad_stream, rows.output_row_O, grad_stream_TM);
    grad_stream = grad_stream_TM;
  }
  for (std::int64_t layer = shape_.layers - 1; layer >= 0; --layer) {
    const LayerContext c = context(rows, path, layer, arena, timer);
    LayerSaved& kept = saved.layers[static_cast<std::size_t>(layer)];
    const ArenaScope layer_scope(arena);
    if (keeper != nullptr) keeper->bring_back(layer);
    if (saved.keep == Keep::streams) {
      kept = take_layer_saved(c, kept.stream_in_TM);
      layer_forward(c, kept, at::Tensor());
    }
    // A narrow last block widens the gradient from output rows to all rows.
    add_layer_backward(c, kept, grad_stream, grad_stream_TM, grads.layers[static_cast<std::size_t>(layer)]);
    if (keeper != nullptr) keeper->let_go(layer);
    grad_stream = grad_stream_TM;
  }
  // As nn.Embedding(padding_idx): what comes to a look-up of this token is dropped.
  if (std::ranges::find(rows.id, shape_.pad_token) != rows.id.end())
    ops.zero_rows(grad_stream, rows.id_T, shape_.pad_token);
  ops.add_look_up_backward(grad_stream, rows.id_T, local_.vocabulary().begin, grads.embedding_VM);
}

}  // namespace espalier
