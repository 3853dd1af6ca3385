// The products of a layer's experts over the rows that chose them, on this rank or on the experts' ranks.
//
// Shapes: R rows, M width, k experts a row.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

// Both are added to, in the accumulator dtype; the gradient of the router weights starts at 0.
struct ExpertInputGradients {
  at::Tensor normed_RM, weight_RK;
};

// Both functions are described in ops/experts.h. The caller sums over tp: each rank has a part of the experts' inner
// columns, or of the rows. `scratch`: for R rows, if the products run here.
struct ExpertProducts {
  // Adds the experts' results for normed_RM to sum_RM. If sum is undefined, it only fills saved.gate_up; with several
  // ranks of ep it then does nothing, because the backward computes gate and up again.
  void (*add_forward)(const LayerContext& context, const LayerSaved& saved, const at::Tensor& normed_RM,
                      const at::Tensor& sum_RM, const ExpertScratch& scratch);
  // From dL/dsum: adds the gradients of the experts and of their inputs.
  void (*add_backward)(const LayerContext& context, const LayerSaved& saved, const at::Tensor& normed_RM,
                       const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                       const ExpertScratch& scratch);
};

// With one rank of ep all experts are here, each with this rank's inner columns. With several, rows are exchanged. The
// routers decide how many rows arrive, so their memory is not part of the declared buffers, and the backward recomputes
// gate and up.
const ExpertProducts& expert_products(const Mesh& mesh);

}  // namespace espalier
