// The router of an expert layer around its operations (ops/experts.h): its logits, its choice, and the gradients behind
// them.
//
// Shapes: R rows, M width, E experts, k of them a row.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

// Rooms for the router's factors where its logits are wider than the model's rows: then both factors are widened first.
// Undefined elsewhere.
struct WideRouter {
  at::Tensor normed_RM, weight_EM;

  bool used() const { return normed_RM.defined(); }
};

// Overwrites saved.router_logits with rows Wr^T + b.
void router_logits(const LayerContext& context, const LayerSaved& saved, const at::Tensor& rows_RM,
                   const WideRouter& wide);
// Overwrites saved.router_choice and saved.router_weight, and saved.plain_weight where experts have factors.
void choose_experts(const LayerContext& context, const LayerSaved& saved);

// From dL/dw of the weights, which becomes that of the weights before experts' factors: overwrites grad_logits, with
// the router losses. Adds to the gradient of the factors.
void router_backward(const LayerContext& context, const LayerSaved& saved, const at::Tensor& grad_weight_RK,
                     const LayerViews& grads, const at::Tensor& grad_logits_RE);
// From dL/dlogits: adds the gradient of the router's weight, and dL/dx to what is wide enough for it.
void add_wide_router_backward(const LayerContext& context, const at::Tensor& grad_logits_RE, const at::Tensor& rows_RM,
                              const WideRouter& wide, const Projection& grads, const at::Tensor& grad_rows_sum_RM);

}  // namespace espalier
