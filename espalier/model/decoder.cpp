#include "espalier/model/decoder.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/device/held_buffers.h"
#include "espalier/device/scalar_type.h"
#include "espalier/model/expert_mlp.h"

namespace espalier {
Decoder::Decoder(const LocalShape& shape, ModelViews weights, Device& device, const Mesh& mesh)
    : local_(shape), shape_(shape.own()), weights_(std::move(weights)), device_(device), mesh_(mesh) {
  if ((shape_.has_states() || shape_.attention.output_gate) && device.operations().delta_rule == nullptr)
    throw UnsupportedError({text_of("--device ", device.name()), "cpu for layers whose rows carry a state (delta rule)",
                            shape_.architecture, "Take --device cpu"});
  if (shape_.has_latents() && device.operations().expand_heads == nullptr)
    throw UnsupportedError(
        {text_of("--device ", device.name()), "cpu for latent attention", shape_.architecture, "Take --device cpu"});
}

void Decoder::reserve_positions(std::int64_t positions) {
  if (positions <= rotary_.positions()) return;
  const auto tables = [&](const Rope& rope, std::int64_t rotary_dim) {
    const RotaryTables made = make_rotary_tables(rope, rotary_dim, positions, accumulator_type(dtype()));
    return RotaryTables{device_.adopt(made.cos), device_.adopt(made.sin)};
  };
  rotary_ = tables(shape_.rope(), shape_.rotary_dim());
  if (shape_.has_window_rope) window_rotary_ = tables(shape_.window_rope, shape_.rotary_dim());
  if (!shape_.unrotated_layer.empty()) no_rotary_ = tables(Rope{}, 0);
}

const RotaryTables& Decoder::rotary(std::int64_t layer) const {
  if (!shape_.rotates(layer)) return no_rotary_;
  return shape_.has_window_rope && shape_.is_window_layer(layer) ? window_rotary_ : rotary_;
}

// As transformers rounds it: to the dtype of the embedding.
double Decoder::embedding_factor() const {
  const double factor = shape_.scales.embedding;
  return dtype() == at::kBFloat16 ? static_cast<double>(static_cast<float>(bfloat16(static_cast<float>(factor))))
                                  : factor;
}

BlockShape Decoder::block() const {
  return {shape_, element_bytes(dtype()), device_.operations().rounds_weight_gradients(dtype())};
}

bool Decoder::last_block_is_narrow(const ModelInput& input) const {
  return is_last_stage() && (!input.all_rows_choose || !shape_.has_experts(shape_.layers - 1));
}

LayerContext Decoder::context(const DecoderRun& run, std::int64_t layer, const RouterPenalties* penalties) const {
  const bool narrow = layer + 1 == shape_.layers && last_block_is_narrow(run.input);
  return {shape_,        weights_.layers[static_cast<std::size_t>(layer)],
          rotary(layer), run.input,
          run.kv,        layer,
          narrow,        run.arena,
          run.timer,     mesh_,
          penalties};
}

bool Decoder::only_joins(const LayerContext& c) const {
  const std::int64_t rows = c.narrow ? c.input.outputs() : c.input.rows();
  return rows == 0 && shape_.has_experts(c.layer) && mesh_.ep.size() > 1;
}

// Ranks of other trees have some of the experts. Those of one tree never join for experts alone.
bool Decoder::joins_experts(std::int64_t layer) const {
  return shape_.has_experts(layer) && mesh_.degrees.ep > mesh_.degrees.tp;
}

// What follows brings units in the order of forward and add_backward: these are collectives.
void Decoder::join_forward(Arena& arena, KvSource& kv) const {
  const ModelInput no_rows;
  if (is_first_stage()) weights_.bring(Unit::kEmbedding);
  weights_.ask(0);
  for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
    bring_layer(layer, layer + 1);
    kv.begin_forward(layer);
    if (joins_experts(layer)) join_experts_forward(context({no_rows, kv, arena}, layer));
  }
  if (is_last_stage()) weights_.bring(Unit::kFinalNorm);
}

void Decoder::join_backward(ModelViews& grads, Arena& arena, KvSource& kv) const {
  const ModelInput no_rows;
  const auto join = [&](std::int64_t unit) { grads.bring(unit), grads.let_go(unit); };
  if (is_last_stage()) weights_.bring(Unit::kFinalNorm);
  if (has_backward()) weights_.ask(shape_.layers - 1);
  if (is_last_stage()) join(Unit::kFinalNorm);
  for (std::int64_t layer = shape_.layers - 1; layer >= first_layer(); --layer) {
    bring_layer(layer, layer > first_layer() ? layer - 1 : shape_.layers);
    grads.bring(layer);
    kv.begin_backward(layer);
    if (joins_experts(layer))
      join_experts_backward(context({no_rows, kv, arena}, layer), grads.layers[static_cast<std::size_t>(layer)]);
    grads.let_go(layer);
  }
  kv.end_backward();
  if (is_first_stage() && shape_.trained.input) join(Unit::kEmbedding);
}

// The layer after it comes while this one computes.
void Decoder::bring_layer(std::int64_t layer, std::int64_t next) const {
  weights_.bring(layer);
  if (next < shape_.layers) weights_.ask(next);
}

void Decoder::keep_choices(const LayerContext& c, const LayerSaved& layer, const at::Tensor& choice_LTK) const {
  const auto& kinds = shape_.expert_layer;
  const std::int64_t l = std::count(kinds.begin(), kinds.begin() + c.layer, std::uint8_t{1});
  const at::Tensor& choice_RK = layer.router_choice_RK;
  c.ops.convert(choice_RK, choice_LTK.select(0, l).narrow(0, 0, choice_RK.size(0)));
}

void Decoder::enter(const ModelInput& input, const at::Tensor& stream_TM) const {
  if (is_first_stage()) weights_.bring(Unit::kEmbedding);
  weights_.ask(0);
  if (!is_first_stage()) return mesh_.pp.receive(stream_TM, mesh_.pp.rank() - 1);
  device_.operations().look_up(weights_.embedding_VM, input.id_T, local_.vocabulary().begin, stream_TM);
  mesh_.tp.add_over_ranks(stream_TM);
  if (shape_.scales.embedding != 1) device_.operations().add_scaled({}, stream_TM, embedding_factor(), stream_TM);
}

void Decoder::leave(const ModelInput& input, const at::Tensor& stream_TM, const DecoderSaved& saved) const {
  if (!is_last_stage()) return mesh_.pp.send(stream_TM, mesh_.pp.rank() + 1);
  weights_.bring(Unit::kFinalNorm);
  if (input.outputs() == 0) return;
  const Operations& ops = device_.operations();
  if (!last_block_is_narrow(input)) ops.gather(stream_TM, input.output_row_O, saved.final_stream_OM);
  ops.norm(saved.final_stream_OM, final_norm(weights_), shape_.rms_norm_eps, saved.normed_OM, saved.final_rstd_O);
}

at::Tensor Decoder::enter_backward(const ModelInput& input, const DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                                   ModelViews& grads, const at::Tensor& grad_stream_OM,
                                   const at::Tensor& grad_stream_TM) const {
  if (is_last_stage()) weights_.bring(Unit::kFinalNorm);
  if (has_backward()) weights_.ask(shape_.layers - 1);
  if (!is_last_stage()) {
    if (has_backward()) mesh_.pp.receive(grad_stream_TM, mesh_.pp.rank() + 1);
    return grad_stream_TM;
  }
  const Operations& ops = device_.operations();
  grads.bring(Unit::kFinalNorm);
  ops.zero(grad_stream_OM);
  if (input.outputs() > 0)
    ops.add_norm_backward(saved.final_stream_OM, final_norm(weights_), saved.final_rstd_O, grad_normed_OM,
                          grad_stream_OM, final_norm(grads));
  grads.let_go(Unit::kFinalNorm);
  if (last_block_is_narrow(input)) return grad_stream_OM;
  ops.zero(grad_stream_TM);
  ops.add_scatter(grad_stream_OM, input.output_row_O, grad_stream_TM);
  return grad_stream_TM;
}

void Decoder::leave_backward(const ModelInput& input, const at::Tensor& grad_stream_TM, ModelViews& grads) const {
  if (!shape_.trained.input) return;
  if (!is_first_stage()) return mesh_.pp.send(grad_stream_TM, mesh_.pp.rank() - 1);
  const Operations& ops = device_.operations();
  // As nn.Embedding(padding_idx): what comes to a look-up of this token is dropped.
  if (std::ranges::find(input.id, shape_.pad_token) != input.id.end())
    ops.zero_rows(grad_stream_TM, input.id_T, shape_.pad_token);
  if (shape_.scales.embedding != 1) ops.add_scaled({}, grad_stream_TM, embedding_factor(), grad_stream_TM);
  grads.bring(Unit::kEmbedding);
  ops.add_look_up_backward(grad_stream_TM, input.id_T, local_.vocabulary().begin, grads.embedding_VM);
  grads.let_go(Unit::kEmbedding);
}

namespace {

// Where the members of a layer begin, and where they end, in the arena.
struct MemberPlaces {
  std::int64_t stream, attention, mlp, end;
};

// The one range of them that is stored away (ItemState::possible).
Arena::Range stored_range(ItemState state, const MemberPlaces& places) {
  const std::int64_t begin = state.stream == kOffload      ? places.stream
                             : state.attention == kOffload ? places.attention
                                                           : places.mlp;
  const std::int64_t end = state.mlp == kOffload         ? places.end
                           : state.attention == kOffload ? places.mlp
                                                         : places.attention;
  return {begin, end};
}

}  // namespace

DecoderSaved Decoder::forward(const DecoderRun& run, std::optional<ItemState> state) const {
  const TimedPart timed(run.timer, part::kRows);
  const ModelInput& input = run.input;
  Arena& arena = run.arena;
  DecoderSaved out;
  out.state = state.value_or(SavedState::recompute);
  if (is_last_stage() && input.outputs() > 0) {
    const ItemBuffers item(block(), input.outputs(), false);
    out.final_stream_OM = arena.take(item, item.final_stream_OM, dtype());
    out.normed_OM = arena.take(item, item.normed_OM, dtype());
    out.final_rstd_O = arena.take(item, item.final_rstd_O, dtype());
  }
  const StreamBuffer stream(block(), input.rows());
  // A narrow last layer has a row of them for each temperature, which may be more than there are rows.
  if (input.keeps_choices)
    out.choice_LTK = device_.allocate(
        {shape_.expert_layers(), std::max(input.rows(), input.outputs()), shape_.experts_per_token}, at::kInt);
  const std::int64_t kept_from = arena.in_use();
  std::int64_t saved_from = kept_from;  // the layer's input, and what it saves
  at::Tensor stream_TM = arena.take(stream, stream.stream_TM, dtype());
  enter(input, stream_TM);
  for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
    bring_layer(layer, layer + 1);
    const LayerContext c = context(run, layer);
    const bool saves = state && layer >= first_layer();
    const bool attention_stays = saves && !out.state.recomputes_attention(),
               mlp_stays = saves && !out.state.recomputes_mlp();
    LayerSaved saved;
    saved.stream_in_TM = stream_TM;
    // What stays lies below the next layer's input, what is made again above it.
    const std::int64_t attention_from = arena.in_use();
    if (attention_stays) take_attention_saved(c, saved);
    const std::int64_t mlp_from = arena.in_use();
    if (mlp_stays) take_mlp_saved(c, saved);
    const std::int64_t saved_to = arena.in_use();
    at::Tensor next = c.narrow ? out.final_stream_OM : stream_TM;
    if (saves && !c.narrow) next = arena.take(stream, stream.stream_TM, dtype());
    LayerSaved all = saved;
    const std::int64_t mark = arena.in_use();
    if (!attention_stays) take_attention_saved(c, all);
    if (!mlp_stays) take_mlp_saved(c, all);
    run.kv.begin_forward(layer);
    layer_forward(c, all, next);
    if (only_joins(c)) join_experts_forward(c);
    if (input.keeps_choices && all.router_choice_RK.defined()) keep_choices(c, all, out.choice_LTK);
    arena.release_to(mark);
    stream_TM = next;
    if (!saves) continue;
    out.layers.push_back(std::move(saved));
    if (run.keeper != nullptr)
      run.keeper->put_away(layer - first_layer(),
                           stored_range(out.state, {saved_from, attention_from, mlp_from, saved_to}));
    saved_from = saved_to;
  }
  leave(input, stream_TM, out);
  if (out.layers.empty()) arena.release_to(kept_from);
  return out;
}

void Decoder::add_backward(const DecoderRun& run, DecoderSaved& saved, const at::Tensor& grad_normed_OM,
                           ModelViews& grads, const RouterPenalties& penalties) const {
  const TimedPart timed(run.timer, part::kRows);
  const ModelInput& input = run.input;
  const DecoderBackwardBuffers declared(block(), input.rows(), is_last_stage() ? input.outputs() : 0);
  HeldBuffers held(run.arena, declared, dtype());
  held.enter(0);
  const at::Tensor& grad_stream_TM = held[declared.grad_stream_TM];
  at::Tensor grad_stream =
      enter_backward(input, saved, grad_normed_OM, grads, held[declared.grad_stream_OM], grad_stream_TM);
  for (std::int64_t layer = shape_.layers - 1; layer >= first_layer(); --layer) {
    bring_layer(layer, layer > first_layer() ? layer - 1 : shape_.layers);
    grads.bring(layer);
    const LayerContext c = context(run, layer, &penalties);
    const std::int64_t nth = layer - first_layer();  // of those that were saved
    LayerSaved& kept = saved.layers[static_cast<std::size_t>(nth)];
    const ArenaScope layer_scope(run.arena);
    if (run.keeper != nullptr) run.keeper->bring_back(nth);
    run.kv.begin_backward(layer);
    layer_forward_again(c, kept, saved.state);
    if (only_joins(c)) join_experts_backward(c, grads.layers[static_cast<std::size_t>(layer)]);
    // A narrow last block widens the gradient from output rows to all rows.
    add_layer_backward(c, kept, grad_stream, grad_stream_TM, grads.layers[static_cast<std::size_t>(layer)]);
    grads.let_go(layer);
    if (run.keeper != nullptr) run.keeper->let_go(nth);
    grad_stream = grad_stream_TM;
  }
  run.kv.end_backward();
  leave_backward(input, grad_stream, grads);
}

}  // namespace espalier
