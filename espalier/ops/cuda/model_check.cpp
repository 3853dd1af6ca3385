// What models the kernels of this folder take, asked when a model is opened: a limit that is met in the middle of a
// step would cost the step.
#include <algorithm>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"
#include "espalier/ops/cuda/attention.h"
#include "espalier/ops/cuda/delta_rule.h"
#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/norm.h"
#include "espalier/ops/cuda/operations.h"

namespace espalier::cuda {
namespace {

void require(bool taken, const ModelShape& shape, std::string expected, std::string found) {
  if (!taken)
    throw UnsupportedError(
        {text_of("--device cuda, ", shape.architecture), std::move(expected), std::move(found), "use --device cpu"});
}

// The widest row that a norm of the model's is over.
std::int64_t widest_norm(const ModelShape& shape) {
  const std::int64_t latents = std::max(shape.latent.query, shape.latent.key_value);
  const std::int64_t heads = shape.attention.wide_norm ? std::max(shape.query_width(), shape.key_width()) : 0;
  return std::max({shape.hidden, latents, heads});
}

}  // namespace

void require_taken(const ModelShape& shape, at::ScalarType dtype) {
  const std::int64_t head = std::max(shape.head_dim, shape.value_dim());
  require(head <= kLargestHead, shape, text_of("heads of at most ", kLargestHead, " elements"), text_of(head));
  require(shape.experts <= kMostExperts, shape, text_of("at most ", kMostExperts, " experts a layer"),
          text_of(shape.experts));
  const std::int64_t most = kWidestNorm / static_cast<std::int64_t>(c10::elementSize(accumulator_type(dtype)));
  require(widest_norm(shape) <= most, shape, text_of("norms over at most ", most, " columns in ", c10::toString(dtype)),
          text_of(widest_norm(shape)));
  if (!shape.has_states()) return;
  const DeltaRuleShape& state = shape.delta_rule;
  require(state.kernel <= kLargestKernel, shape, text_of("convolutions of at most ", kLargestKernel, " rows"),
          text_of(state.kernel));
  const std::int64_t bytes = delta_forward_bytes(state.key_dim, state.decays_channels() ? state.key_dim : 1,
                                                 static_cast<std::int64_t>(c10::elementSize(accumulator_type(dtype))));
  require(bytes <= kMostDeltaBytes, shape,
          text_of("keys of recurrent layers for which ", kMostDeltaBytes, " bytes of shared memory are enough"),
          text_of(bytes, " bytes for keys of ", state.key_dim, " in ", c10::toString(dtype)));
}

}  // namespace espalier::cuda
