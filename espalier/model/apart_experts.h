// Experts and a shared expert with norms of their own (SharedExpert::apart; Gemma 4 26B-A4B) as the second half of a
// block (mlp.h):
//
//   n_x = y / rms(y) times the norm x, for the shared expert, the experts and the router
//   (S, w) = router(n_r Wr^T / sqrt(M));  w_e times the expert's factor
//   b = norm_s(MLP(n_s)) + norm_e(sum_{e in S} w_e MLP_e(n_e));  z = y + norm(b)
//
// The results of both, and b, are saved, so that a recomputation runs all products again. With several ranks of ep it
// runs all but the experts, and the backward asks for their results once more, on ranks without rows too: ranks that
// recompute and ranks that do not exchange the same rows.
//
// Shapes: R rows, M width, E experts, k of them a row.
#pragma once

#include "espalier/model/layer_context.h"

namespace espalier {

void apart_experts_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);
void add_apart_experts_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                                const LayerViews& grads);

}  // namespace espalier
