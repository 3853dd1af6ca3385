// The second half of a block: z = y + mlp(norm(y)), dense or a mixture of experts, depending on the layer's weights.
//
// Shapes: R rows that continue, M width. Interfaces as layer.h: forward overwrites, backward adds to `grads`.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

// Reads saved.stream_mid. Overwrites stream_out [R, M], which may be stream_mid. If it is undefined, only `saved` is
// recomputed.
void mlp_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);

// Turns dL/dz into dL/dy, in place, and adds to `grads`. Consumes `saved`.
void add_mlp_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                      const LayerViews& grads);

}  // namespace espalier
