#include "espalier/model/decoder_pass.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "espalier/model/expert_mlp.h"
#include "espalier/model/layer_inputs.h"

namespace espalier {
namespace {

// True if the layer runs no row of these past keys and values, while other ranks of ep may send theirs.
bool only_joins(const LayerContext& c) {
  const std::int64_t rows = c.narrow ? c.input.outputs() : c.input.rows();
  return rows == 0 && c.own.has_experts() && c.mesh.ep.size() > 1;
}

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

DecoderForward::DecoderForward(const Decoder& decoder, const DecoderRun& run, std::optional<ItemState> state,
                               DecoderSaved& saved)
    : decoder_(decoder),
      run_(run),
      saves_(state.has_value()),
      saved_(saved),
      stream_(decoder.sizes(), run.input.rows()) {
  const ModelInput& input = run.input;
  Arena& arena = run.arena;
  saved = DecoderSaved();
  saved.state = state.value_or(SavedState::recompute);
  if (decoder.local().is_last_stage() && input.outputs() > 0) {
    const ItemBuffers item(decoder.sizes(), input.outputs(), false);
    saved.final_stream_OM = arena.take(item, item.final_stream_OM, decoder.dtype());
    saved.normed_OM = arena.take(item, item.normed_OM, decoder.dtype());
    saved.final_rstd_O = arena.take(item, item.final_rstd_O, decoder.dtype());
  }
  // A narrow last layer has a row of them for each temperature, which may be more than there are rows.
  if (input.keeps_choices)
    saved.choice_LTK = decoder.device().allocate(
        {decoder.shape().expert_layers(), std::max(input.rows(), input.outputs()), decoder.shape().experts_per_token},
        at::kInt);
  hold_rows();
  kept_from_ = saved_from_ = arena.in_use();
  stream_TM_ = arena.take(stream_, stream_.stream_TM, decoder.dtype());
}

// Takes room for rows that later layers read until the backward ends.
void DecoderForward::hold_rows() {
  const ModelShape& shape = decoder_.shape();
  const std::int64_t rows = run_.input.rows();
  for (std::int64_t layer = 0; layer < shape.layers(); ++layer) {
    if (!shape.at(layer).is_read_later || !run_.kv.takes_rows(layer)) continue;
    const ReadLaterBuffers declared({decoder_.sizes(), shape.at(layer)}, rows, false);
    const auto take = [&](BufferList::Place place) { return run_.arena.take(declared, place, decoder_.dtype()); };
    saved_.read_later.push_back({layer, {take(declared.k_TW), take(declared.v_TW)}});
    run_.kv.hold(layer, saved_.read_later.back().rows);
  }
  const LayerInputBuffers inputs(decoder_.sizes(), rows);
  saved_.layer_inputs_TW = run_.arena.take(inputs, inputs.inputs_TW, decoder_.dtype());
  saved_.embedded_TM = run_.arena.take(inputs, inputs.embedded_TM, decoder_.dtype());
  run_.layer_inputs_TW = saved_.layer_inputs_TW;
}

void DecoderForward::run(const Stop& stop) {
  if (stop.kind == Stop::Kind::embedding) return look_up();
  return stop.is_layer() ? run_layer(stop.unit) : normalise();
}

void DecoderForward::look_up() {
  const Operations& ops = decoder_.device().operations();
  ops.look_up(decoder_.weights().embedding_VM, run_.input.id_T, decoder_.local().vocabulary().begin, stream_TM_);
  decoder_.mesh().tp.add_over_ranks(stream_TM_);
  if (decoder_.shape().scales.embedding != 1) ops.add_scaled({}, stream_TM_, decoder_.embedding_factor(), stream_TM_);
  if (!saved_.layer_inputs_TW.defined()) return;
  ops.convert(stream_TM_, saved_.embedded_TM);
  look_up_layer_inputs(decoder_, run_, saved_.embedded_TM, saved_.layer_inputs_TW);
}

void DecoderForward::run_layer(std::int64_t layer) {
  Arena& arena = run_.arena;
  const LayerContext c = decoder_.layer(run_, layer);
  const bool saves = saves_ && layer >= decoder_.first_layer();
  const bool attention_stays = saves && !saved_.state.recomputes_attention(),
             mlp_stays = saves && !saved_.state.recomputes_mlp();
  LayerSaved saved;
  saved.stream_in_TM = stream_TM_;
  // Tensors that stay lie below the next layer's input, recomputed tensors above it.
  const std::int64_t attention_from = arena.in_use();
  if (attention_stays) take_mixer_saved(c, saved);
  const std::int64_t mlp_from = arena.in_use();
  if (mlp_stays) take_mlp_saved(c, saved);
  const std::int64_t saved_to = arena.in_use();
  at::Tensor next = c.narrow ? saved_.final_stream_OM : stream_TM_;
  if (saves && !c.narrow) next = arena.take(stream_, stream_.stream_TM, decoder_.dtype());
  LayerSaved all = saved;
  const std::int64_t mark = arena.in_use();
  if (!attention_stays) take_mixer_saved(c, all);
  if (!mlp_stays) take_mlp_saved(c, all);
  layer_forward(c, all, next);
  if (only_joins(c)) join_experts_forward(c);
  if (run_.input.keeps_choices && all.router_choice_RK.defined()) keep_choices(c, all);
  arena.release_to(mark);
  stream_TM_ = next;
  if (!saves) return;
  saved_.layers.push_back(std::move(saved));
  saved_.offload.push_back(stored_range(saved_.state, {saved_from_, attention_from, mlp_from, saved_to}));
  saved_from_ = saved_to;
}

void DecoderForward::keep_choices(const LayerContext& c, const LayerSaved& layer) const {
  const std::int64_t l = c.shape.expert_layers_before(c.layer);
  const at::Tensor& choice_RK = layer.router_choice_RK;
  c.ops.convert(choice_RK, saved_.choice_LTK.select(0, l).narrow(0, 0, choice_RK.size(0)));
}

void DecoderForward::normalise() {
  const ModelInput& input = run_.input;
  if (input.outputs() == 0) return;
  const Operations& ops = decoder_.device().operations();
  if (!decoder_.last_block_is_narrow(input)) ops.gather(stream_TM_, input.output_row_O, saved_.final_stream_OM);
  ops.norm(saved_.final_stream_OM, decoder_.final_norm(decoder_.weights()), decoder_.shape().rms_norm_eps,
           saved_.normed_OM, saved_.final_rstd_O);
}

void DecoderForward::finish() {
  if (saved_.layers.empty()) run_.arena.release_to(kept_from_);
}

DecoderBackward::DecoderBackward(const Decoder& decoder, const DecoderRun& run, DecoderSaved& saved,
                                 const at::Tensor& grad_normed_OM, ModelViews& grads, const RouterPenalties& penalties)
    : decoder_(decoder),
      run_(run),
      saved_(saved),
      grad_normed_OM_(grad_normed_OM),
      grads_(grads),
      penalties_(penalties),
      declared_(decoder.sizes(), run.input.rows(), decoder.local().is_last_stage() ? run.input.outputs() : 0),
      held_(run.arena, declared_, decoder.dtype()) {
  held_.enter(0);
  grad_stream_TM_ = grad_stream_ = held_[declared_.grad_stream_TM];
  hold_gradients();
}

void DecoderBackward::hold_gradients() {
  const ModelShape& shape = decoder_.shape();
  const Operations& ops = decoder_.device().operations();
  const std::int64_t rows = run_.input.rows();
  for (const HeldRows& of : saved_.read_later) {
    const ReadLaterBuffers declared({decoder_.sizes(), shape.at(of.layer)}, rows, true);
    const auto take = [&](BufferList::Place place) { return run_.arena.take(declared, place, decoder_.dtype()); };
    run_.kv.hold_gradients(ops, of.layer, {take(declared.k_TW), take(declared.v_TW)});
  }
  run_.layer_inputs_TW = saved_.layer_inputs_TW;
  if (!saved_.layer_inputs_TW.defined() || !shape.trained.input) return;
  const LayerInputGradients declared(decoder_.sizes(), rows);
  run_.grad_layer_inputs_TW = run_.arena.take(declared, declared.grad_inputs_TW, decoder_.dtype());
  ops.zero(run_.grad_layer_inputs_TW);
}

void DecoderBackward::run(const Stop& stop) {
  if (stop.kind == Stop::Kind::embedding) return look_up();
  return stop.is_layer() ? run_layer(stop.unit) : normalise();
}

void DecoderBackward::normalise() {
  const ModelInput& input = run_.input;
  const Operations& ops = decoder_.device().operations();
  const at::Tensor& grad_stream_OM = held_[declared_.grad_stream_OM];
  ops.zero(grad_stream_OM);
  if (input.outputs() > 0)
    ops.add_norm_backward(saved_.final_stream_OM, decoder_.final_norm(decoder_.weights()), saved_.final_rstd_O,
                          grad_normed_OM_, grad_stream_OM, decoder_.final_norm(grads_));
  if (decoder_.last_block_is_narrow(input)) {
    grad_stream_ = grad_stream_OM;
    return;
  }
  ops.zero(grad_stream_TM_);
  ops.add_scatter(grad_stream_OM, input.output_row_O, grad_stream_TM_);
}

void DecoderBackward::run_layer(std::int64_t layer) {
  const LayerContext c = decoder_.layer(run_, layer, &penalties_);
  LayerSaved& kept = saved_.layers[static_cast<std::size_t>(layer - decoder_.first_layer())];
  const LayerViews& grads = grads_.layers[static_cast<std::size_t>(layer)];
  const ArenaScope layer_scope(run_.arena);
  layer_forward_again(c, kept, saved_.state);
  if (only_joins(c)) join_experts_backward(c, grads);
  // A narrow last block widens the gradient from output rows to all rows.
  add_layer_backward(c, kept, grad_stream_, grad_stream_TM_, grads);
  grad_stream_ = grad_stream_TM_;
}

void DecoderBackward::look_up() {
  const Operations& ops = decoder_.device().operations();
  const ModelInput& input = run_.input;
  const ModelShape& shape = decoder_.shape();
  if (run_.grad_layer_inputs_TW.defined())
    add_layer_inputs_backward(decoder_, run_, saved_.embedded_TM, run_.grad_layer_inputs_TW, grad_stream_, grads_);
  if (!grads_.embedding_VM.defined()) return;
  // As nn.Embedding(padding_idx): what comes to a look-up of this token is dropped.
  if (std::ranges::find(input.id, shape.pad_token) != input.id.end())
    ops.zero_rows(grad_stream_, input.id_T, shape.pad_token);
  if (shape.scales.embedding != 1) ops.add_scaled({}, grad_stream_, decoder_.embedding_factor(), grad_stream_);
  ops.add_look_up_backward(grad_stream_, input.id_T, decoder_.local().vocabulary().begin, grads_.embedding_VM);
}

DecoderSaved decoder_forward(const Decoder& decoder, const DecoderRun& run) {
  const TimedPart timed(run.timer, part::kRows);
  DecoderSaved saved;
  DecoderForward forward(decoder, run, {}, saved);
  walk(decoder_stops(decoder.local(), Pass::forward), {decoder.gathering()},
       [&](const Stop& stop) { forward.run(stop); });
  forward.finish();
  return saved;
}

}  // namespace espalier
