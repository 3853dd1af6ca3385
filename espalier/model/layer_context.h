// Types shared by the parts of a decoder block: the state saved for the backward, and the arguments of a run.
//
// Shapes: T rows, R rows that continue past the mixer (all, or in a narrow last block those with an output), M width, F
// inner width, E experts, k of them a row, L layers of experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/device/arena.h"
#include "espalier/device/saved_buffers.h"
#include "espalier/metrics/timer.h"
#include "espalier/model/block_buffers.h"
#include "espalier/model/kv_source.h"
#include "espalier/model/model_input.h"
#include "espalier/model/model_views.h"
#include "espalier/model/products.h"
#include "espalier/model/rotary.h"
#include "espalier/ops/operations.h"
#include "espalier/parallel/mesh.h"

namespace espalier {

// State for the backward of one block. Everything else is recomputed from it cheaply, row by row.
struct LayerSaved {
  at::Tensor stream_in_TM;
  // Around the mixer: 1/rms of the norm before it; the stream behind it; its last product, if a norm follows.
  at::Tensor norm_rstd_T, stream_mid_RM, branch_RM, branch_rstd_R;
  SavedBuffers mixer;  // what the kind declares
  at::Tensor mlp_rstd_R;
  at::Tensor mlp_branch_RM, mlp_branch_rstd_R;
  at::Tensor gate_up_RW;  // [R, 2*F]; with experts [R*k, 2*F], sorted by expert
  at::Tensor router_logits_RE, router_choice_RK, router_weight_RK;  // experts only
  at::Tensor shared_gate_up_RW, shared_logit_R1, shared_weight_R1;  // of the shared expert
  at::Tensor plain_weight_RK;                                       // router_weight before its experts' factors
  // Results of the shared expert and of the experts, where they are apart.
  at::Tensor shared_branch_RM, shared_branch_rstd_R, expert_branch_RM, expert_branch_rstd_R;
  at::Tensor input_gate_RP, input_branch_RM, input_branch_rstd_R;  // of the layer's input (model/layer_inputs.h)
};

// Router losses added by the backward of each expert layer, and the buffer for their values. Empty: none.
struct RouterPenalties {
  std::vector<RouterPenalty> of_layer;  // [L]
  at::Tensor value_L2;                  // float64, overwritten: the auxiliary and the z penalty, summed over rows
};

struct LayerContext {
  const ModelShape& shape;  // this rank's part: LocalShape::own()
  const LayerShape& own;    // of this layer
  const LayerViews& weights;
  const std::vector<RotaryTables>& rotations;  // as Mixer::rotations says
  const ModelInput& input;
  KvSource& kv;
  std::int64_t layer;
  bool narrow;  // only output rows continue
  Arena& arena;
  Timer* timer;  // times matrix products and attention; may be null
  const Mesh& mesh;
  const RouterPenalties* penalties = nullptr;                // for a backward; may be null
  at::Tensor layer_input_TP = {}, grad_layer_input_TP = {};  // LayerInputs; undefined: the model has none
  const Operations& ops = arena.device().operations();
  const Products products{ops, timer, mesh.tp, arena};

  // The norms in `views`: the weights or their gradients.
  NormWeights mixer_norm(const LayerViews& views) const {
    return {views.mixer_norm_M, shape.norm, views.mixer_norm_bias_M};
  }
  NormWeights mlp_norm(const LayerViews& views) const { return {views.mlp_norm_M, shape.norm, views.mlp_norm_bias_M}; }
  bool has_norms_before() const { return own.has_norms_before(); }
  bool has_norms_after() const { return own.has_norms_after(); }
  bool finishes_branch() const { return has_norms_after() || shape.scales.residual != 1; }

  at::ScalarType dtype() const { return weights.dtype; }
  // The sizes on which the block's buffer declarations depend.
  BlockShape block() const;
  BlockRows block_rows() const;
  std::int64_t rows() const { return input.rows(); }
  std::int64_t continuing() const { return narrow ? input.outputs() : input.rows(); }
  const at::Tensor& continuing_position_R() const { return narrow ? input.output_position_O : input.position_T; }
  // Overwrites x_RM with x_TM at the output rows and returns it; if all rows continue, returns x_TM.
  at::Tensor continuing_rows(const at::Tensor& x_TM, const at::Tensor& x_RM) const;

  // The input of a mixer: the layer's input, normalised into `room` if a norm stands before the mixer.
  at::Tensor mixer_input(const LayerSaved& saved, const at::Tensor& room_TM) const;
  // The same again, from what the forward saved; not filled unless `needed`.
  at::Tensor mixer_input_again(const LayerSaved& saved, const at::Tensor& room_TM, bool needed) const;
};

}  // namespace espalier
