// A mixture of experts as the second half of a block (mlp.h):
//
//   n = norm(y);  (S, w) = router(n Wr^T);  [g_e u_e] = n Wgu_e^T
//   z = y + r sum_{e in S} w_e (f(g_e) u_e) Wd_e^T              r: Scales::residual
//
// With norms apart it is another block (apart_experts.h). If the shape has a shared expert, it adds its MLP for every
// row, times sigmoid(n . gate) if it has a gate. It runs as a layer of one expert that every row chooses.
//
// Rows are sorted by expert (ops/experts.h). Sums over a row's experts are kept in the accumulator dtype and rounded
// once. context.penalties holds the router losses. Shapes: R rows, M width, E experts, k of them a row, F inner
// width of one expert.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

void expert_mlp_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);
void add_expert_mlp_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                             const LayerViews& grads);

// The same without own rows: this rank's experts run the rows of other ranks (mesh.ep of several ranks).
void join_experts_forward(const LayerContext& context);
void join_experts_backward(const LayerContext& context, const LayerViews& grads);

}  // namespace espalier
