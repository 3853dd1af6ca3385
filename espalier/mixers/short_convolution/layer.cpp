// A short convolution at work: b, c, x = the projected columns of n,  y = short_convolution(b, c, x)
// (ops/short_convolution.h).
#include <ATen/core/Tensor.h>

#include "espalier/mixers/short_convolution/shape.h"
#include "espalier/mixers/states/layer.h"

namespace espalier {
namespace {

const ShortConvolutionShape& shape_of(const LayerContext& c) {
  return static_cast<const ShortConvolution&>(*c.own.mixer).shape;
}

at::Tensor by_channels(const at::Tensor& conv, const ShortConvolutionShape& s) {
  return conv.defined() ? conv.view({s.channels, s.kernel}) : conv;
}

ShortConvolutionProblem problem_of(const LayerContext& c, const StateMixerTensors& saved,
                                   const std::vector<StateRun>& runs) {
  const ShortConvolutionShape& s = shape_of(c);
  const std::vector<at::Tensor>& w = c.weights.mixer.tensors;
  return {s, saved.projected_TW, by_channels(w[ShortConvolution::conv], s), w[ShortConvolution::conv_bias], runs};
}

class Forward final : public StateMixerForward {
 public:
  using StateMixerForward::StateMixerForward;

 private:
  void run(const std::vector<StateRun>& runs) const override {
    c_.ops.short_convolution(problem_of(c_, saved_, runs), saved_.mixed_TV);
  }
};

class Backward final : public StateMixerBackward {
 public:
  using StateMixerBackward::StateMixerBackward;

 private:
  void run(const std::vector<StateRun>& runs) const override {
    c_.ops.short_convolution(problem_of(c_, saved_, runs), at::Tensor());
  }
  void add_run(const std::vector<StateRun>& runs, const at::Tensor& grad_mixed_TV,
               const at::Tensor& grad_projected_TW) const override {
    const ShortConvolutionGradients of_rows{grad_projected_TW,
                                            by_channels(grads_.tensors[ShortConvolution::conv], shape_of(c_)),
                                            grads_.tensors[ShortConvolution::conv_bias]};
    c_.ops.add_short_convolution_backward(problem_of(c_, saved_, runs), grad_mixed_TV, of_rows);
  }
};

}  // namespace

extern const MixerLayer short_convolution_layer;
const MixerLayer short_convolution_layer = state_mixer_layer<Forward, Backward>();

}  // namespace espalier
