#include "espalier/model/layer.h"

#include <ATen/core/Tensor.h>

#include "espalier/device/held_buffers.h"
#include "espalier/model/branch.h"
#include "espalier/model/mixer_layer.h"
#include "espalier/model/mlp.h"
#include "espalier/model/mlp_buffers.h"

namespace espalier {
namespace {

const MixerLayer& mixer_of(const LayerContext& c) { return mixer_layer(c.own.mixer->kind()); }

const Projection& output_of(const LayerContext& c, const LayerViews& views) {
  return views.mixer.products[c.own.mixer->output_product()];
}

// The half of a block that ends with the mixer's last product.
Branch branch_of(const LayerContext& c, const LayerSaved& saved) {
  return {c.weights.mixer_post_norm_M, saved.branch_RM, saved.branch_rstd_R, output_of(c, c.weights)};
}

void mixer_forward(const LayerContext& c, const LayerSaved& saved) {
  const std::unique_ptr<MixerForward> mixer = mixer_of(c).forward(c, saved);
  mixer->mix();
  if (c.continuing() == 0) return;
  const at::Tensor mixed_RK = mixer->mixed();
  const MixerOutputBuffers declared(c.block(), c.block_rows());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(0);
  add_branch(c, branch_of(c, saved), c.continuing_rows(saved.stream_in_TM, held[declared.residual_RM]), mixed_RK,
             held[declared.branch_RM], saved.stream_mid_RM);
}

// The gradient of what the last product read, and of its weights.
void add_output_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_stream_RM,
                         const LayerViews& grads, MixerBackward& mixer) {
  mixer.enter_output();
  const at::Tensor grad_mixed_RK = mixer.grad_mixed();
  const Projection& grad_output = output_of(c, grads);
  const at::Tensor mixed_RK = grad_output.trains() ? mixer.mixed_again() : at::Tensor();
  const MixerOutputBackwardBuffers declared(c.block(), c.block_rows(), c.own.mixer->mixed_width());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(0);
  const Branch branch = branch_of(c, saved);
  const at::Tensor grad_branch_RM =
      add_branch_backward(c, branch, grad_stream_RM, held[declared.grad_branch_RM], grads.mixer_post_norm_M);
  c.products.add_linear_grad_weight(grad_output, branch.projection, grad_branch_RM, mixed_RK,
                                    held[declared.output_product]);
  c.products.linear_grad_input(grad_mixed_RK, grad_branch_RM, branch.projection);
}

}  // namespace

void take_mixer_saved(const LayerContext& c, LayerSaved& saved) {
  const MixerHalfSaved declared(c.block(), c.block_rows());
  const auto take = [&](BufferList::Place place) { return c.arena.take(declared, place, c.dtype()); };
  saved.norm_rstd_T = take(declared.norm_rstd_T);
  saved.mixer = mixer_of(c).take_saved(c);
  saved.stream_mid_RM = take(declared.stream_mid_RM);
  saved.branch_RM = take(declared.branch_RM);
  saved.branch_rstd_R = take(declared.branch_rstd_R);
}

void take_mlp_saved(const LayerContext& c, LayerSaved& saved) {
  const MlpSavedBuffers declared(c.block(), c.block_rows());
  const auto take = [&](BufferList::Place place) { return c.arena.take(declared, place, c.dtype()); };
  saved.mlp_rstd_R = take(declared.mlp_rstd_R);
  saved.gate_up_RW = take(declared.gate_up_RW);
  saved.input_gate_RP = take(declared.input_gate_RP);
  saved.input_branch_RM = take(declared.input_branch_RM);
  saved.input_branch_rstd_R = take(declared.input_branch_rstd_R);
  saved.mlp_branch_RM = take(declared.branch_RM);
  saved.mlp_branch_rstd_R = take(declared.branch_rstd_R);
  saved.router_logits_RE = take(declared.router_logits_RE);
  saved.router_choice_RK = take(declared.router_choice_RK);
  saved.router_weight_RK = take(declared.router_weight_RK);
  saved.shared_gate_up_RW = take(declared.shared_gate_up_RW);
  saved.shared_logit_R1 = take(declared.shared_logit_R1);
  saved.shared_weight_R1 = take(declared.shared_weight_R1);
  saved.plain_weight_RK = take(declared.plain_weight_RK);
  saved.shared_branch_RM = take(declared.shared_branch_RM);
  saved.shared_branch_rstd_R = take(declared.shared_branch_rstd_R);
  saved.expert_branch_RM = take(declared.expert_branch_RM);
  saved.expert_branch_rstd_R = take(declared.expert_branch_rstd_R);
}

void layer_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  mixer_forward(c, saved);
  if (c.continuing() == 0) return;
  mlp_forward(c, saved, stream_out_RM);
  if (c.own.output_scale.is_used() && stream_out_RM.defined()) c.ops.scale(stream_out_RM, c.own.output_scale.value);
}

void layer_forward_again(const LayerContext& c, LayerSaved& saved, ItemState state) {
  if (state.recomputes_attention()) take_mixer_saved(c, saved);
  if (state.recomputes_mlp()) take_mlp_saved(c, saved);
  if (state.recomputes_attention())
    layer_forward(c, saved, at::Tensor());
  else if (state.recomputes_mlp() && c.continuing() > 0)
    mlp_forward(c, saved, at::Tensor());
}

void add_layer_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads) {
  const std::unique_ptr<MixerBackward> mixer = mixer_of(c).backward(c, saved, grads.mixer);
  if (c.narrow) c.ops.zero(grad_in_TM);
  if (c.continuing() > 0) {
    if (c.own.output_scale.is_used()) c.ops.scale(grad_stream_RM, c.own.output_scale.value);
    add_mlp_backward(c, saved, grad_stream_RM, grads);
    add_output_backward(c, saved, grad_stream_RM, grads, *mixer);
    if (c.narrow) c.ops.add_scatter(grad_stream_RM, c.input.output_row_O, grad_in_TM);
  }
  const at::Tensor grad_input_TM = mixer->add();
  c.mesh.tp.add_over_ranks(grad_input_TM);
  if (c.has_norms_before())
    c.ops.add_norm_backward(saved.stream_in_TM, c.mixer_norm(c.weights), saved.norm_rstd_T, grad_input_TM, grad_in_TM,
                            c.mixer_norm(grads));
  else
    c.ops.add_scaled(grad_in_TM, grad_input_TM, 1, grad_in_TM);
}

}  // namespace espalier
