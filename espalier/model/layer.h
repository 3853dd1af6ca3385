// One decoder block: forward, and its backward written by hand.
//
//   n = norm(x);  q = rot(qnorm(n Wq^T)), k = rot(knorm(n Wk^T)), v = n Wv^T
//   y = x + attention(q, k, v, path) Wo^T;  z = y + mlp(norm(y))  (mlp.h: dense or experts)
//
// Shapes: T rows, R rows that continue past the keys and values (all, or in the last block those with an output), M
// width, H query heads, J key/value heads, D head size, F inner width, E experts, k of them a row.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/device/arena.h"
#include "espalier/model/kv_path.h"
#include "espalier/model/model_input.h"
#include "espalier/model/model_views.h"
#include "espalier/model/products.h"
#include "espalier/model/rotary.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/operations.h"
#include "espalier/plan/block_buffers.h"

namespace espalier {

// What the backward of one block needs. Everything else is recomputed from it, cheaply, row by row.
struct LayerSaved {
  at::Tensor stream_in_TM;
  at::Tensor norm_rstd_T, kv_TW;         // [T, 2*J*D] before norm and rotation
  at::Tensor q_RW, attended_RW, lse_HR;  // [R, H*D], q before norm and rotation
  at::Tensor stream_mid_RM, mlp_rstd_R;
  at::Tensor gate_up_RW;  // [R, 2*F]; with experts [R*k, 2*F], sorted by expert
  at::Tensor router_logits_RE, router_choice_RK, router_weight_RK;  // experts only
};

struct LayerContext {
  const ModelShape& shape;
  const LayerViews& weights;
  const RotaryTables& rotary;
  const ModelInput& rows;
  KvPath& path;
  std::int64_t layer;
  bool last;  // only output rows continue
  Arena& arena;
  Timer* timer;  // where matrix products and attention book their time; may be null
  const Operations& ops = arena.device().operations();
  const Products products{ops, timer};

  at::ScalarType dtype() const { return weights.q_weight.scalar_type(); }
  // What the declarations of the block's buffers depend on.
  BlockShape block() const;
  BlockRows block_rows() const;
};

// Takes all members but stream_in from the arena.
LayerSaved take_layer_saved(const LayerContext& context, const at::Tensor& stream_in_TM);

// Fills `saved` and overwrites stream_out [R, M]; where stream_out is undefined it stops after gate_up (recomputation).
// A trunk's keys and values are written to the top of the path. stream_out may be stream_mid.
void layer_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM);

// grad_stream_RM holds dL/dz on entry and is overwritten. Overwrites grad_in_TM with dL/dx; it is grad_stream itself
// where all rows continue. Adds to `grads`, and to the path's gradients. Consumes `saved`.
void add_layer_backward(const LayerContext& context, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads);

}  // namespace espalier
