#include "espalier/generate/step_rows.h"

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/ops/operations.h"

namespace espalier {

std::shared_ptr<void> hold_weights(const Decoder& decoder) {
  if (decoder.gathering() != nullptr) return nullptr;
  const ModelViews& views = decoder.weights();
  std::vector<at::Tensor> weights{views.head_VM};
  for (const LayerViews& layer : views.layers)
    for_each_projection(layer, [&](const Projection& projection) { weights.push_back(projection.weight); });
  return decoder.device().operations().hold_weights(weights, decoder.dtype(), decoder.device().free_bytes() / 4);
}

}  // namespace espalier
