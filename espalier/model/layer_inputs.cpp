#include "espalier/model/layer_inputs.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "espalier/device/held_buffers.h"
#include "espalier/model/branch.h"
#include "espalier/model/mlp_buffers.h"

namespace espalier {
namespace {

constexpr double kHalfPower = 1 / std::numbers::sqrt2;

// The look-up and its backward have this in common.
class LookUp {
 public:
  LookUp(const Decoder& of, const DecoderRun& pass, bool backward)
      : decoder(of),
        run(pass),
        declared(of.sizes(), pass.input.rows(), backward),
        held(pass.arena, declared, of.dtype()),
        products{of.device().operations(), pass.timer, of.mesh().tp, pass.arena} {
    held.enter(0);
  }

  double context_factor() const { return 1 / std::sqrt(static_cast<double>(decoder.shape().hidden)); }
  double table_factor() const { return std::sqrt(static_cast<double>(width())); }
  std::int64_t width() const { return decoder.shape().layer_inputs.width; }
  // The columns of each layer as a row of its own.
  at::Tensor by_layer(const at::Tensor& x_TW) const { return x_TW.view({-1, width()}); }
  NormWeights norm_in(const ModelViews& views) const { return {views.layer_projection_norm_P, decoder.shape().norm}; }

  // norm(e Wc^T / sqrt(M)); what the norm reads stays in `context`.
  void context(const at::Tensor& embedded_TM, const at::Tensor& normed_TW) const {
    const at::Tensor& context_TW = held[declared.context_TW];
    products.linear(context_TW, embedded_TM, decoder.weights().layer_projection);
    ops.scale(context_TW, context_factor());
    ops.norm(by_layer(context_TW), norm_in(decoder.weights()), decoder.shape().rms_norm_eps, by_layer(normed_TW),
             held[declared.rstd_N]);
  }

  const Decoder& decoder;
  const DecoderRun& run;
  const LookUpBuffers declared;
  HeldBuffers held;
  const Operations& ops = decoder.device().operations();
  const Products products;
};

// The layer's input of the rows that continue, behind the gate's columns.
void copy_input(const LayerContext& c, const at::Tensor& whole_TP, const at::Tensor& part_RP, const at::Tensor& to_RP) {
  if (!c.narrow) return c.ops.convert(c.layer_input_TP, to_RP);
  c.ops.convert(c.layer_input_TP, whole_TP);
  c.ops.gather(whole_TP, c.input.output_row_O, part_RP);
  c.ops.convert(part_RP, to_RP);
}

ActivationRule activation_of(const LayerContext& c) {
  ActivationRule rule = c.shape.activation;
  rule.gated = true;
  return rule;
}

// Both halves of a row: its gate, and its input.
struct Halves {
  Halves(const at::Tensor& both_RW, std::int64_t width)
      : gate_RP(both_RW.narrow(1, 0, width)), input_RP(both_RW.narrow(1, width, width)) {}

  at::Tensor gate_RP, input_RP;
};

}  // namespace

void look_up_layer_inputs(const Decoder& decoder, const DecoderRun& run, const at::Tensor& embedded_TM,
                          const at::Tensor& inputs_TW) {
  const LookUp look_up(decoder, run, false);
  const Operations& ops = look_up.ops;
  look_up.context(embedded_TM, inputs_TW);
  const at::Tensor& looked_up_TW = look_up.held[look_up.declared.looked_up_TW];
  ops.look_up(decoder.weights().layer_embedding_VW, run.input.id_T, decoder.local().input_vocabulary().begin,
              looked_up_TW);
  decoder.mesh().tp.add_over_ranks(looked_up_TW);
  ops.scale(looked_up_TW, look_up.table_factor());
  ops.add_scaled(inputs_TW, looked_up_TW, 1, inputs_TW);
  ops.scale(inputs_TW, kHalfPower);
}

void add_layer_inputs_backward(const Decoder& decoder, const DecoderRun& run, const at::Tensor& embedded_TM,
                               const at::Tensor& grad_inputs_TW, const at::Tensor& grad_embedded_TM,
                               ModelViews& grads) {
  const LookUp look_up(decoder, run, true);
  const Operations& ops = look_up.ops;
  const auto held = [&](BufferList::Place place) -> const at::Tensor& { return look_up.held[place]; };
  ops.scale(grad_inputs_TW, kHalfPower);
  if (grads.layer_embedding_VW.defined()) {
    const at::Tensor& grad_looked_up_TW = held(look_up.declared.looked_up_TW);
    ops.add_scaled({}, grad_inputs_TW, look_up.table_factor(), grad_looked_up_TW);
    if (std::ranges::find(run.input.id, decoder.shape().pad_token) != run.input.id.end())
      ops.zero_rows(grad_looked_up_TW, run.input.id_T, decoder.shape().pad_token);
    ops.add_look_up_backward(grad_looked_up_TW, run.input.id_T, decoder.local().input_vocabulary().begin,
                             grads.layer_embedding_VW);
  }
  look_up.context(embedded_TM, held(look_up.declared.normed_TW));
  const at::Tensor &context_TW = held(look_up.declared.context_TW),
                   &grad_context_TW = held(look_up.declared.grad_context_TW);
  ops.zero(grad_context_TW);
  ops.add_norm_backward(look_up.by_layer(context_TW), look_up.norm_in(decoder.weights()), held(look_up.declared.rstd_N),
                        look_up.by_layer(grad_inputs_TW), look_up.by_layer(grad_context_TW), look_up.norm_in(grads));
  ops.scale(grad_context_TW, look_up.context_factor());
  look_up.products.add_linear_grad_weight(grads.layer_projection, decoder.weights().layer_projection, grad_context_TW,
                                          embedded_TM, held(look_up.declared.product_WM));
  look_up.products.add_linear_grad_input(grad_embedded_TM, grad_context_TW, decoder.weights().layer_projection);
}

void layer_input_forward(const LayerContext& c, LayerSaved& saved, const at::Tensor& stream_out_RM,
                         const std::function<void(const at::Tensor& stream_out_RM)>& mlp) {
  using Stage = InputForwardBuffers::Stage;
  const InputForwardBuffers declared(c.block(), c.block_rows(), stream_out_RM.defined(), 0);
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(Stage::mlp);
  const at::Tensor stream_RM = stream_out_RM.defined() ? stream_out_RM : held[declared.stream_RM];
  mlp(stream_RM);
  held.enter(Stage::input);
  c.products.linear(saved.input_gate_RP, stream_RM, c.weights.input_gate);
  const at::Tensor &gated_RW = held[declared.gated_RW], &act_RP = held[declared.act_RP];
  const Halves halves(gated_RW, c.shape.layer_inputs.width);
  c.ops.convert(saved.input_gate_RP, halves.gate_RP);
  copy_input(c, held[declared.whole_TP], held[declared.part_RP], halves.input_RP);
  c.ops.swiglu(activation_of(c), gated_RW, act_RP);
  c.products.linear(saved.input_branch_RM, act_RP, c.weights.input_projection);
  const at::Tensor& added_RM = held[declared.added_RM];
  c.ops.norm(saved.input_branch_RM, {c.weights.input_norm_M, c.shape.norm}, c.shape.rms_norm_eps, added_RM,
             saved.input_branch_rstd_R);
  if (stream_out_RM.defined()) c.ops.add_scaled(stream_out_RM, added_RM, 1, stream_out_RM);
}

void add_layer_input_backward(const LayerContext& c, const LayerSaved& saved, const at::Tensor& grad_stream_RM,
                              const LayerViews& grads) {
  const InputBackwardBuffers declared(c.block(), c.block_rows());
  HeldBuffers held(c.arena, declared, c.dtype());
  held.enter(0);
  // z and the layer's gated input again.
  const at::Tensor &stream_RM = held[declared.stream_RM], &gated_RW = held[declared.gated_RW],
                   &act_RP = held[declared.act_RP], &grad_branch_RM = held[declared.grad_branch_RM],
                   &grad_gate_RP = held[declared.grad_gate_RP], &whole_TP = held[declared.whole_TP],
                   &part_RP = held[declared.part_RP];
  c.ops.norm_again(saved.mlp_branch_RM, {c.weights.mlp_post_norm_M, c.shape.norm}, saved.mlp_branch_rstd_R, stream_RM);
  c.ops.add_scaled(saved.stream_mid_RM, stream_RM, c.shape.scales.residual, stream_RM);
  const Halves halves(gated_RW, c.shape.layer_inputs.width);
  c.ops.convert(saved.input_gate_RP, halves.gate_RP);
  copy_input(c, whole_TP, part_RP, halves.input_RP);

  c.ops.zero(grad_branch_RM);
  c.ops.add_norm_backward(saved.input_branch_RM, {c.weights.input_norm_M, c.shape.norm}, saved.input_branch_rstd_R,
                          grad_stream_RM, grad_branch_RM, {grads.input_norm_M, c.shape.norm});
  c.products.linear_grad_input(act_RP, grad_branch_RM, c.weights.input_projection);  // the gradient of it, then itself
  c.ops.swiglu_backward(activation_of(c), gated_RW, act_RP, gated_RW, act_RP);
  c.products.add_linear_grad_weight(grads.input_projection, c.weights.input_projection, grad_branch_RM, act_RP,
                                    held[declared.projection_product]);
  c.ops.convert(halves.gate_RP, grad_gate_RP);
  c.products.add_linear_grad_weight(grads.input_gate, c.weights.input_gate, grad_gate_RP, stream_RM,
                                    held[declared.gate_product]);
  c.products.add_linear_grad_input(grad_stream_RM, grad_gate_RP, c.weights.input_gate);
  if (!c.grad_layer_input_TP.defined()) return;
  if (!c.narrow) return c.ops.convert(halves.input_RP, c.grad_layer_input_TP);
  c.ops.convert(halves.input_RP, part_RP);
  c.ops.zero(whole_TP);
  c.ops.add_scatter(part_RP, c.input.output_row_O, whole_TP);
  c.ops.convert(whole_TP, c.grad_layer_input_TP);
}

}  // namespace espalier
