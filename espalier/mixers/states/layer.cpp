#include "espalier/mixers/states/layer.h"

#include <ATen/core/Tensor.h>

namespace espalier {
namespace {

const StateMixer& mixer_of(const LayerContext& c) { return static_cast<const StateMixer&>(*c.own.mixer); }

}  // namespace

StateMixerTensors::StateMixerTensors(const LayerContext& c, const SavedBuffers& saved) {
  const StateMixerSaved declared(mixer_of(c), c.block(), c.block_rows());
  projected_TW = saved[declared.projected_TW], mixed_TV = saved[declared.mixed_TV];
  latents_TC = saved[declared.latents_TC];
}

SavedBuffers take_state_mixer_saved(const LayerContext& c) {
  return {c.arena, StateMixerSaved(mixer_of(c), c.block(), c.block_rows()), c.dtype()};
}

StateMixerForward::StateMixerForward(const LayerContext& c, const LayerSaved& saved)
    : c_(c),
      layer_saved_(saved),
      saved_(c, saved.mixer),
      declared_(mixer_of(c), c.block(), c.block_rows(), 0),
      held_(c.arena, declared_, c.dtype()) {}

void StateMixerForward::project(const at::Tensor& input_TM) const {
  c_.products.linear(saved_.projected_TW, input_TM, c_.weights.mixer.products.front());
}

void StateMixerForward::mix() {
  using Stage = StateMixerForwardBuffers::Stage;
  held_.enter(Stage::projection);
  project(c_.mixer_input(layer_saved_, held_[declared_.normed_TM]));
  held_.enter(Stage::rows);
  const TimedPart timed(c_.timer, part::kAttention);
  c_.kv.run_states(c_.layer, held_[declared_.states_FN], [&](const std::vector<StateRun>& runs) { run(runs); });
}

at::Tensor StateMixerForward::mixed() {
  held_.enter(StateMixerForwardBuffers::Stage::output);
  return c_.continuing_rows(finished(held_[declared_.gated_TV]), held_[declared_.mixed_RV]);
}

StateMixerBackward::StateMixerBackward(const LayerContext& c, const LayerSaved& saved, const PartViews& grads)
    : c_(c),
      layer_saved_(saved),
      saved_(c, saved.mixer),
      grads_(grads),
      declared_(mixer_of(c), c.block(), c.block_rows(), {}),
      held_(c.arena, declared_, c.dtype()) {
  held_.enter(Stage::mlp);
}

at::Tensor StateMixerBackward::mixed_again() {
  return c_.continuing_rows(finished(held_[declared_.gated_TV]), held_[declared_.mixed_RV]);
}

at::Tensor StateMixerBackward::grad_mixed() {
  return held_[c_.narrow ? declared_.grad_mixed_RV : declared_.grad_mixed_TV];
}

// From the gradient of finished rows to that of projected rows.
void StateMixerBackward::add_rows(const at::Tensor& grad_projected_TW) {
  const TimedPart timed(c_.timer, part::kAttention);
  const at::Tensor& grad_mixed_TV = held_[declared_.grad_mixed_TV];
  add_finish(grad_mixed_TV, grad_projected_TW);
  c_.ops.zero(held_[declared_.grad_states_FN]);
  c_.kv.run_states_backward(
      c_.ops, c_.layer, held_[declared_.states_FN], held_[declared_.grad_states_FN],
      [&](const std::vector<StateRun>& runs) { run(runs); },
      [&](const std::vector<StateRun>& runs) { add_run(runs, grad_mixed_TV, grad_projected_TW); });
}

at::Tensor StateMixerBackward::add() {
  if (c_.narrow) {
    c_.ops.zero(held_[declared_.grad_mixed_TV]);
    if (c_.continuing() > 0)
      c_.ops.add_scatter(held_[declared_.grad_mixed_RV], c_.input.output_row_O, held_[declared_.grad_mixed_TV]);
  }
  held_.enter(Stage::rows);
  const at::Tensor grad_projected_TW = held_[declared_.grad_projected_TW];
  add_rows(grad_projected_TW);
  held_.enter(Stage::input);
  const at::Tensor& grad_input_TM = held_[declared_.normed_TM];  // until then the input itself
  add_project(grad_projected_TW, c_.mixer_input_again(layer_saved_, grad_input_TM, reads_input()), grad_input_TM);
  return grad_input_TM;
}

void StateMixerBackward::add_project(const at::Tensor& grad_projected_TW, const at::Tensor& input_TM,
                                     const at::Tensor& grad_input_TM) const {
  const Projection& weights = c_.weights.mixer.products.front();
  c_.products.add_linear_grad_weight(grads_.products.front(), weights, grad_projected_TW, input_TM,
                                     held_[declared_.projected_product]);
  c_.products.linear_grad_input(grad_input_TM, grad_projected_TW, weights);
}

}  // namespace espalier
