#include "espalier/model/shared_expert.h"

#include <ATen/core/Tensor.h>

#include "espalier/base/error.h"
#include "espalier/device/scalar_type.h"

namespace espalier {
namespace {

LowRank of_one_expert(const LowRank& pair) {
  return {pair.a_rK.unsqueeze(0), pair.b_Nr.unsqueeze(0), pair.first, pair.scale};
}

// Gate, up and down of the shared expert, as the experts of a layer that has one. `views` are the weights or
// their gradients.
ExpertWeights shared_expert_of(const LayerContext& c, const LayerViews& views) {
  ExpertWeights out;
  out.activation = c.shape.activation;
  if (const at::Tensor& weight = views.shared_gate_up.weight; weight.defined()) out.gate_up_EWM = weight.unsqueeze(0);
  if (const at::Tensor& weight = views.shared_down.weight; weight.defined()) out.down_EMF = weight.unsqueeze(0);
  for (const LowRank& pair : views.shared_gate_up.low_rank) out.gate_up_low_rank.push_back(of_one_expert(pair));
  for (const LowRank& pair : views.shared_down.low_rank) out.down_low_rank.push_back(of_one_expert(pair));
  return out;
}

// The rule of its gate: w = sigmoid(logit).
RouterRule shared_rule() {
  RouterRule rule = false;
  rule.sigmoid = true;
  return rule;
}

// All rows, which choose the shared expert.
struct EveryRow {
  EveryRow(const LayerContext& c, std::int64_t rows) {
    Device& device = c.arena.device();
    choice_R1 = device.allocate({rows, 1}, at::kInt);
    c.ops.zero(choice_R1);
    sorted = {device.allocate({2}, at::kInt), device.allocate({rows}, at::kInt), device.allocate({rows}, at::kInt)};
    c.ops.sort_by_expert(choice_R1, sorted);
  }

  at::Tensor choice_R1;
  SortedSlots sorted;
};

// The factor of what a half of the block adds to the stream, as the weight of the shared expert in every row. Undefined
// if it is 1, or if a gate gives the weights.
struct ConstantWeight {
  ConstantWeight(const LayerContext& c, const EveryRow& rows) {
    const double factor = c.shape.scales.residual;
    if (factor == 1) return;
    ESPALIER_INTERNAL(!c.shape.shared_expert.gate, "a shared expert's gate beside a factor of its block");
    Device& device = c.arena.device();
    const std::int64_t count = rows.choice_R1.size(0);
    const at::Tensor logit_R1 = device.allocate({count, 1}, c.dtype());
    c.ops.zero(logit_R1);
    value_R1 = device.allocate({count, 1}, accumulator_type(c.dtype()));
    gradient_R1 = device.allocate({count, 1}, accumulator_type(c.dtype()));
    RouterRule rule = false;  // a softmax of one logit is 1
    rule.scaling = factor;
    c.ops.choose_experts(logit_R1, {}, rule, rows.choice_R1, value_R1);
  }

  at::Tensor value_R1, gradient_R1;  // nothing reads the latter
};

}  // namespace

void add_shared_forward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& rows_RM,
                        const at::Tensor& sum_RM, const ExpertScratch& scratch) {
  const EveryRow rows(c, rows_RM.size(0));
  if (c.shape.shared_expert.gate) {
    c.products.linear(saved.shared_logit_R1, rows_RM, c.weights.shared_expert_gate);
    c.ops.choose_experts(saved.shared_logit_R1, {}, shared_rule(), rows.choice_R1, saved.shared_weight_R1);
  }
  const ConstantWeight constant(c, rows);
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.add_experts(rows.sorted, shared_expert_of(c, c.weights), rows_RM,
                    constant.value_R1.defined() ? constant.value_R1 : saved.shared_weight_R1, saved.shared_gate_up_RW,
                    sum_RM, scratch);
}

void add_shared_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& rows_RM,
                         const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                         const ExpertScratch& scratch) {
  const EveryRow rows(c, rows_RM.size(0));
  const ConstantWeight constant(c, rows);
  const bool is_constant = constant.value_R1.defined();
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.add_experts_backward(rows.sorted, shared_expert_of(c, c.weights), rows_RM,
                             is_constant ? constant.value_R1 : saved.shared_weight_R1, saved.shared_gate_up_RW, grad_RM,
                             shared_expert_of(c, grads), out.normed_RM,
                             is_constant ? constant.gradient_R1 : out.weight_RK, scratch);
}

void add_shared_gate_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_weight_R1,
                              const at::Tensor& rows_RM, const LayerViews& grads, const at::Tensor& grad_logit_R1,
                              const at::Tensor& product) {
  const EveryRow rows(c, rows_RM.size(0));
  c.ops.router_backward(saved.shared_logit_R1, rows.choice_R1, shared_rule(), grad_weight_R1, {}, grad_logit_R1, {});
  c.products.add_linear_grad_weight(grads.shared_expert_gate, c.weights.shared_expert_gate, grad_logit_R1, rows_RM,
                                    product);
}

}  // namespace espalier
