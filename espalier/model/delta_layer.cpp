#include "espalier/model/delta_layer.h"

#include <ATen/ATen.h>

#include "espalier/device/held_buffers.h"
#include "espalier/model/branch.h"
#include "espalier/model/mlp.h"

namespace espalier {
namespace {

DeltaRuleProblem problem_of(const LayerContext& c, const LayerSaved& saved, const std::vector<StateRun>& runs) {
  const LayerViews& w = c.weights;
  return {c.shape.delta_rule, saved.projected_TW, w.conv_CK, w.a_log_H, w.dt_bias_H, w.conv_bias_C, w.skip_H, runs};
}

GatedNormProblem gate_of(const LayerContext& c, const LayerSaved& saved) {
  return {c.shape.delta_rule, c.shape.rms_norm_eps, saved.mixed_TV, saved.projected_TW, c.weights.mixed_norm};
}

// The latents of z and a, side by side.
struct GateLatents {
  at::Tensor of_z_TC, of_a_TC;

  explicit GateLatents(const at::Tensor& both_TC)
      : of_z_TC(both_TC.narrow(1, 0, both_TC.size(1) / 2)),
        of_a_TC(both_TC.narrow(1, both_TC.size(1) / 2, both_TC.size(1) / 2)) {}
};
// The columns of projected rows that are products with rows, and those of z and a where these are not.
struct ProjectedColumns {
  at::Tensor of_rows_TW, z_TV, a_TA;

  ProjectedColumns(const DeltaRuleShape& s, const at::Tensor& projected_TW) : of_rows_TW(projected_TW) {
    if (!s.decays_channels()) return;
    const std::int64_t first = s.projected_from_rows();
    of_rows_TW = projected_TW.narrow(1, 0, first);
    z_TV = projected_TW.narrow(1, first, s.value_width());
    a_TA = projected_TW.narrow(1, first + s.value_width(), s.decays());
  }
};

void project(const LayerContext& c, const at::Tensor& normed_TM, const LayerSaved& saved) {
  const ProjectedColumns columns(c.shape.delta_rule, saved.projected_TW);
  c.products.linear(columns.of_rows_TW, normed_TM, c.weights.projected);
  if (!c.shape.delta_rule.decays_channels()) return;
  c.products.linear(saved.gate_latents_TC, normed_TM, c.weights.gate_latents);
  const GateLatents latents(saved.gate_latents_TC);
  c.products.linear(columns.z_TV, latents.of_z_TC, c.weights.gate_z);
  c.products.linear(columns.a_TA, latents.of_a_TC, c.weights.gate_a);
}

// The gradients of the projections, and of the normed rows; normed_TM holds these rows first and their gradient then.
void add_project_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_projected_TW,
                          const LayerViews& grads, const DeltaBackwardBuffers& declared, const HeldBuffers& held,
                          const at::Tensor& normed_TM) {
  const LayerViews& w = c.weights;
  const ProjectedColumns grad(c.shape.delta_rule, grad_projected_TW);
  c.products.add_linear_grad_weight(grads.projected, w.projected, grad.of_rows_TW, normed_TM,
                                    held[declared.projected_product]);
  const bool gates = c.shape.delta_rule.decays_channels();
  const at::Tensor grad_latents_TC = held[declared.grad_gate_latents_TC];
  if (gates) {
    const GateLatents latents(saved.gate_latents_TC), grad_latents(grad_latents_TC);
    c.products.add_linear_grad_weight(grads.gate_z, w.gate_z, grad.z_TV, latents.of_z_TC,
                                      held[declared.gate_z_product]);
    c.products.add_linear_grad_weight(grads.gate_a, w.gate_a, grad.a_TA, latents.of_a_TC,
                                      held[declared.gate_a_product]);
    c.products.linear_grad_input(grad_latents.of_z_TC, grad.z_TV, w.gate_z);
    c.products.linear_grad_input(grad_latents.of_a_TC, grad.a_TA, w.gate_a);
    c.products.add_linear_grad_weight(grads.gate_latents, w.gate_latents, grad_latents_TC, normed_TM,
                                      held[declared.gate_latents_product]);
  }
  const at::Tensor& grad_normed_TM = normed_TM;  // its values are no longer needed
  c.products.linear_grad_input(grad_normed_TM, grad.of_rows_TW, w.projected);
  if (gates) c.products.add_linear_grad_input(grad_normed_TM, grad_latents_TC, w.gate_latents);
}

// The half of a block that ends with the output's projection.
Branch branch_of(const LayerContext& c) { return {{}, {}, {}, c.weights.output}; }

}  // namespace

void delta_forward(const LayerContext& c, LayerSaved& saved) {
  using Stage = DeltaForwardBuffers::Stage;
  const BlockRows rows = c.block_rows();
  const DeltaForwardBuffers declared(c.block(), rows);
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::projection);
  const at::Tensor normed_TM = held[declared.normed_TM];
  c.ops.norm(saved.stream_in_TM, c.attention_norm(c.weights), c.shape.rms_norm_eps, normed_TM, saved.norm_rstd_T);
  project(c, normed_TM, saved);
  held.enter(Stage::rows);
  {
    const TimedPart timed(c.timer, part::kAttention);
    const std::vector<StateRun> runs = c.kv.runs(c.layer, held[declared.states_FN], {});
    c.ops.delta_rule(problem_of(c, saved, runs), saved.mixed_TV);
  }
  if (rows.continuing == 0) return;
  held.enter(Stage::output);
  const at::Tensor gated_TV = held[declared.gated_TV];
  c.ops.gated_norm(gate_of(c, saved), gated_TV);
  add_branch(c, branch_of(c), c.continuing_rows(saved.stream_in_TM, held[declared.residual_RM]),
             c.continuing_rows(gated_TV, held[declared.gated_RV]), held[declared.branch_RM], saved.stream_mid_RM);
}

void add_delta_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                        const at::Tensor& grad_in_TM, const LayerViews& grads) {
  using Stage = DeltaBackwardBuffers::Stage;
  const BlockRows rows = c.block_rows();
  const bool continues = rows.continuing > 0;
  const DeltaBackwardBuffers declared(c.block(), rows);
  HeldBuffers held(c.arena, declared, c.dtype());
  if (c.narrow) c.ops.zero(grad_in_TM);
  held.enter(Stage::mlp);
  if (continues) add_mlp_backward(c, saved, grad_stream_RM, grads);
  const at::Tensor grad_mixed_TV = held[declared.grad_mixed_TV];
  if (c.narrow) c.ops.zero(grad_mixed_TV);
  held.enter(Stage::output);
  if (continues) {
    const at::Tensor grad_branch_RM =
        add_branch_backward(c, branch_of(c), grad_stream_RM, held[declared.grad_branch_RM], at::Tensor());
    const at::Tensor gated_TV = held[declared.gated_TV];
    if (grads.output.trains()) {
      c.ops.gated_norm(gate_of(c, saved), gated_TV);
      c.products.add_linear_grad_weight(grads.output, c.weights.output, grad_branch_RM,
                                        c.continuing_rows(gated_TV, held[declared.gated_RV]),
                                        held[declared.output_product]);
    }
    const at::Tensor& grad_gated_RV = c.narrow ? held[declared.grad_gated_RV] : grad_mixed_TV;
    c.products.linear_grad_input(grad_gated_RV, grad_branch_RM, c.weights.output);
    if (c.narrow) {
      c.ops.add_scatter(grad_gated_RV, c.input.output_row_O, grad_mixed_TV);
      c.ops.add_scatter(grad_stream_RM, c.input.output_row_O, grad_in_TM);
    }
  }
  held.enter(Stage::rows);
  const at::Tensor grad_projected_TW = held[declared.grad_projected_TW];
  {
    const TimedPart timed(c.timer, part::kAttention);
    c.ops.add_gated_norm_backward(gate_of(c, saved), grad_mixed_TV, grad_mixed_TV, grad_projected_TW, grads.mixed_norm);
    c.ops.zero(held[declared.grad_states_FN]);
    const std::vector<StateRun> runs = c.kv.runs(c.layer, held[declared.states_FN], held[declared.grad_states_FN]);
    std::vector<StateRun> forks;  // whose states are made again
    for (const StateRun& run : runs)
      if (run.forks) forks.push_back(run);
    c.ops.delta_rule(problem_of(c, saved, forks), at::Tensor());
    c.ops.add_delta_rule_backward(
        problem_of(c, saved, runs), grad_mixed_TV,
        {grad_projected_TW, grads.conv_CK, grads.a_log_H, grads.dt_bias_H, grads.conv_bias_C, grads.skip_H});
    c.kv.count_runs_backward(c.layer);
  }
  held.enter(Stage::input);
  const at::Tensor normed_TM = held[declared.normed_TM];
  if (grads.projected.trains() || grads.gate_latents.trains())
    c.ops.norm_again(saved.stream_in_TM, c.attention_norm(c.weights), saved.norm_rstd_T, normed_TM);
  add_project_backward(c, saved, grad_projected_TW, grads, declared, held, normed_TM);
  const at::Tensor& grad_normed_TM = normed_TM;
  c.mesh.tp.add_over_ranks(grad_normed_TM);
  c.ops.add_norm_backward(saved.stream_in_TM, c.attention_norm(c.weights), saved.norm_rstd_T, grad_normed_TM,
                          grad_in_TM, c.attention_norm(grads));
}

}  // namespace espalier
