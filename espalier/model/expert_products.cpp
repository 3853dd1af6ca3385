#include "espalier/model/expert_products.h"

#include <ATen/core/Tensor.h>

#include "espalier/device/scalar_type.h"
#include "espalier/model/block_buffers.h"
#include "espalier/model/expert_exchange.h"

namespace espalier {
namespace {

// `views` are the weights or their gradients. Where ranks of tp add their parts of an expert's result, the
// first of them adds the bias; its gradient is of whole rows and the same on all.
ExpertWeights weights_of(const LayerContext& c, const LayerViews& views) {
  ExpertWeights out{views.expert_gate_up_EWM,  views.expert_down_EMF, views.expert_gate_up_bias_EW,
                    views.expert_down_bias_EM, c.shape.activation,    views.expert_gate_up_low_rank,
                    views.expert_down_low_rank};
  const bool parts = c.mesh.ep.size() == 1 && c.mesh.tp.rank() > 0;
  if (&views == &c.weights && parts) out.down_bias_EM = at::Tensor();
  return out;
}

// Scratch of the products of one expert, taken once for all of them: each may have as many rows as arrive.
ExpertScratch take_scratch(const LayerContext& c, const at::Tensor& stream_RM, bool with_act, bool with_gradient) {
  const at::ScalarType dtype = stream_RM.scalar_type();
  const std::int64_t R = stream_RM.size(0), F = c.shape.expert_inner, W = c.shape.gate_up_width(F);
  ExpertScratch scratch;
  scratch.rows_RM = c.arena.take(stream_RM.sizes(), dtype);
  if (with_act) scratch.act_RF = c.arena.take({R, F}, dtype);
  if (c.weights.expert_gate_up_low_rank.size() + c.weights.expert_down_low_rank.size() > 0)
    scratch.low_rank_Rr = c.arena.take({R, low_rank_width(c.shape)}, dtype);
  if (!with_gradient) return scratch;
  scratch.grad_gate_up_RW = c.arena.take({R, W}, dtype);
  if (c.ops.rounds_weight_gradients(dtype)) scratch.product = c.arena.take({W * c.shape.hidden}, dtype);
  return scratch;
}

namespace here {

SortedSlots sort_by_expert(const LayerContext& c, const LayerSaved& saved) {
  Device& device = c.arena.device();
  const std::int64_t slots = saved.router_choice_RK.numel();
  const SortedSlots sorted{device.allocate({c.shape.experts + 1}, at::kInt), device.allocate({slots}, at::kInt),
                           device.allocate({slots}, at::kInt)};
  c.ops.sort_by_expert(saved.router_choice_RK, sorted);
  return sorted;
}

void add_forward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM, const at::Tensor& sum_RM,
                 const ExpertScratch& scratch) {
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.add_experts(sort_by_expert(c, saved), weights_of(c, c.weights), normed_RM, saved.router_weight_RK,
                    saved.gate_up_RW, sum_RM, scratch);
}

void add_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM,
                  const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                  const ExpertScratch& scratch) {
  const TimedPart timed(c.timer, part::kProducts);
  c.ops.add_experts_backward(sort_by_expert(c, saved), weights_of(c, c.weights), normed_RM, saved.router_weight_RK,
                             saved.gate_up_RW, grad_RM, weights_of(c, grads), out.normed_RM, out.weight_RK, scratch);
}

}  // namespace here

// N slots of rows of all ranks arrive where their expert is; weights are applied by who sent them.
namespace exchanged {

void add_forward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM, const at::Tensor& sum_RM,
                 const ExpertScratch&) {
  if (!sum_RM.defined()) return;
  const ArenaScope scope(c.arena);
  const at::ScalarType dtype = normed_RM.scalar_type();
  const ExpertExchange exchange(c, saved.router_choice_RK);
  const at::Tensor x_NM = exchange.rows_to_experts(exchange.run_of(normed_RM));
  {
    const ArenaScope products(c.arena);
    const at::Tensor gate_up_NW =
        c.arena.take({exchange.arriving(), c.shape.gate_up_width(c.shape.expert_inner)}, dtype);
    const at::Tensor sum_NM = c.arena.take(x_NM.sizes(), accumulator_type(dtype));
    c.ops.zero(sum_NM);
    const TimedPart timed(c.timer, part::kProducts);
    c.ops.add_experts(exchange.received(), weights_of(c, c.weights), x_NM, at::Tensor(), gate_up_NW, sum_NM,
                      take_scratch(c, x_NM, true, false));
    c.ops.round_sum(at::Tensor(), sum_NM, x_NM);
  }
  c.ops.add_expert_rows(exchange.sent(), exchange.from_experts(x_NM), exchange.run_of(saved.router_weight_RK),
                        exchange.run_of(sum_RM));
}

void add_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& normed_RM,
                  const at::Tensor& grad_RM, const LayerViews& grads, const ExpertInputGradients& out,
                  const ExpertScratch&) {
  const ArenaScope scope(c.arena);
  const at::ScalarType dtype = normed_RM.scalar_type(), accumulator = accumulator_type(dtype);
  const ExpertExchange exchange(c, saved.router_choice_RK);
  const at::Tensor x_NM = exchange.rows_to_experts(exchange.run_of(normed_RM));
  const at::Tensor grad_NM = exchange.rows_to_experts(exchange.run_of(grad_RM));
  const at::Tensor weight_N1 = exchange.slots_to_experts(exchange.run_of(saved.router_weight_RK));
  const at::Tensor grad_x_NM = c.arena.take(x_NM.sizes(), accumulator),
                   grad_weight_N1 = c.arena.take(weight_N1.sizes(), accumulator);
  c.ops.zero(grad_x_NM);
  {
    const ArenaScope products(c.arena);
    const at::Tensor gate_up_NW =
        c.arena.take({exchange.arriving(), c.shape.gate_up_width(c.shape.expert_inner)}, dtype);
    const ExpertScratch scratch = take_scratch(c, x_NM, true, true);
    const TimedPart timed(c.timer, part::kProducts);
    c.ops.add_experts(exchange.received(), weights_of(c, c.weights), x_NM, at::Tensor(), gate_up_NW, at::Tensor(),
                      scratch);
    c.ops.add_experts_backward(exchange.received(), weights_of(c, c.weights), x_NM, weight_N1, gate_up_NW, grad_NM,
                               weights_of(c, grads), grad_x_NM, grad_weight_N1, scratch);
  }
  c.ops.add_scatter(exchange.from_experts(grad_x_NM), exchange.sent().row_S, exchange.run_of(out.normed_RM));
  c.ops.scatter(exchange.from_experts(grad_weight_N1), exchange.sent().slot_S,
                exchange.run_of(out.weight_RK).view({-1, 1}));
}

}  // namespace exchanged

}  // namespace

const ExpertProducts& expert_products(const Mesh& mesh) {
  static const ExpertProducts of_one{here::add_forward, here::add_backward};
  static const ExpertProducts of_several{exchanged::add_forward, exchanged::add_backward};
  return mesh.ep.size() == 1 ? of_one : of_several;
}

}  // namespace espalier
