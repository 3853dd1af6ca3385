// Routers and experts on a CPU: an expert's products run over the rows that chose it, one expert after the other, so
// nothing is padded and an expert that nobody chose costs nothing.
#include <ATen/core/Tensor.h>

#include "espalier/ops/cpu/expert_kernels.h"
#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/cpu/router_kernels.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

moe::RouterShape shape_of(const at::Tensor& logits_RE, const at::Tensor& choice_RK, const RouterRule& rule) {
  return {choice_RK.size(0), logits_RE.size(1), choice_RK.size(1), rule.renormalise,
          rule.sigmoid,      rule.groups,       rule.top_groups,   rule.scaling};
}

void choose_experts(const at::Tensor& logits_RE, const at::Tensor& given_RK, const RouterRule& rule,
                    const at::Tensor& choice_RK, const at::Tensor& weight_RK) {
  dispatch(logits_RE.scalar_type(), [&]<class T>() {
    moe::choose_experts<T>(shape_of(logits_RE, choice_RK, rule), pointer<T>(logits_RE), pointer<std::int32_t>(given_RK),
                           pointer<std::int32_t>(choice_RK), pointer<accumulator_t<T>>(weight_RK),
                           pointer<accumulator_t<T>>(rule.correction_E));
  });
}

void router_backward(const at::Tensor& logits_RE, const at::Tensor& choice_RK, const RouterRule& rule,
                     const at::Tensor& grad_weight_RK, const RouterPenalty& penalty, const at::Tensor& grad_logits_RE,
                     const at::Tensor& penalties_2) {
  const moe::RowPenalty of_row{pointer<std::int32_t>(penalty.group_R), pointer<double>(penalty.probability_GE),
                               pointer<double>(penalty.z_G)};
  dispatch(logits_RE.scalar_type(), [&]<class T>() {
    const moe::PenaltySums sums = moe::router_backward<T>(
        shape_of(logits_RE, choice_RK, rule), pointer<T>(logits_RE), pointer<std::int32_t>(choice_RK),
        pointer<accumulator_t<T>>(grad_weight_RK), of_row, pointer<T>(grad_logits_RE));
    if (penalties_2.defined()) pointer<double>(penalties_2)[0] = sums.aux, pointer<double>(penalties_2)[1] = sums.z;
  });
}

void scale_by_expert(const at::Tensor& weight_RK, const at::Tensor& choice_RK, const at::Tensor& scale_E,
                     const at::Tensor& out_RK) {
  dispatch(scale_E.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    moe::scale_by_expert<T>(weight_RK.numel(), pointer<A>(weight_RK), pointer<std::int32_t>(choice_RK),
                            pointer<T>(scale_E), pointer<A>(out_RK));
  });
}

void scale_by_expert_backward(const at::Tensor& weight_RK, const at::Tensor& choice_RK, const at::Tensor& scale_E,
                              const at::Tensor& grad_RK, const at::Tensor& grad_scale_E) {
  dispatch(scale_E.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    moe::scale_by_expert_backward<T>(weight_RK.numel(), pointer<A>(weight_RK), pointer<std::int32_t>(choice_RK),
                                     pointer<T>(scale_E), pointer<A>(grad_RK), pointer<A>(grad_scale_E));
  });
}

void sort_by_expert(const at::Tensor& choice_RK, const SortedSlots& sorted) {
  moe::sort_by_expert({choice_RK.size(0), sorted.begin_E1.size(0) - 1, choice_RK.size(1)},
                      pointer<std::int32_t>(choice_RK), pointer<std::int32_t>(sorted.begin_E1),
                      pointer<std::int32_t>(sorted.row_S), pointer<std::int32_t>(sorted.slot_S));
}

// The row of one expert; undefined where there is none.
at::Tensor row_of(const at::Tensor& x_E, std::int64_t e) { return x_E.defined() ? x_E.select(0, e) : at::Tensor(); }

// A pair of one expert.
LowRank one_of(const LowRank& of_all, std::int64_t e) {
  return {of_all.a_rK.select(0, e), of_all.b_Nr.select(0, e), of_all.first, of_all.scale};
}

// The pairs' products of one expert's rows, whose h and u stand in the first rows of the scratch.
class ExpertPairs {
 public:
  ExpertPairs(const ProductOperations& products, const ExpertScratch& scratch, std::int64_t e, std::int64_t rows)
      : products_(products, moving_operations().scale), scratch_(scratch), e_(e), rows_(rows) {}

  void add(const std::vector<LowRank>& pairs, const at::Tensor& out, const at::Tensor& x) const {
    for (const LowRank& pair : pairs) products_.add(out, x, one_of(pair, e_), room());
  }
  void add_grad_input(const std::vector<LowRank>& pairs, const at::Tensor& grad_x, const at::Tensor& grad) const {
    for (const LowRank& pair : pairs) products_.add_grad_input(grad_x, grad, one_of(pair, e_), room());
  }
  void add_grad_weight(const std::vector<LowRank>& grads, const std::vector<LowRank>& pairs, const at::Tensor& grad,
                       const at::Tensor& x) const {
    for (std::size_t i = 0; i < grads.size(); ++i)
      products_.add_grad_weight(one_of(grads[i], e_), grad, x, one_of(pairs[i], e_), room(), scratch_.product);
  }

 private:
  at::Tensor room() const { return scratch_.low_rank_Rr.narrow(0, 0, rows_); }

  LowRankProducts products_;
  const ExpertScratch& scratch_;
  std::int64_t e_, rows_;
};

// The rows of one expert: which they are, and where their part of what stands sorted lies (gate and up values).
struct Expert {
  Expert(const SortedSlots& sorted, const at::Tensor& sorted_SW, std::int64_t e) {
    const auto* begin = pointer<std::int32_t>(sorted.begin_E1);
    range = {begin[e + 1] - begin[e], pointer<std::int32_t>(sorted.row_S) + begin[e],
             pointer<std::int32_t>(sorted.slot_S) + begin[e]};
    sorted_NW = sorted_SW.narrow(0, begin[e], range.count);
  }

  // x_N = x_R at the expert's rows.
  void gather(const at::Tensor& x_RM, const at::Tensor& x_NM) const {
    dispatch(x_RM.scalar_type(), [&]<class T>() {
      rows::gather<T>(range.count, x_RM.size(1), pointer<T>(x_RM), range.row, pointer<T>(x_NM));
    });
  }
  // sum_R += weight y_N; weight undefined: 1.
  void add_rows(const at::Tensor& y_NM, const at::Tensor& weight_RK, const at::Tensor& sum_RM) const {
    dispatch(y_NM.scalar_type(), [&]<class T>() {
      using A = accumulator_t<T>;
      moe::add_expert_rows<T>(range, y_NM.size(1), pointer<T>(y_NM), pointer<A>(weight_RK), pointer<A>(sum_RM));
    });
  }

  moe::ExpertRange range;
  at::Tensor sorted_NW;
};

void add_experts(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                 const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& sum_RM,
                 const ExpertScratch& scratch) {
  const ProductOperations products = product_operations();
  const SwigluOperations activation = swiglu_operations();
  for (std::int64_t e = 0; e < weights.gate_up_EWM.size(0); ++e) {
    const Expert expert(sorted, gate_up_SW, e);
    const std::int64_t N = expert.range.count;
    if (N == 0) continue;
    const at::Tensor rows_NM = scratch.rows_RM.narrow(0, 0, N);  // x, then the result
    expert.gather(x_RM, rows_NM);
    products.linear(expert.sorted_NW, rows_NM, weights.gate_up_EWM.select(0, e), row_of(weights.gate_up_bias_EW, e));
    const ExpertPairs pairs(products, scratch, e, N);
    pairs.add(weights.gate_up_low_rank, expert.sorted_NW, rows_NM);
    if (!sum_RM.defined()) continue;
    const at::Tensor act_NF = scratch.act_RF.narrow(0, 0, N);
    activation.swiglu(weights.activation, expert.sorted_NW, act_NF);
    products.linear(rows_NM, act_NF, weights.down_EMF.select(0, e), row_of(weights.down_bias_EM, e));
    pairs.add(weights.down_low_rank, rows_NM, act_NF);
    expert.add_rows(rows_NM, weight_RK, sum_RM);
  }
}

void add_experts_backward(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                          const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& grad_sum_RM,
                          const ExpertWeights& grads, const at::Tensor& grad_x_sum_RM, const at::Tensor& grad_weight_RK,
                          const ExpertScratch& scratch) {
  const ProductOperations products = product_operations();
  const SwigluOperations activation = swiglu_operations();
  const auto add_grad_weight = [&](const at::Tensor& grad_weight, const at::Tensor& grad_bias, const at::Tensor& grad,
                                   const at::Tensor& x) {
    at::Tensor product;
    if (scratch.product.defined() && grad_weight.defined())
      product = scratch.product.view({-1}).narrow(0, 0, grad_weight.numel()).view(grad_weight.sizes());
    products.add_linear_grad_weight(grad_weight, grad_bias, grad, x, product);
  };
  for (std::int64_t e = 0; e < weights.gate_up_EWM.size(0); ++e) {
    const Expert expert(sorted, gate_up_SW, e);
    const std::int64_t N = expert.range.count;
    if (N == 0) continue;
    const at::Tensor rows_NM = scratch.rows_RM.narrow(0, 0, N);  // dL/dsum, then x, then dL/dx
    const at::Tensor act_NF = scratch.act_RF.narrow(0, 0, N);    // first holds its own gradient
    const at::Tensor grad_gate_up_NW = scratch.grad_gate_up_RW.narrow(0, 0, N);
    expert.gather(grad_sum_RM, rows_NM);
    products.linear_grad_input(act_NF, rows_NM, weights.down_EMF.select(0, e));
    const ExpertPairs pairs(products, scratch, e, N);
    pairs.add_grad_input(weights.down_low_rank, act_NF, rows_NM);
    if (weight_RK.defined()) {
      const at::Tensor again_NF = grad_gate_up_NW.view({-1}).narrow(0, 0, act_NF.numel()).view(act_NF.sizes());
      activation.swiglu(weights.activation, expert.sorted_NW, again_NF);
      dispatch(x_RM.scalar_type(), [&]<class T>() {
        using A = accumulator_t<T>;
        moe::weigh_expert_gradient<T>(expert.range, rows_NM.size(1), act_NF.size(1), pointer<T>(again_NF),
                                      pointer<T>(row_of(weights.down_bias_EM, e)), pointer<A>(weight_RK),
                                      pointer<T>(rows_NM), pointer<T>(act_NF), pointer<A>(grad_weight_RK));
      });
    }
    activation.swiglu_backward(weights.activation, expert.sorted_NW, act_NF, grad_gate_up_NW, act_NF);
    if (grads.down_EMF.defined() || grads.down_bias_EM.defined())
      add_grad_weight(row_of(grads.down_EMF, e), row_of(grads.down_bias_EM, e), rows_NM, act_NF);
    pairs.add_grad_weight(grads.down_low_rank, weights.down_low_rank, rows_NM, act_NF);
    if (grads.gate_up_EWM.defined() || grads.gate_up_bias_EW.defined() || !grads.gate_up_low_rank.empty()) {
      expert.gather(x_RM, rows_NM);
      add_grad_weight(row_of(grads.gate_up_EWM, e), row_of(grads.gate_up_bias_EW, e), grad_gate_up_NW, rows_NM);
      pairs.add_grad_weight(grads.gate_up_low_rank, weights.gate_up_low_rank, grad_gate_up_NW, rows_NM);
    }
    products.linear_grad_input(rows_NM, grad_gate_up_NW, weights.gate_up_EWM.select(0, e));
    pairs.add_grad_input(weights.gate_up_low_rank, rows_NM, grad_gate_up_NW);
    expert.add_rows(rows_NM, at::Tensor(), grad_x_sum_RM);
  }
}

void add_expert_rows(const SortedSlots& sorted, const at::Tensor& y_SM, const at::Tensor& weight_RK,
                     const at::Tensor& sum_RM) {
  for (std::int64_t e = 0; e + 1 < sorted.begin_E1.size(0); ++e) {
    const Expert expert(sorted, y_SM, e);
    expert.add_rows(expert.sorted_NW, weight_RK, sum_RM);
  }
}

void round_sum(const at::Tensor& base_RM, const at::Tensor& sum_RM, const at::Tensor& out_RM) {
  dispatch(out_RM.scalar_type(), [&]<class T>() {
    moe::round_sum<T>(out_RM.numel(), pointer<T>(base_RM), pointer<accumulator_t<T>>(sum_RM), pointer<T>(out_RM));
  });
}

}  // namespace

ExpertOperations expert_operations() {
  return {choose_experts,       router_backward, scale_by_expert, scale_by_expert_backward, sort_by_expert, add_experts,
          add_experts_backward, add_expert_rows, round_sum};
}

}  // namespace espalier::cpu
