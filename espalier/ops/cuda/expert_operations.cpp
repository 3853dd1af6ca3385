// Routers and experts on a GPU. The products of an expert run over the rows that chose it, one expert after the other:
// how many those are comes back to the host once a call.
#include <vector>

#include "espalier/ops/cpu/dispatch.h"
#include "espalier/ops/cuda/experts.h"
#include "espalier/ops/cuda/launch.h"
#include "espalier/ops/cuda/moving.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/cuda/products.h"

namespace espalier::cuda {
namespace {

moe::RouterShape shape_of(const at::Tensor& choice_RK, std::int64_t experts, bool renormalise) {
  if (experts > kMostExperts)
    throw UnsupportedError({"router", text_of("at most ", kMostExperts, " experts a layer on a GPU"), text_of(experts),
                            "use --device cpu"});
  return {choice_RK.size(0), experts, choice_RK.size(1), renormalise};
}

void choose(const at::Tensor& logits_RE, const at::Tensor& recorded_RK, bool renormalise, const at::Tensor& choice_RK,
            const at::Tensor& weight_RK) {
  dispatch(logits_RE.scalar_type(), [&]<class T>() {
    choose_experts<T>(shape_of(choice_RK, logits_RE.size(1), renormalise), pointer<T>(logits_RE),
                      pointer<std::int32_t>(recorded_RK), pointer<std::int32_t>(choice_RK),
                      pointer<accumulator_t<T>>(weight_RK));
  });
}

void backward(const at::Tensor& logits_RE, const at::Tensor& choice_RK, bool renormalise,
              const at::Tensor& grad_weight_RK, const RouterPenalty& penalty, const at::Tensor& grad_logits_RE,
              const at::Tensor& penalties_2) {
  dispatch(logits_RE.scalar_type(), [&]<class T>() {
    router_backward<T>(
        shape_of(choice_RK, logits_RE.size(1), renormalise), pointer<T>(logits_RE), pointer<std::int32_t>(choice_RK),
        pointer<accumulator_t<T>>(grad_weight_RK),
        {pointer<std::int32_t>(penalty.group_R), pointer<double>(penalty.probability_GE), pointer<double>(penalty.z_G)},
        pointer<T>(grad_logits_RE), pointer<double>(penalties_2));
  });
}

void sort(const at::Tensor& choice_RK, const SortedSlots& sorted) {
  sort_by_expert(shape_of(choice_RK, sorted.begin_E1.size(0) - 1, false), pointer<std::int32_t>(choice_RK),
                 pointer<std::int32_t>(sorted.begin_E1), pointer<std::int32_t>(sorted.row_S),
                 pointer<std::int32_t>(sorted.slot_S));
}

void add_rows(const SortedSlots& sorted, const at::Tensor& y_SM, const at::Tensor& weight_RK,
              const at::Tensor& sum_RM) {
  const std::int64_t rows = sum_RM.size(0), slots = sorted.slot_S.size(0);
  if (slots == 0) return;
  ESPALIER_INTERNAL(slots % rows == 0, slots, " slots of ", rows, " rows");
  dispatch(y_SM.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_expert_rows<T>(rows, slots / rows, sum_RM.size(1), pointer<std::int32_t>(sorted.slot_S), pointer<T>(y_SM),
                       pointer<A>(weight_RK), pointer<A>(sum_RM));
  });
}

// Calls visit(expert, first entry, entries) for the experts that have any.
template <class Visit>
void for_each_expert(const SortedSlots& sorted, Visit visit) {
  std::vector<std::int32_t> begin(static_cast<std::size_t>(sorted.begin_E1.size(0)));
  copy_to_host(begin.data(), sorted.begin_E1.data_ptr(), begin.size() * sizeof(std::int32_t));
  for (std::size_t e = 0; e + 1 < begin.size(); ++e)
    if (begin[e + 1] > begin[e]) visit(static_cast<std::int64_t>(e), begin[e], begin[e + 1] - begin[e]);
}

// sum_R += w_e y_e of an expert's rows, which are distinct; weight undefined: 1.
void add_rows_of_expert(const at::Tensor& y_NM, const at::Tensor& row_N, const at::Tensor& slot_N,
                        const at::Tensor& weight_RK, const at::Tensor& sum_RM) {
  dispatch(y_NM.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    add_weighted_rows<T>(y_NM.size(0), y_NM.size(1), pointer<std::int32_t>(row_N), pointer<std::int32_t>(slot_N),
                         pointer<T>(y_NM), pointer<A>(weight_RK), pointer<A>(sum_RM));
  });
}

void add_experts(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                 const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& sum_RM,
                 const ExpertScratch& scratch) {
  const MovingOperations moving = moving_operations();
  const SwigluOperations activation = swiglu_operations();
  for_each_expert(sorted, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
    const at::Tensor rows_NM = scratch.rows_RM.narrow(0, 0, N);  // x, then the result
    const at::Tensor gate_up_NW = gate_up_SW.narrow(0, first, N), row_N = sorted.row_S.narrow(0, first, N);
    moving.gather(x_RM, row_N, rows_NM);
    multiply(gate_up_NW, rows_NM, weights.gate_up_EWM.select(0, e).t(), false);
    if (!sum_RM.defined()) return;
    const at::Tensor act_NF = scratch.act_RF.narrow(0, 0, N);
    activation.swiglu(gate_up_NW, act_NF);
    multiply(rows_NM, act_NF, weights.down_EMF.select(0, e).t(), false);
    add_rows_of_expert(rows_NM, row_N, sorted.slot_S.narrow(0, first, N), weight_RK, sum_RM);
  });
}

void add_experts_backward(const SortedSlots& sorted, const ExpertWeights& weights, const at::Tensor& x_RM,
                          const at::Tensor& weight_RK, const at::Tensor& gate_up_SW, const at::Tensor& grad_sum_RM,
                          const ExpertWeights& grads, const at::Tensor& grad_x_sum_RM, const at::Tensor& grad_weight_RK,
                          const ExpertScratch& scratch) {
  const MovingOperations moving = moving_operations();
  const SwigluOperations activation = swiglu_operations();
  for_each_expert(sorted, [&](std::int64_t e, std::int64_t first, std::int64_t N) {
    const at::Tensor rows_NM = scratch.rows_RM.narrow(0, 0, N);  // dL/dsum, then x, then dL/dx
    const at::Tensor act_NF = scratch.act_RF.narrow(0, 0, N);    // first holds its own gradient
    const at::Tensor grad_gate_up_NW = scratch.grad_gate_up_RW.narrow(0, 0, N);
    const at::Tensor gate_up_NW = gate_up_SW.narrow(0, first, N), row_N = sorted.row_S.narrow(0, first, N);
    const at::Tensor slot_N = sorted.slot_S.narrow(0, first, N);
    moving.gather(grad_sum_RM, row_N, rows_NM);
    multiply(act_NF, rows_NM, weights.down_EMF.select(0, e), false);
    activation.swiglu_backward(gate_up_NW, act_NF, grad_gate_up_NW, act_NF);
    dispatch(x_RM.scalar_type(), [&]<class T>() {
      using A = accumulator_t<T>;
      weigh_expert_gradient<T>(N, act_NF.size(1), pointer<std::int32_t>(slot_N), pointer<T>(gate_up_NW),
                               pointer<A>(weight_RK), pointer<T>(grad_gate_up_NW), pointer<T>(act_NF),
                               pointer<A>(grad_weight_RK));
    });
    multiply(grads.down_EMF.select(0, e), rows_NM.t(), act_NF, true);
    moving.gather(x_RM, row_N, rows_NM);
    multiply(grads.gate_up_EWM.select(0, e), grad_gate_up_NW.t(), rows_NM, true);
    multiply(rows_NM, grad_gate_up_NW, weights.gate_up_EWM.select(0, e), false);
    add_rows_of_expert(rows_NM, row_N, slot_N, at::Tensor(), grad_x_sum_RM);
  });
}

void round(const at::Tensor& base_RM, const at::Tensor& sum_RM, const at::Tensor& out_RM) {
  dispatch(out_RM.scalar_type(), [&]<class T>() {
    round_sum<T>(out_RM.numel(), pointer<T>(base_RM), pointer<accumulator_t<T>>(sum_RM), pointer<T>(out_RM));
  });
}

}  // namespace

ExpertOperations expert_operations() {
  return {choose, backward, sort, add_experts, add_experts_backward, add_rows, round};
}

}  // namespace espalier::cuda
