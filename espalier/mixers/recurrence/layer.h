// A recurrent mixer at work:
//
//   p = the projected columns of n,  mixed = recurrence(p),  y = gated_norm(mixed, p)          (ops/delta_rule.h)
//
// Its source connects the states of runs. A kind whose columns are not all products with rows overrides `project`.
//
// Shapes: T rows, R rows that continue, W columns of a projected row, V value channels, M width.
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "espalier/device/held_buffers.h"
#include "espalier/mixers/recurrence/work.h"
#include "espalier/model/mixer_layer.h"

namespace espalier {

inline const Recurrence& recurrence_of(const LayerContext& context) {
  return static_cast<const Recurrence&>(*context.own.mixer);
}

// The tensors that the forward saves.
struct RecurrenceTensors {
  RecurrenceTensors(const LayerContext& context, const SavedBuffers& saved);

  at::Tensor projected_TW, mixed_TV, gate_latents_TC;
};

class RecurrenceForward : public MixerForward {
 public:
  RecurrenceForward(const LayerContext& context, const LayerSaved& saved);

  void mix() override;
  at::Tensor mixed() override;

 protected:
  // Overwrites the projected rows, and what else the projection saves.
  virtual void project(const at::Tensor& input_TM) const;

  const LayerContext& c_;
  const LayerSaved& layer_saved_;
  const RecurrenceTensors saved_;

 private:
  const RecurrenceForwardBuffers declared_;
  HeldBuffers held_;
};

class RecurrenceBackward : public MixerBackward {
 public:
  RecurrenceBackward(const LayerContext& context, const LayerSaved& saved, const PartViews& grads);

  void enter_output() override { held_.enter(Stage::output); }
  at::Tensor mixed_again() override;
  at::Tensor grad_mixed() override;
  at::Tensor add() override;

 protected:
  // From the gradient of the projected rows: adds the gradients of the weights, then overwrites grad_input_TM, which
  // may be input_TM, with that of the input.
  virtual void add_project(const at::Tensor& grad_projected_TW, const at::Tensor& input_TM,
                           const at::Tensor& grad_input_TM) const;
  // True if any weight that reads the input trains.
  virtual bool reads_input() const { return grads_.products.front().trains(); }

  const LayerContext& c_;
  const LayerSaved& layer_saved_;
  const RecurrenceTensors saved_;
  const PartViews& grads_;
  const RecurrenceBackwardBuffers declared_;
  HeldBuffers held_;

 private:
  using Stage = RecurrenceBackwardBuffers::Stage;

  void add_rows(const at::Tensor& grad_projected_TW);
};

SavedBuffers take_recurrence_saved(const LayerContext& context);

double recurrence_flops_per_second(const Recurrence& mixer, at::ScalarType dtype);

// The row of a kind in the table of mixer_layer. usual(heads): a mixer of the kind with so many key heads, each as
// large as published models have them.
template <class Forward, class Backward, auto usual>
constexpr MixerLayer recurrence_layer() {
  return {take_recurrence_saved,
          [](const LayerContext& context, const LayerSaved& saved) -> std::unique_ptr<MixerForward> {
            return std::make_unique<Forward>(context, saved);
          },
          [](const LayerContext& context, const LayerSaved& saved, const PartViews& grads)
              -> std::unique_ptr<MixerBackward> { return std::make_unique<Backward>(context, saved, grads); },
          [](at::ScalarType dtype) { return recurrence_flops_per_second(usual(at::get_num_threads()), dtype); }};
}

}  // namespace espalier
