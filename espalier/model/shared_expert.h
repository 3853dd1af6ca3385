// The MLP beside the experts, which every row has (SharedExpert): a layer of one expert that every row chooses.
//
// Shapes: R rows, M width.
#pragma once

#include "espalier/model/expert_products.h"

namespace espalier {

// Adds its results for rows_RM to sum_RM, times sigmoid(row . gate) if it has a gate; fills `saved`. Undefined sum:
// only `saved` is filled.
void add_shared_forward(const LayerContext& context, const LayerSaved& saved, const at::Tensor& rows_RM,
                        const at::Tensor& sum_RM, const ExpertScratch& scratch);
// From dL/dsum: adds the gradients of its matrices and to `out`.
void add_shared_backward(const LayerContext& context, const LayerSaved& saved, const at::Tensor& rows_RM,
                         const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                         const ExpertScratch& scratch);
// From dL/dw of its gate: adds the gradient of the gate, and overwrites that of the gate's logits.
void add_shared_gate_backward(const LayerContext& context, const LayerSaved& saved, const at::Tensor& grad_weight_R1,
                              const at::Tensor& rows_RM, const LayerViews& grads, const at::Tensor& grad_logit_R1,
                              const at::Tensor& product);

}  // namespace espalier
