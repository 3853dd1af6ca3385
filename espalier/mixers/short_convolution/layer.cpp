// A short convolution at work: b, c, x = the projected columns of n,  y = short_convolution(b, c, x)
// (ops/short_convolution.h). Its source connects the states of runs.
//
// Shapes: T rows, R rows that continue, W columns of a projected row, C channels, M width.
#include <ATen/ATen.h>

#include <vector>

#include "espalier/device/held_buffers.h"
#include "espalier/mixers/short_convolution/work.h"
#include "espalier/model/mixer_layer.h"

namespace espalier {
namespace {

const ShortConvolution& mixer_of(const LayerContext& c) { return static_cast<const ShortConvolution&>(*c.own.mixer); }

// The tensors that the forward saves.
struct Saved {
  Saved(const LayerContext& c, const SavedBuffers& saved) {
    const ShortConvolutionSaved declared(mixer_of(c).shape, c.block(), c.block_rows());
    projected_TW = saved[declared.projected_TW], mixed_TC = saved[declared.mixed_TC];
  }

  at::Tensor projected_TW, mixed_TC;
};

SavedBuffers take_saved(const LayerContext& c) {
  return {c.arena, ShortConvolutionSaved(mixer_of(c).shape, c.block(), c.block_rows()), c.dtype()};
}

at::Tensor by_channels(const at::Tensor& conv, const ShortConvolutionShape& s) {
  return conv.defined() ? conv.view({s.channels, s.kernel}) : conv;
}

ShortConvolutionProblem problem_of(const LayerContext& c, const Saved& saved, const std::vector<StateRun>& runs) {
  const ShortConvolutionShape& s = mixer_of(c).shape;
  const std::vector<at::Tensor>& w = c.weights.mixer.tensors;
  return {s, saved.projected_TW, by_channels(w[ShortConvolution::conv], s), w[ShortConvolution::conv_bias], runs};
}

class Forward final : public MixerForward {
 public:
  Forward(const LayerContext& c, const LayerSaved& saved)
      : c_(c),
        layer_saved_(saved),
        saved_(c, saved.mixer),
        declared_(mixer_of(c), c.block(), c.block_rows(), 0),
        held_(c.arena, declared_, c.dtype()) {}

  void mix() override {
    held_.enter(Stage::projection);
    c_.products.linear(saved_.projected_TW, c_.mixer_input(layer_saved_, held_[declared_.normed_TM]),
                       c_.weights.mixer.products[ShortConvolution::input]);
    held_.enter(Stage::rows);
    const TimedPart timed(c_.timer, part::kAttention);
    c_.kv.run_states(c_.layer, held_[declared_.states_FN], [&](const std::vector<StateRun>& runs) {
      c_.ops.short_convolution(problem_of(c_, saved_, runs), saved_.mixed_TC);
    });
  }

  at::Tensor mixed() override {
    held_.enter(Stage::output);
    return c_.continuing_rows(saved_.mixed_TC, held_[declared_.mixed_RC]);
  }

 private:
  using Stage = ShortConvolutionForwardBuffers::Stage;

  const LayerContext& c_;
  const LayerSaved& layer_saved_;
  const Saved saved_;
  const ShortConvolutionForwardBuffers declared_;
  HeldBuffers held_;
};

class Backward final : public MixerBackward {
 public:
  Backward(const LayerContext& c, const LayerSaved& saved, const PartViews& grads)
      : c_(c),
        layer_saved_(saved),
        saved_(c, saved.mixer),
        grads_(grads),
        declared_(mixer_of(c), c.block(), c.block_rows(), {}),
        held_(c.arena, declared_, c.dtype()) {
    held_.enter(Stage::mlp);
  }

  void enter_output() override { held_.enter(Stage::output); }
  at::Tensor mixed_again() override { return c_.continuing_rows(saved_.mixed_TC, held_[declared_.mixed_RC]); }
  at::Tensor grad_mixed() override { return held_[c_.narrow ? declared_.grad_mixed_RC : declared_.grad_mixed_TC]; }

  at::Tensor add() override {
    if (c_.narrow) {
      c_.ops.zero(held_[declared_.grad_mixed_TC]);
      if (c_.continuing() > 0)
        c_.ops.add_scatter(held_[declared_.grad_mixed_RC], c_.input.output_row_O, held_[declared_.grad_mixed_TC]);
    }
    held_.enter(Stage::rows);
    const at::Tensor grad_projected_TW = held_[declared_.grad_projected_TW];
    add_rows(grad_projected_TW);
    held_.enter(Stage::input);
    const at::Tensor& grad_input_TM = held_[declared_.normed_TM];  // until then the input itself
    const Projection& grads = grads_.products[ShortConvolution::input];
    const Projection& weights = c_.weights.mixer.products[ShortConvolution::input];
    const at::Tensor input_TM = c_.mixer_input_again(layer_saved_, grad_input_TM, grads.trains());
    c_.products.add_linear_grad_weight(grads, weights, grad_projected_TW, input_TM, held_[declared_.projected_product]);
    c_.products.linear_grad_input(grad_input_TM, grad_projected_TW, weights);
    return grad_input_TM;
  }

 private:
  using Stage = ShortConvolutionBackwardBuffers::Stage;

  void add_rows(const at::Tensor& grad_projected_TW) {
    const TimedPart timed(c_.timer, part::kAttention);
    c_.ops.zero(held_[declared_.grad_states_FN]);
    const ShortConvolutionGradients of_rows{grad_projected_TW,
                                            by_channels(grads_.tensors[ShortConvolution::conv], mixer_of(c_).shape),
                                            grads_.tensors[ShortConvolution::conv_bias]};
    c_.kv.run_states_backward(
        c_.ops, c_.layer, held_[declared_.states_FN], held_[declared_.grad_states_FN],
        [&](const std::vector<StateRun>& runs) {
          c_.ops.short_convolution(problem_of(c_, saved_, runs), at::Tensor());
        },
        [&](const std::vector<StateRun>& runs) {
          c_.ops.add_short_convolution_backward(problem_of(c_, saved_, runs), held_[declared_.grad_mixed_TC], of_rows);
        });
  }

  const LayerContext& c_;
  const LayerSaved& layer_saved_;
  const Saved saved_;
  const PartViews& grads_;
  const ShortConvolutionBackwardBuffers declared_;
  HeldBuffers held_;
};

}  // namespace

extern const MixerLayer short_convolution_layer;
const MixerLayer short_convolution_layer = {
    take_saved,
    [](const LayerContext& context, const LayerSaved& saved) -> std::unique_ptr<MixerForward> {
      return std::make_unique<Forward>(context, saved);
    },
    [](const LayerContext& context, const LayerSaved& saved, const PartViews& grads) -> std::unique_ptr<MixerBackward> {
      return std::make_unique<Backward>(context, saved, grads);
    }};

}  // namespace espalier
