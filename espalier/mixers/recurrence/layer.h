// A recurrent mixer at work: the rows of a projection p pass a recurrence, and a norm that p gates (ops/delta_rule.h).
#pragma once

#include <ATen/Parallel.h>

#include "espalier/mixers/recurrence/shape.h"
#include "espalier/mixers/states/layer.h"

namespace espalier {

inline const Recurrence& recurrence_of(const LayerContext& context) {
  return static_cast<const Recurrence&>(*context.own.mixer);
}

class RecurrenceForward : public StateMixerForward {
 public:
  using StateMixerForward::StateMixerForward;

 private:
  void run(const std::vector<StateRun>& runs) const override;
  at::Tensor finished(const at::Tensor& room_TV) const override;
};

class RecurrenceBackward : public StateMixerBackward {
 public:
  using StateMixerBackward::StateMixerBackward;

 private:
  void run(const std::vector<StateRun>& runs) const override;
  at::Tensor finished(const at::Tensor& room_TV) const override;
  void add_finish(const at::Tensor& grad_TV, const at::Tensor& grad_projected_TW) const override;
  void add_run(const std::vector<StateRun>& runs, const at::Tensor& grad_mixed_TV,
               const at::Tensor& grad_projected_TW) const override;
};

double recurrence_flops_per_second(const Recurrence& mixer, at::ScalarType dtype);

// usual(heads): a mixer of the kind with so many key heads, each as large as published models have them.
template <class Forward, class Backward, auto usual>
constexpr MixerLayer recurrence_layer() {
  return state_mixer_layer<Forward, Backward>(
      [](at::ScalarType dtype) { return recurrence_flops_per_second(usual(at::get_num_threads()), dtype); });
}

}  // namespace espalier
