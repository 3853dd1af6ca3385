// The first half of a recurrent block: the gated delta rule (ops/delta_rule.h).
//
//   n = norm(x);  y = x + gated_norm(delta_rule(n Wp^T), n Wp^T) Wo^T
//
// Where decays are of channels, the columns of z and a are (n Wl^T) Wz^T and (n Wl^T) Wa^T instead.
//
// Shapes: T rows, R rows that continue past the mixer, M width.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/layer_context.h"

namespace espalier {

// Fills `saved` up to stream_mid. The source connects the states of runs.
void delta_forward(const LayerContext& context, LayerSaved& saved);

// As add_layer_backward (model/layer.h), which calls it.
void add_delta_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads);

}  // namespace espalier
