#include "espalier/model/expert_router.h"

#include <ATen/core/Tensor.h>

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

void fill(const WideRouter& wide, const LayerContext& c, const at::Tensor& narrow_RM) {
  c.ops.convert(narrow_RM, wide.normed_RM);
  c.ops.convert(c.weights.router.weight, wide.weight_EM);
}

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

}  // namespace

void router_logits(const LayerContext& c, const LayerSaved& saved, const at::Tensor& rows_RM, const WideRouter& wide) {
  const at::Tensor& logits_RE = saved.router_logits_RE;
  if (!wide.used()) return c.products.linear(logits_RE, rows_RM, c.weights.router);
  fill(wide, c, rows_RM);
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.linear(logits_RE, wide.normed_RM, wide.weight_EM, at::Tensor());
  for_each_wide_pair(c, wide, [&](std::size_t, const LowRank& pair, const at::Tensor& room) {
    LowRankProducts(c.ops, c.ops.scale).add(logits_RE, wide.normed_RM, pair, room);
  });
}

void choose_experts(const LayerContext& c, const LayerSaved& saved) {
  const bool scaled = saved.plain_weight_RK.defined();
  c.ops.choose_experts(saved.router_logits_RE, given_experts(c), rule_of(c), saved.router_choice_RK,
                       scaled ? saved.plain_weight_RK : saved.router_weight_RK);
  if (scaled)
    c.ops.scale_by_expert(saved.plain_weight_RK, saved.router_choice_RK, c.weights.expert_scale_E,
                          saved.router_weight_RK);
}

void router_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_weight_RK,
                     const LayerViews& grads, const at::Tensor& grad_logits_RE) {
  if (saved.plain_weight_RK.defined())
    c.ops.scale_by_expert_backward(saved.plain_weight_RK, saved.router_choice_RK, c.weights.expert_scale_E,
                                   grad_weight_RK, grads.expert_scale_E);
  const bool penalised = c.penalties != nullptr && !c.penalties->of_layer.empty();
  const std::int64_t l = expert_layer(c);
  c.ops.router_backward(saved.router_logits_RE, saved.router_choice_RK, rule_of(c), grad_weight_RK,
                        penalised ? c.penalties->of_layer[static_cast<std::size_t>(l)] : RouterPenalty{},
                        grad_logits_RE, penalised ? c.penalties->value_L2.select(0, l) : at::Tensor());
}

void add_wide_router_backward(const LayerContext& c, const at::Tensor& grad_logits_RE, const at::Tensor& rows_RM,
                              const WideRouter& wide, const Projection& grads, const at::Tensor& grad_rows_sum_RM) {
  fill(wide, c, rows_RM);
  const TimedPart timed(c.timer, part::kProducts);
  if (grads.weight.defined())
    c.ops.add_linear_grad_weight(grads.weight, at::Tensor(), grad_logits_RE, wide.normed_RM, at::Tensor());
  c.ops.add_linear_grad_input(grad_rows_sum_RM, grad_logits_RE, wide.weight_EM);
  for_each_wide_pair(c, wide, [&](std::size_t i, const LowRank& pair, const at::Tensor& room) {
    const LowRankProducts products(c.ops, c.ops.scale);
    products.add_grad_weight(grads.low_rank[i], grad_logits_RE, wide.normed_RM, pair, room, at::Tensor());
    products.add_grad_input(grad_rows_sum_RM, grad_logits_RE, pair, room);
  });
}

}  // namespace espalier
