// The models that the kernels of this folder take, checked when a model is opened: a limit met in the middle of a
// step would cost the step.
#include <vector>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/mixers/attention/shape.h"
#include "espalier/mixers/recurrence/shape.h"
#include "espalier/mixers/short_convolution/shape.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/norm.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/short_convolution.h"
#include "espalier/shape/model_shape.h"

namespace espalier::cuda {
namespace {

// The limits that mixers state are the limits of the kernels.
static_assert(kLargestGpuHead == kLargestHead && kWidestGpuNorm == kWidestNorm);
static_assert(kMostStateBytes == kMostDeltaBytes && kLongestGpuConvolution == kLargestKernel);
static_assert(kGpuConvolutionParts == kConvolutionParts && kLongestGpuShortConvolution == kLongestShortConvolution);

void require(bool taken, const ModelShape& shape, std::string expected, std::string found) {
  if (!taken)
    throw UnsupportedError(
        {text_of("--device cuda, ", shape.architecture), std::move(expected), std::move(found), "use --device cpu"});
}

}  // namespace

void require_taken(const ModelShape& shape, at::ScalarType dtype) {
  const auto number_bytes = static_cast<std::int64_t>(c10::elementSize(accumulator_type(dtype)));
  require(shape.experts <= kMostExperts, shape, text_of("at most ", kMostExperts, " experts a layer"),
          text_of(shape.experts));
  std::vector<Mixer::Refusal> refusals{norm_refused_on_gpu(shape.hidden, number_bytes)};
  for (const LayerShape& layer : shape.layer) refusals.push_back(layer.mixer->refused_on_gpu(number_bytes));
  for (const Mixer::Refusal& one : refusals) require(one.expected.empty(), shape, one.expected, one.found);
}

}  // namespace espalier::cuda
