#include "espalier/mixers/recurrence/layer.h"

#include <ATen/ATen.h>

namespace espalier {
namespace {

// The tensors of the mixer, or their gradients.
struct Views {
  explicit Views(const PartViews& views)
      : conv_CK(views.tensors[Recurrence::conv]),
        conv_bias_C(views.tensors[Recurrence::conv_bias]),
        a_log_H(views.tensors[Recurrence::a_log]),
        dt_bias_H(views.tensors[Recurrence::dt_bias]),
        skip_H(views.tensors[Recurrence::skip]),
        mixed_norm(views.tensors[Recurrence::mixed_norm]) {}

  const at::Tensor &conv_CK, &conv_bias_C, &a_log_H, &dt_bias_H, &skip_H, &mixed_norm;
};

at::Tensor by_channels(const at::Tensor& conv, const RecurrenceShape& s) {
  return conv.defined() ? conv.view({s.channels(), s.kernel}) : conv;
}

DeltaRuleProblem problem_of(const LayerContext& c, const RecurrenceTensors& saved, const std::vector<StateRun>& runs) {
  const Views w(c.weights.mixer);
  const RecurrenceShape& s = recurrence_of(c).shape;
  return {s, saved.projected_TW, by_channels(w.conv_CK, s), w.a_log_H, w.dt_bias_H, w.conv_bias_C, w.skip_H, runs};
}

GatedNormProblem gate_of(const LayerContext& c, const RecurrenceTensors& saved) {
  return {recurrence_of(c).shape, c.shape.rms_norm_eps, saved.mixed_TV, saved.projected_TW,
          Views(c.weights.mixer).mixed_norm};
}

}  // namespace

RecurrenceTensors::RecurrenceTensors(const LayerContext& c, const SavedBuffers& saved) {
  const RecurrenceSaved declared(recurrence_of(c).shape, c.block(), c.block_rows());
  projected_TW = saved[declared.projected_TW], mixed_TV = saved[declared.mixed_TV];
  gate_latents_TC = saved[declared.gate_latents_TC];
}

SavedBuffers take_recurrence_saved(const LayerContext& c) {
  return {c.arena, RecurrenceSaved(recurrence_of(c).shape, c.block(), c.block_rows()), c.dtype()};
}

RecurrenceForward::RecurrenceForward(const LayerContext& c, const LayerSaved& saved)
    : c_(c),
      layer_saved_(saved),
      saved_(c, saved.mixer),
      declared_(recurrence_of(c), c.block(), c.block_rows(), 0),
      held_(c.arena, declared_, c.dtype()) {}

void RecurrenceForward::project(const at::Tensor& input_TM) const {
  c_.products.linear(saved_.projected_TW, input_TM, c_.weights.mixer.products.front());
}

void RecurrenceForward::mix() {
  using Stage = RecurrenceForwardBuffers::Stage;
  held_.enter(Stage::projection);
  project(c_.mixer_input(layer_saved_, held_[declared_.normed_TM]));
  held_.enter(Stage::rows);
  const TimedPart timed(c_.timer, part::kAttention);
  c_.kv.run_states(c_.layer, held_[declared_.states_FN], [&](const std::vector<StateRun>& runs) {
    c_.ops.delta_rule(problem_of(c_, saved_, runs), saved_.mixed_TV);
  });
}

at::Tensor RecurrenceForward::mixed() {
  held_.enter(RecurrenceForwardBuffers::Stage::output);
  const at::Tensor& gated_TV = held_[declared_.gated_TV];
  const TimedPart timed(c_.timer, part::kAttention);
  c_.ops.gated_norm(gate_of(c_, saved_), gated_TV);
  return c_.continuing_rows(gated_TV, held_[declared_.gated_RV]);
}

RecurrenceBackward::RecurrenceBackward(const LayerContext& c, const LayerSaved& saved, const PartViews& grads)
    : c_(c),
      layer_saved_(saved),
      saved_(c, saved.mixer),
      grads_(grads),
      declared_(recurrence_of(c), c.block(), c.block_rows(), {}),
      held_(c.arena, declared_, c.dtype()) {
  held_.enter(Stage::mlp);
}

at::Tensor RecurrenceBackward::mixed_again() {
  const at::Tensor& gated_TV = held_[declared_.gated_TV];
  const TimedPart timed(c_.timer, part::kAttention);
  c_.ops.gated_norm(gate_of(c_, saved_), gated_TV);
  return c_.continuing_rows(gated_TV, held_[declared_.gated_RV]);
}

at::Tensor RecurrenceBackward::grad_mixed() {
  return c_.narrow ? held_[declared_.grad_gated_RV] : held_[declared_.grad_mixed_TV];
}

// From the gradient of mixed rows, through the gated norm and the recurrence.
void RecurrenceBackward::add_rows(const at::Tensor& grad_projected_TW) {
  const TimedPart timed(c_.timer, part::kAttention);
  const at::Tensor& grad_mixed_TV = held_[declared_.grad_mixed_TV];
  const Views grads(grads_);
  c_.ops.add_gated_norm_backward(gate_of(c_, saved_), grad_mixed_TV, grad_mixed_TV, grad_projected_TW,
                                 grads.mixed_norm);
  c_.ops.zero(held_[declared_.grad_states_FN]);
  const DeltaRuleGradients of_rows{grad_projected_TW, by_channels(grads.conv_CK, recurrence_of(c_).shape),
                                   grads.a_log_H,     grads.dt_bias_H,
                                   grads.conv_bias_C, grads.skip_H};
  c_.kv.run_states_backward(
      c_.ops, c_.layer, held_[declared_.states_FN], held_[declared_.grad_states_FN],
      [&](const std::vector<StateRun>& runs) { c_.ops.delta_rule(problem_of(c_, saved_, runs), at::Tensor()); },
      [&](const std::vector<StateRun>& runs) {
        c_.ops.add_delta_rule_backward(problem_of(c_, saved_, runs), grad_mixed_TV, of_rows);
      });
}

at::Tensor RecurrenceBackward::add() {
  if (c_.narrow) {
    c_.ops.zero(held_[declared_.grad_mixed_TV]);
    if (c_.continuing() > 0)
      c_.ops.add_scatter(held_[declared_.grad_gated_RV], c_.input.output_row_O, held_[declared_.grad_mixed_TV]);
  }
  held_.enter(Stage::rows);
  const at::Tensor grad_projected_TW = held_[declared_.grad_projected_TW];
  add_rows(grad_projected_TW);
  held_.enter(Stage::input);
  const at::Tensor& grad_input_TM = held_[declared_.normed_TM];  // until then the input itself
  add_project(grad_projected_TW, c_.mixer_input_again(layer_saved_, grad_input_TM, reads_input()), grad_input_TM);
  return grad_input_TM;
}

void RecurrenceBackward::add_project(const at::Tensor& grad_projected_TW, const at::Tensor& input_TM,
                                     const at::Tensor& grad_input_TM) const {
  const Projection& weights = c_.weights.mixer.products.front();
  c_.products.add_linear_grad_weight(grads_.products.front(), weights, grad_projected_TW, input_TM,
                                     held_[declared_.projected_product]);
  c_.products.linear_grad_input(grad_input_TM, grad_projected_TW, weights);
}

}  // namespace espalier
