#include "espalier/model/expert_mlp.h"

#include <ATen/core/Tensor.h>

#include "espalier/base/error.h"
#include "espalier/device/held_buffers.h"
#include "espalier/device/scalar_type.h"
#include "espalier/model/expert_products.h"
#include "espalier/model/mlp_buffers.h"

namespace espalier {
namespace {

// The number of this layer among the layers with experts.
std::int64_t expert_layer(const LayerContext& c) { return c.shape.expert_layers_before(c.layer); }

// The experts that each continuing row is given; undefined where no row is given any.
at::Tensor given_experts(const LayerContext& c) {
  if (!c.input.given_LTK.defined()) return {};
  const std::int64_t k = c.shape.experts_per_token;
  if (c.narrow) return c.input.given_output_OK.view({c.input.outputs(), k});
  return c.input.given_LTK.view({-1, c.input.rows(), k}).select(0, expert_layer(c));
}

// Experts' weights have the factor of what a half of the block adds to the stream.
RouterRule rule_of(const LayerContext& c) {
  RouterRule rule = c.shape.norm_topk_prob;
  rule.sigmoid = c.shape.router.sigmoid, rule.scaling = c.shape.router.scaling * c.shape.scales.residual;
  rule.groups = c.shape.router.groups, rule.top_groups = c.shape.router.top_groups;
  rule.correction_E = c.weights.correction_bias_E;
  return rule;
}

// The router's factors. Its logits may be wider than the model's rows: then both factors are widened first.
struct WideRouter {
  at::Tensor normed_RM, weight_EM;

  bool used() const { return normed_RM.defined(); }
  void fill(const LayerContext& c, const at::Tensor& narrow_RM) const {
    c.ops.convert(narrow_RM, normed_RM);
    c.ops.convert(c.weights.router.weight, weight_EM);
  }
};

// The router's pairs in the dtype of wide logits: visit(i, pair, room of low rank).
void for_each_wide_pair(const LayerContext& c, const WideRouter& wide, auto&& visit) {
  for (std::size_t i = 0; i < c.weights.router.low_rank.size(); ++i) {
    const LowRank& narrow = c.weights.router.low_rank[i];
    const ArenaScope scope(c.arena);
    const auto widened = [&](const at::Tensor& x) {
      const at::Tensor out = c.arena.take(x.sizes(), wide.normed_RM.scalar_type());
      c.ops.convert(x, out);
      return out;
    };
    const LowRank pair{widened(narrow.a_rK), widened(narrow.b_Nr), narrow.first, narrow.scale};
    visit(i, pair, c.arena.take({wide.normed_RM.size(0), pair.a_rK.size(0)}, wide.normed_RM.scalar_type()));
  }
}

void router_logits(const LayerContext& c, const at::Tensor& normed_RM, const WideRouter& wide,
                   const at::Tensor& logits_RE) {
  if (!wide.used()) return c.products.linear(logits_RE, normed_RM, c.weights.router);
  wide.fill(c, normed_RM);
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.linear(logits_RE, wide.normed_RM, wide.weight_EM, at::Tensor());
  for_each_wide_pair(c, wide, [&](std::size_t, const LowRank& pair, const at::Tensor& room) {
    LowRankProducts(c.ops, c.ops.scale).add(logits_RE, wide.normed_RM, pair, room);
  });
}

// From dL/dlogits: adds the gradient of the router's weight, and dL/dx to what is wide enough for it.
void add_wide_router_backward(const LayerContext& c, const at::Tensor& grad_logits_RE, const at::Tensor& normed_RM,
                              const WideRouter& wide, const Projection& grads, const at::Tensor& grad_normed_sum_RM) {
  wide.fill(c, normed_RM);
  const TimedPart timed(c.timer, part::kProducts);
  if (grads.weight.defined())
    c.ops.add_linear_grad_weight(grads.weight, at::Tensor(), grad_logits_RE, wide.normed_RM, at::Tensor());
  c.ops.add_linear_grad_input(grad_normed_sum_RM, grad_logits_RE, wide.weight_EM);
  for_each_wide_pair(c, wide, [&](std::size_t i, const LowRank& pair, const at::Tensor& room) {
    const LowRankProducts products(c.ops, c.ops.scale);
    products.add_grad_weight(grads.low_rank[i], grad_logits_RE, wide.normed_RM, pair, room, at::Tensor());
    products.add_grad_input(grad_normed_sum_RM, grad_logits_RE, pair, room);
  });
}

// dL/dlogits from dL/dw and the router losses.
void router_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_weight_RK,
                     const at::Tensor& grad_logits_RE) {
  const bool penalised = c.penalties != nullptr && !c.penalties->of_layer.empty();
  const std::int64_t l = expert_layer(c);
  c.ops.router_backward(saved.router_logits_RE, saved.router_choice_RK, rule_of(c), grad_weight_RK,
                        penalised ? c.penalties->of_layer[static_cast<std::size_t>(l)] : RouterPenalty{},
                        grad_logits_RE, penalised ? c.penalties->value_L2.select(0, l) : at::Tensor());
}

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

void add_shared_forward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM,
                        const at::Tensor& sum_RM, const ExpertScratch& scratch) {
  const EveryRow rows(c, normed_RM.size(0));
  if (c.shape.shared_expert.gate) {
    c.products.linear(saved.shared_logit_R1, normed_RM, c.weights.shared_expert_gate);
    c.ops.choose_experts(saved.shared_logit_R1, {}, shared_rule(), rows.choice_R1, saved.shared_weight_R1);
  }
  const ConstantWeight constant(c, rows);
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.add_experts(rows.sorted, shared_expert_of(c, c.weights), normed_RM,
                    constant.value_R1.defined() ? constant.value_R1 : saved.shared_weight_R1, saved.shared_gate_up_RW,
                    sum_RM, scratch);
}

void add_shared_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM,
                         const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                         const ExpertScratch& scratch) {
  const EveryRow rows(c, normed_RM.size(0));
  const ConstantWeight constant(c, rows);
  const bool is_constant = constant.value_R1.defined();
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.add_experts_backward(rows.sorted, shared_expert_of(c, c.weights), normed_RM,
                             is_constant ? constant.value_R1 : saved.shared_weight_R1, saved.shared_gate_up_RW, grad_RM,
                             shared_expert_of(c, grads), out.normed_RM,
                             is_constant ? constant.gradient_R1 : out.weight_RK, scratch);
}

// From dL/dw of the shared expert's gate: adds the gradient of the gate and what it gives the rows.
void add_shared_gate_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_weight_R1,
                              const at::Tensor& normed_RM, const LayerViews& grads, const at::Tensor& grad_logit_R1,
                              const at::Tensor& product) {
  const EveryRow rows(c, normed_RM.size(0));
  c.ops.router_backward(saved.shared_logit_R1, rows.choice_R1, shared_rule(), grad_weight_R1, {}, grad_logit_R1, {});
  c.products.add_linear_grad_weight(grads.shared_expert_gate, c.weights.shared_expert_gate, grad_logit_R1, normed_RM,
                                    product);
}

}  // namespace

void expert_mlp_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  const ExpertForwardBuffers declared(c.block(), saved.stream_mid_RM.size(0), stream_out_RM.defined());
  using Stage = ExpertForwardBuffers::Stage;
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::router);
  const at::Tensor& normed_RM = held[declared.normed_RM];
  c.ops.norm(saved.stream_mid_RM, c.mlp_norm(c.weights), c.shape.rms_norm_eps, normed_RM, saved.mlp_rstd_R);
  router_logits(c, normed_RM, {held[declared.wide_normed_RM], held[declared.wide_router_EM]}, saved.router_logits_RE);
  held.enter(Stage::experts);
  const at::Tensor& sum_RM = held[declared.sum_RM];
  c.ops.choose_experts(saved.router_logits_RE, given_experts(c), rule_of(c), saved.router_choice_RK,
                       saved.router_weight_RK);
  if (sum_RM.defined()) c.ops.zero(sum_RM);
  expert_products(c.mesh).add_forward(
      c, saved, normed_RM, sum_RM,
      {held[declared.expert_rows_RM], held[declared.act_RF], {}, {}, held[declared.low_rank_Rr]});
  if (c.shape.shared_expert.inner > 0) {
    held.enter(Stage::shared);
    add_shared_forward(
        c, saved, normed_RM, sum_RM,
        {held[declared.expert_rows_RM], held[declared.shared_act_RF], {}, {}, held[declared.low_rank_Rr]});
  }
  if (!sum_RM.defined()) return;
  c.mesh.tp.add_over_ranks(sum_RM);
  c.ops.round_sum(saved.stream_mid_RM, sum_RM, stream_out_RM);
}

void add_expert_mlp_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                             const LayerViews& grads) {
  using Stage = ExpertBackwardBuffers::Stage;
  const ExpertBackwardBuffers declared(c.block(), grad_stream_RM.size(0));
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::experts);
  const at::Tensor normed_RM = held[declared.normed_RM];
  c.ops.norm_again(saved.stream_mid_RM, c.mlp_norm(c.weights), saved.mlp_rstd_R, normed_RM);
  const at::Tensor& grad_weight_RK = held[declared.grad_weight_RK];
  const at::Tensor& grad_normed_sum_RM = held[declared.grad_normed_sum_RM];
  c.ops.zero(grad_normed_sum_RM);
  c.ops.zero(grad_weight_RK);
  expert_products(c.mesh).add_backward(
      c, saved, normed_RM, grad_stream_RM, grads, {grad_normed_sum_RM, grad_weight_RK},
      {held[declared.expert_rows_RM], held[declared.act_RF], held[declared.grad_gate_up_RW],
       held[declared.expert_product], held[declared.low_rank_Rr]});
  const SharedExpert& shared = c.shape.shared_expert;
  const at::Tensor& grad_shared_weight_R1 = held[declared.grad_shared_weight_R1];
  if (shared.inner > 0) {
    held.enter(Stage::shared);
    add_shared_backward(
        c, saved, normed_RM, grad_stream_RM, grads, {grad_normed_sum_RM, grad_shared_weight_R1},
        {held[declared.expert_rows_RM], held[declared.shared_act_RF], held[declared.grad_shared_gate_up_RW],
         held[declared.shared_product], held[declared.low_rank_Rr]});
  }
  c.mesh.tp.add_over_ranks(grad_normed_sum_RM);
  c.mesh.tp.add_over_ranks(grad_weight_RK);
  if (shared.gate) c.mesh.tp.add_over_ranks(grad_shared_weight_R1);
  held.enter(Stage::router);
  const at::Tensor& grad_logits_RE = held[declared.grad_logits_RE];
  router_backward(c, saved, grad_weight_RK, grad_logits_RE);
  const WideRouter wide{held[declared.wide_normed_RM], held[declared.wide_router_EM]};
  if (wide.used())
    add_wide_router_backward(c, grad_logits_RE, normed_RM, wide, grads.router, grad_normed_sum_RM);
  else
    c.products.add_linear_grad_weight(grads.router, c.weights.router, grad_logits_RE, normed_RM,
                                      held[declared.router_product]);
  const at::Tensor& grad_shared_logit_R1 = held[declared.grad_shared_logit_R1];
  if (shared.gate)
    add_shared_gate_backward(c, saved, grad_shared_weight_R1, normed_RM, grads, grad_shared_logit_R1,
                             held[declared.shared_gate_product]);
  const at::Tensor& grad_normed_RM = normed_RM;  // its values are no longer needed
  c.ops.round_sum(at::Tensor(), grad_normed_sum_RM, grad_normed_RM);
  if (!wide.used()) c.products.add_linear_grad_input(grad_normed_RM, grad_logits_RE, c.weights.router);
  if (shared.gate) c.products.add_linear_grad_input(grad_normed_RM, grad_shared_logit_R1, c.weights.shared_expert_gate);
  c.ops.add_norm_backward(saved.stream_mid_RM, c.mlp_norm(c.weights), saved.mlp_rstd_R, grad_normed_RM, grad_stream_RM,
                          c.mlp_norm(grads));
}

namespace {

// No rows, in the form that products of experts take them.
struct NoRows {
  explicit NoRows(const LayerContext& c)
      : normed_0M(c.arena.take({0, c.shape.hidden}, c.dtype())),
        sum_0M(c.arena.take({0, c.shape.hidden}, accumulator_type(c.dtype()))),
        weight_0K(c.arena.take({0, c.shape.experts_per_token}, accumulator_type(c.dtype()))) {
    saved.router_choice_RK = c.arena.take({0, c.shape.experts_per_token}, at::kInt);
    saved.router_weight_RK = weight_0K;
  }

  at::Tensor normed_0M, sum_0M, weight_0K;
  LayerSaved saved;
};

}  // namespace

void join_experts_forward(const LayerContext& c) {
  const ArenaScope scope(c.arena);
  const NoRows none(c);
  expert_products(c.mesh).add_forward(c, none.saved, none.normed_0M, none.sum_0M, {});
}

void join_experts_backward(const LayerContext& c, const LayerViews& grads) {
  const ArenaScope scope(c.arena);
  const NoRows none(c);
  expert_products(c.mesh).add_backward(c, none.saved, none.normed_0M, none.normed_0M, grads,
                                       {none.sum_0M, none.weight_0K}, {});
}

}  // namespace espalier
