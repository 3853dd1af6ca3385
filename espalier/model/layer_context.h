// Types shared by the two halves of a decoder block: the state saved for the backward, and the arguments of a run.
//
// Shapes: T rows, R rows that continue past the keys and values (all, or in a narrow last block those with an output),
// M width, H query heads, J key/value heads, D head size, F inner width, E experts, k of them a row, L layers of
// experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/device/arena.h"
#include "espalier/forecast/block_buffers.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/model_input.h"
#include "espalier/model/model_views.h"
#include "espalier/model/products.h"
#include "espalier/model/rotary.h"
#include "espalier/observe/timer.h"
#include "espalier/ops/operations.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// State for the backward of one block. Everything else is recomputed from it cheaply, row by row.
struct LayerSaved {
  at::Tensor stream_in_TM;
  at::Tensor norm_rstd_T, kv_TW;         // [T, 2*J*D] before norm and rotation, or of latents [T, J*(N + Dv)]
  at::Tensor q_RW, attended_RW, lse_HR;  // [R, H*D], q before norm and rotation; [R, H*Dv]
  // Latent attention: latents before their norm, and the rotated row that all keys share.
  at::Tensor query_latent_RC, query_latent_rstd_R, latent_TC, latent_rstd_T, rotary_key_TK;
  at::Tensor branch_RM, branch_rstd_R;  // o_proj's result, if a norm follows it
  at::Tensor projected_TW, mixed_TV;    // of the delta rule (ops/delta_rule.h), instead of attention's members
  at::Tensor gate_latents_TC;           // of z and a (DeltaRuleShape::gate_latent), side by side
  at::Tensor stream_mid_RM, mlp_rstd_R;
  at::Tensor mlp_branch_RM, mlp_branch_rstd_R;
  at::Tensor gate_up_RW;  // [R, 2*F]; with experts [R*k, 2*F], sorted by expert
  at::Tensor router_logits_RE, router_choice_RK, router_weight_RK;  // experts only
  at::Tensor shared_gate_up_RW, shared_logit_R1, shared_weight_R1;  // of the shared expert
};

// Router losses added by the backward of each expert layer, and the buffer for their values. Empty: none.
struct RouterPenalties {
  std::vector<RouterPenalty> of_layer;  // [L]
  at::Tensor value_L2;                  // float64, overwritten: the auxiliary and the z penalty, summed over rows
};

struct LayerContext {
  const ModelShape& shape;  // this rank's part: LocalShape::own()
  const LayerViews& weights;
  const RotaryTables& rotary;        // for this layer's kind
  const RotaryTables& query_rotary;  // the same, or the tables of queries (growing_tables)
  const ModelInput& input;
  KvSource& kv;
  std::int64_t layer;
  bool narrow;  // only output rows continue
  Arena& arena;
  Timer* timer;  // times matrix products and attention; may be null
  const Mesh& mesh;
  const RouterPenalties* penalties = nullptr;  // for a backward; may be null
  const Operations& ops = arena.device().operations();
  const Products products{ops, timer, mesh.tp, arena};

  // The norms in `views`: the weights or their gradients.
  NormWeights attention_norm(const LayerViews& views) const {
    return {views.attention_norm_M, shape.norm, views.attention_norm_bias_M};
  }
  NormWeights mlp_norm(const LayerViews& views) const { return {views.mlp_norm_M, shape.norm, views.mlp_norm_bias_M}; }
  bool has_norms_before() const { return shape.norm_place != NormPlace::after; }
  bool has_norms_after() const { return shape.norm_place != NormPlace::before; }
  bool finishes_branch() const { return has_norms_after() || shape.scales.residual != 1; }

  at::ScalarType dtype() const { return weights.dtype; }
  // The sizes on which the block's buffer declarations depend.
  BlockShape block() const;
  BlockRows block_rows() const;
  // Overwrites x_RM with x_TM at the output rows and returns it; if all rows continue, returns x_TM.
  at::Tensor continuing_rows(const at::Tensor& x_TM, const at::Tensor& x_RM) const;
};

}  // namespace espalier
