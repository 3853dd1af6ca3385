#include "espalier/mixers/recurrence/layer.h"

#include <ATen/core/Tensor.h>

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

DeltaRuleProblem problem_of(const LayerContext& c, const StateMixerTensors& saved, const std::vector<StateRun>& runs) {
  const Views w(c.weights.mixer);
  const RecurrenceShape& s = recurrence_of(c).shape;
  return {s, saved.projected_TW, by_channels(w.conv_CK, s), w.a_log_H, w.dt_bias_H, w.conv_bias_C, w.skip_H, runs};
}

GatedNormProblem gate_of(const LayerContext& c, const StateMixerTensors& saved) {
  return {recurrence_of(c).shape, c.shape.rms_norm_eps, saved.mixed_TV, saved.projected_TW,
          Views(c.weights.mixer).mixed_norm};
}

at::Tensor gated(const LayerContext& c, const StateMixerTensors& saved, const at::Tensor& room_TV) {
  const TimedPart timed(c.timer, part::kAttention);
  c.ops.gated_norm(gate_of(c, saved), room_TV);
  return room_TV;
}

}  // namespace

void RecurrenceForward::run(const std::vector<StateRun>& runs) const {
  c_.ops.delta_rule(problem_of(c_, saved_, runs), saved_.mixed_TV);
}

at::Tensor RecurrenceForward::finished(const at::Tensor& room_TV) const { return gated(c_, saved_, room_TV); }

void RecurrenceBackward::run(const std::vector<StateRun>& runs) const {
  c_.ops.delta_rule(problem_of(c_, saved_, runs), at::Tensor());
}

at::Tensor RecurrenceBackward::finished(const at::Tensor& room_TV) const { return gated(c_, saved_, room_TV); }

void RecurrenceBackward::add_finish(const at::Tensor& grad_TV, const at::Tensor& grad_projected_TW) const {
  c_.ops.add_gated_norm_backward(gate_of(c_, saved_), grad_TV, grad_TV, grad_projected_TW, Views(grads_).mixed_norm);
}

void RecurrenceBackward::add_run(const std::vector<StateRun>& runs, const at::Tensor& grad_mixed_TV,
                                 const at::Tensor& grad_projected_TW) const {
  const Views grads(grads_);
  const DeltaRuleGradients of_rows{grad_projected_TW, by_channels(grads.conv_CK, recurrence_of(c_).shape),
                                   grads.a_log_H,     grads.dt_bias_H,
                                   grads.conv_bias_C, grads.skip_H};
  c_.ops.add_delta_rule_backward(problem_of(c_, saved_, runs), grad_mixed_TV, of_rows);
}

}  // namespace espalier
