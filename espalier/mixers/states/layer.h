// A mixer at work whose rows pass a state on:
//
//   p = the projected columns of n,  mixed = rows(p),  y = finished(mixed)
//
// A kind says what its rows do and how they are finished. Its source connects the states of runs. A kind whose columns
// are not all products with rows overrides `project`.
//
// Shapes: T rows, R rows that continue, W columns of a projected row, V channels of a mixed row, M width.
#pragma once

#include <memory>
#include <vector>

#include "espalier/device/held_buffers.h"
#include "espalier/mixers/states/work.h"
#include "espalier/model/mixer_layer.h"

namespace espalier {

// The tensors that the forward saves.
struct StateMixerTensors {
  StateMixerTensors(const LayerContext& context, const SavedBuffers& saved);

  at::Tensor projected_TW, mixed_TV, latents_TC;
};

class StateMixerForward : public MixerForward {
 public:
  StateMixerForward(const LayerContext& context, const LayerSaved& saved);

  void mix() override;
  at::Tensor mixed() override;

 protected:
  // Overwrites the projected rows, and what else the projection saves.
  virtual void project(const at::Tensor& input_TM) const;
  // Overwrites the mixed rows of these runs, and the states that they leave.
  virtual void run(const std::vector<StateRun>& runs) const = 0;
  // The input of the last product, of all rows.
  virtual at::Tensor finished(const at::Tensor& /*room_TV*/) const { return saved_.mixed_TV; }

  const LayerContext& c_;
  const LayerSaved& layer_saved_;
  const StateMixerTensors saved_;

 private:
  const StateMixerForwardBuffers declared_;
  HeldBuffers held_;
};

class StateMixerBackward : public MixerBackward {
 public:
  StateMixerBackward(const LayerContext& context, const LayerSaved& saved, const PartViews& grads);

  void enter_output() override { held_.enter(Stage::output); }
  at::Tensor mixed_again() override;
  at::Tensor grad_mixed() override;
  at::Tensor add() override;

 protected:
  // As in the forward; `run` without the mixed rows.
  virtual void run(const std::vector<StateRun>& runs) const = 0;
  virtual at::Tensor finished(const at::Tensor& /*room_TV*/) const { return saved_.mixed_TV; }
  // Turns the gradient of finished rows into that of mixed rows; adds the gradients of weights, and overwrites columns
  // of grad_projected_TW that only this reads.
  virtual void add_finish(const at::Tensor& /*grad_TV*/, const at::Tensor& /*grad_projected_TW*/) const {}
  // Overwrites the gradient of the projected rows of these runs, and adds to the gradients of weights and states.
  virtual void add_run(const std::vector<StateRun>& runs, const at::Tensor& grad_mixed_TV,
                       const at::Tensor& grad_projected_TW) const = 0;
  // From the gradient of the projected rows: adds the gradients of the weights, then overwrites grad_input_TM, which
  // may be input_TM, with that of the input.
  virtual void add_project(const at::Tensor& grad_projected_TW, const at::Tensor& input_TM,
                           const at::Tensor& grad_input_TM) const;
  // True if any weight that reads the input trains.
  virtual bool reads_input() const { return grads_.products.front().trains(); }

  const LayerContext& c_;
  const LayerSaved& layer_saved_;
  const StateMixerTensors saved_;
  const PartViews& grads_;
  const StateMixerBackwardBuffers declared_;
  HeldBuffers held_;

 private:
  using Stage = StateMixerBackwardBuffers::Stage;

  void add_rows(const at::Tensor& grad_projected_TW);
};

SavedBuffers take_state_mixer_saved(const LayerContext& context);

// The row of a kind in the table of mixer_layer.
template <class Forward, class Backward>
constexpr MixerLayer state_mixer_layer(double (*flops_per_second)(at::ScalarType dtype) = nullptr) {
  return {take_state_mixer_saved,
          [](const LayerContext& context, const LayerSaved& saved) -> std::unique_ptr<MixerForward> {
            return std::make_unique<Forward>(context, saved);
          },
          [](const LayerContext& context, const LayerSaved& saved, const PartViews& grads)
              -> std::unique_ptr<MixerBackward> { return std::make_unique<Backward>(context, saved, grads); },
          flops_per_second};
}

}  // namespace espalier
