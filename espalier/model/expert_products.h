// The products of a layer's experts over the rows that chose them: here, or on the ranks that have the experts.
//
// Shapes: R rows, M width, k experts a row.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

// Both added to, accumulator dtype; the gradient of the weights is 0 before.
struct ExpertInputGradients {
  at::Tensor normed_RM, weight_RK;
};

// ops/experts.h describes both. Sums over ranks of tp are left to the caller: each of them has a part of the
// experts' inner columns, or of the rows. `scratch`: of the products where they are here, for R rows.
struct ExpertProducts {
  // Adds the experts' results of normed_RM to sum_RM. Where sum is undefined only saved.gate_up is filled.
  void (*add_forward)(const LayerContext& context, const LayerSaved& saved, const at::Tensor& normed_RM,
                      const at::Tensor& sum_RM, const ExpertScratch& scratch);
  // From dL/dsum: adds the gradients of the experts and of what they read.
  void (*add_backward)(const LayerContext& context, const LayerSaved& saved, const at::Tensor& normed_RM,
                       const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                       const ExpertScratch& scratch);
};

// One rank of ep: all experts are here, each with this rank's inner columns. Several: rows travel; as many arrive as
// the routers choose, so what they take is no part of the declared buffers, and gate and up are made again in the
// backward.
const ExpertProducts& expert_products(const Mesh& mesh);

}  // namespace espalier
