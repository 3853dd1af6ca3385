#include "espalier/model/expert_mlp.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "espalier/base/mutation.h"
#include "espalier/model/stream_norm.h"
#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cpu/expert_rows.h"
#include "espalier/ops/cpu/row_kernels.h"
#include "espalier/ops/products.h"
#include "espalier/rollout/rollout.h"

namespace espalier {
namespace {

moe::RouterShape router_shape(const LayerContext& c, const LayerSaved& saved) {
  return {saved.stream_mid_RM.size(0), c.shape.experts, c.shape.experts_per_token, c.shape.norm_topk_prob};
}

// The rows of one expert: which they are, and where their gate and up values lie.
struct Expert {
  moe::ExpertRange range;
  at::Tensor gate_up_NW;
};

Expert expert_of(const moe::ExpertRows& experts, const LayerSaved& saved, std::int64_t e) {
  const std::int64_t begin = experts.begin[static_cast<std::size_t>(e)];
  const std::int64_t count = experts.begin[static_cast<std::size_t>(e) + 1] - begin;
  return {{count, experts.row.data() + begin, experts.slot.data() + begin}, saved.gate_up_RW.narrow(0, begin, count)};
}

// x_N = x_R at the expert's rows.
void gather_rows(const Expert& expert, const at::Tensor& x_RM, const at::Tensor& x_NM) {
  dispatch(x_RM.scalar_type(), [&]<class T>() {
    rows::gather<T>(expert.range.count, x_RM.size(1), pointer<T>(x_RM), expert.range.row, pointer<T>(x_NM));
  });
}

// sum_R += weight y_N; weight undefined: 1.
void add_rows(const Expert& expert, const at::Tensor& y_NM, const at::Tensor& weight_RK, const at::Tensor& sum_RM) {
  dispatch(y_NM.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    moe::add_expert_rows<T>(expert.range, y_NM.size(1), pointer<T>(y_NM), pointer<A>(weight_RK), pointer<A>(sum_RM));
  });
}

void round_sum(const at::Tensor& base_RM, const at::Tensor& sum_RM, const at::Tensor& out_RM) {
  dispatch(out_RM.scalar_type(), [&]<class T>() {
    moe::round_sum<T>(out_RM.numel(), pointer<T>(base_RM), pointer<accumulator_t<T>>(sum_RM), pointer<T>(out_RM));
  });
}

// Where this layer stands in a record of a row's experts.
std::int64_t place_in_record(const LayerContext& c) {
  const auto& kinds = c.shape.expert_layer;
  return c.shape.experts_per_token * std::count(kinds.begin(), kinds.begin() + c.layer, std::uint8_t{1});
}

// The row of the set that continues as row r.
std::size_t row_of_set(const LayerContext& c, std::size_t r) {
  return c.last ? static_cast<std::size_t>(c.rows.output_row[r]) : r;
}

// The recorded experts of this layer for each continuing row; empty where nothing is recorded.
std::vector<const std::uint16_t*> recorded_experts(const LayerContext& c, std::int64_t rows) {
  if (c.rows.route.empty()) return {};
  const std::int64_t place = place_in_record(c);
  std::vector<const std::uint16_t*> recorded(static_cast<std::size_t>(rows));
  for (std::size_t r = 0; r < recorded.size(); ++r) {
    const std::uint16_t* route = c.rows.route[row_of_set(c, r)];
    if (route != nullptr && route[place] != RecordedRoutes::kFree) recorded[r] = route + place;
  }
  return recorded;
}

// Writes what each continuing row has chosen where its record is kept.
void write_choices(const LayerContext& c, const at::Tensor& choice_RK) {
  if (c.rows.chosen.empty()) return;
  const std::int64_t place = place_in_record(c), k = choice_RK.size(1);
  const auto* choice = pointer<std::int32_t>(choice_RK);
  for (std::size_t r = 0; r < static_cast<std::size_t>(choice_RK.size(0)); ++r, choice += k) {
    std::uint16_t* record = c.rows.chosen[row_of_set(c, r)] + place;
    std::copy(choice, choice + k, record);
    std::sort(record, record + k);
  }
}

void route(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM) {
  linear(saved.router_logits_RE, normed_RM, c.weights.router_weight, at::Tensor(), c.timer);
  const std::vector<const std::uint16_t*> recorded = recorded_experts(c, normed_RM.size(0));
  dispatch(normed_RM.scalar_type(), [&]<class T>() {
    moe::choose_experts<T>(router_shape(c, saved), pointer<T>(saved.router_logits_RE),
                           recorded.empty() ? nullptr : recorded.data(), pointer<std::int32_t>(saved.router_choice_RK),
                           pointer<accumulator_t<T>>(saved.router_weight_RK));
  });
  write_choices(c, saved.router_choice_RK);
}

// Scratch of the products of one expert, taken once for all of them: each may have as many rows as there are.
struct ExpertScratch {
  ExpertScratch(const LayerContext& c, const at::Tensor& stream_RM, bool with_act, bool with_gradient) {
    const std::int64_t R = stream_RM.size(0), F = c.shape.expert_inner;
    rows_RM = c.arena.take(stream_RM.sizes(), stream_RM.scalar_type());
    if (with_act) act_RF = c.arena.take({R, F}, stream_RM.scalar_type());
    if (with_gradient) grad_gate_up_RW = c.arena.take({R, 2 * F}, stream_RM.scalar_type());
  }
  at::Tensor rows_RM, act_RF, grad_gate_up_RW;
};

// Adds the gradients of one expert's weights, its part of dL/dn to grad_normed_RM (accumulator dtype), and overwrites
// dL/dw at its slots.
void one_expert_backward(const LayerContext& c, const LayerSaved& saved, const Expert& expert, std::int64_t e,
                         const ExpertScratch& scratch, const at::Tensor& grad_stream_RM, const at::Tensor& normed_RM,
                         const at::Tensor& grad_weight_RK, const at::Tensor& grad_normed_RM, const LayerViews& grads) {
  const at::ScalarType dtype = normed_RM.scalar_type();
  const std::int64_t N = expert.range.count, F = c.shape.expert_inner;
  const at::Tensor rows_NM = scratch.rows_RM.narrow(0, 0, N);  // dL/dz, then n, then dL/dn
  const at::Tensor act_NF = scratch.act_RF.narrow(0, 0, N);    // first holds its own gradient
  const at::Tensor grad_gate_up_NW = scratch.grad_gate_up_RW.narrow(0, 0, N);
  gather_rows(expert, grad_stream_RM, rows_NM);
  compute_linear_grad_input(act_NF, rows_NM, c.weights.expert_down_EMF.select(0, e), c.timer);
  dispatch(dtype, [&]<class T>() {
    using A = accumulator_t<T>;
    rows::swiglu_backward<T>(N, F, pointer<T>(expert.gate_up_NW), pointer<T>(act_NF), pointer<T>(grad_gate_up_NW),
                             pointer<T>(act_NF));
    moe::weigh_expert_gradient<T>(expert.range, F, pointer<T>(expert.gate_up_NW), pointer<A>(saved.router_weight_RK),
                                  pointer<T>(grad_gate_up_NW), pointer<T>(act_NF), pointer<A>(grad_weight_RK));
  });
  add_linear_grad_weight(grads.expert_down_EMF.select(0, e), at::Tensor(), rows_NM, act_NF, c.arena, c.timer);
  gather_rows(expert, normed_RM, rows_NM);
  add_linear_grad_weight(grads.expert_gate_up_EWM.select(0, e), at::Tensor(), grad_gate_up_NW, rows_NM, c.arena,
                         c.timer);
  compute_linear_grad_input(rows_NM, grad_gate_up_NW, c.weights.expert_gate_up_EWM.select(0, e), c.timer);
  add_rows(expert, rows_NM, at::Tensor(), grad_normed_RM);
}

// dL/dlogits from dL/dw and the router losses, whose values it adds to the accounting.
void router_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_weight_RK,
                     const at::Tensor& grad_logits_RE) {
  moe::LoadAccounting* accounting = c.rows.accounting;
  moe::LoadAccounting::Penalty penalty;
  const bool penalised = accounting && accounting->has_losses();
  if (penalised) penalty = accounting->penalty(c.layer, c.rows.owners);
  moe::PenaltySums sums;
  dispatch(grad_logits_RE.scalar_type(), [&]<class T>() {
    sums = moe::router_backward<T>(router_shape(c, saved), pointer<T>(saved.router_logits_RE),
                                   pointer<std::int32_t>(saved.router_choice_RK),
                                   pointer<accumulator_t<T>>(grad_weight_RK),
                                   penalised ? penalty.view() : moe::RouterPenalty{}, pointer<T>(grad_logits_RE));
  });
  if (penalised) accounting->add(sums);
}

}  // namespace

void take_expert_mlp_saved(const LayerContext& c, LayerSaved& saved, std::int64_t rows) {
  const at::ScalarType dtype = saved.stream_mid_RM.scalar_type();
  const std::int64_t k = c.shape.experts_per_token;
  saved.gate_up_RW = c.arena.take({rows * k, 2 * c.shape.expert_inner}, dtype);
  saved.router_logits_RE = c.arena.take({rows, c.shape.experts}, dtype);
  saved.router_choice_RK = c.arena.take({rows, k}, at::kInt);
  saved.router_weight_RK = c.arena.take({rows, k}, accumulator_type(dtype));
}

void expert_mlp_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM) {
  const ArenaScope scope(c.arena);
  const at::ScalarType dtype = saved.stream_mid_RM.scalar_type();
  const bool whole = stream_out_RM.defined();
  const at::Tensor normed_RM = c.arena.take(saved.stream_mid_RM.sizes(), dtype);
  norm_forward(saved.stream_mid_RM, c.weights.mlp_norm_M, c.shape.rms_norm_eps, normed_RM, saved.mlp_rstd_R);
  route(c, saved, normed_RM);
  const auto* choice = pointer<std::int32_t>(saved.router_choice_RK);
  // A narrow last block sees output rows alone: their choices are not those of all tokens.
  if ((whole || ESPALIER_MUTATION(recompute_counts_again)) && c.rows.accounting && !c.last)
    c.rows.accounting->add_choices(c.layer, c.rows.owners, choice);
  const moe::ExpertRows experts = moe::sort_by_expert(router_shape(c, saved), choice);
  at::Tensor sum_RM;
  if (whole) sum_RM = c.arena.take(normed_RM.sizes(), accumulator_type(dtype)).zero_();
  const ExpertScratch scratch(c, normed_RM, whole, false);
  for (std::int64_t e = 0; e < c.shape.experts; ++e) {
    const Expert expert = expert_of(experts, saved, e);
    const std::int64_t N = expert.range.count;
    if (N == 0) continue;
    const at::Tensor rows_NM = scratch.rows_RM.narrow(0, 0, N);  // n, then the result
    gather_rows(expert, normed_RM, rows_NM);
    linear(expert.gate_up_NW, rows_NM, c.weights.expert_gate_up_EWM.select(0, e), at::Tensor(), c.timer);
    if (!whole) continue;
    const at::Tensor act_NF = scratch.act_RF.narrow(0, 0, N);
    dispatch(dtype, [&]<class T>() {
      rows::swiglu<T>(N, c.shape.expert_inner, pointer<T>(expert.gate_up_NW), pointer<T>(act_NF));
    });
    linear(rows_NM, act_NF, c.weights.expert_down_EMF.select(0, e), at::Tensor(), c.timer);
    add_rows(expert, rows_NM, saved.router_weight_RK, sum_RM);
  }
  if (whole) round_sum(saved.stream_mid_RM, sum_RM, stream_out_RM);
}

void expert_mlp_backward(const LayerContext& c, LayerSaved& saved, const at::Tensor& grad_stream_RM,
                         const LayerViews& grads) {
  const ArenaScope scope(c.arena);
  const at::ScalarType dtype = grad_stream_RM.scalar_type(), sums = accumulator_type(dtype);
  const at::Tensor normed_RM = c.arena.take(grad_stream_RM.sizes(), dtype);
  norm_again(saved.stream_mid_RM, c.weights.mlp_norm_M, saved.mlp_rstd_R, normed_RM);
  const at::Tensor grad_weight_RK = c.arena.take(saved.router_weight_RK.sizes(), sums);
  const at::Tensor grad_normed_sum_RM = c.arena.take(grad_stream_RM.sizes(), sums).zero_();
  const moe::ExpertRows experts =
      moe::sort_by_expert(router_shape(c, saved), pointer<std::int32_t>(saved.router_choice_RK));
  {
    const ArenaScope products(c.arena);
    const ExpertScratch scratch(c, normed_RM, true, true);
    for (std::int64_t e = 0; e < c.shape.experts; ++e) {
      const Expert expert = expert_of(experts, saved, e);
      if (expert.range.count > 0)
        one_expert_backward(c, saved, expert, e, scratch, grad_stream_RM, normed_RM, grad_weight_RK, grad_normed_sum_RM,
                            grads);
    }
  }
  const at::Tensor grad_logits_RE = c.arena.take(saved.router_logits_RE.sizes(), dtype);
  router_backward(c, saved, grad_weight_RK, grad_logits_RE);
  add_linear_grad_weight(grads.router_weight, at::Tensor(), grad_logits_RE, normed_RM, c.arena, c.timer);
  const at::Tensor& grad_normed_RM = normed_RM;  // its values are no longer needed
  round_sum(at::Tensor(), grad_normed_sum_RM, grad_normed_RM);
  add_linear_grad_input(grad_normed_RM, grad_logits_RE, c.weights.router_weight, c.timer);
  norm_backward(saved.stream_mid_RM, c.weights.mlp_norm_M, saved.mlp_rstd_R, grad_normed_RM, grad_stream_RM,
                grads.mlp_norm_M);
}

}  // namespace espalier
