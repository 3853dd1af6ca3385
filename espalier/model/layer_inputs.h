// Inputs of layers besides the stream (LayerInputs), from a row's token and its embedding:
//
//   i_l = (norm(e Wc_l^T / sqrt(M)) + sqrt(P) table_l[token]) / sqrt(2)         for every layer l, at the look-up
//   z' = z + norm((f(z Wg^T) i_l) Wp^T)                                          behind the MLP of layer l
//
// e is the embedded row as the first layer gets it, f the activation of the MLP.
//
// Shapes: T rows, R rows that continue, M width, P width of a layer's input, L layers, W = L P.
#pragma once

#include <functional>

#include "espalier/model/decoder.h"

namespace espalier {

// Fills inputs [T, W] from embedded rows [T, M].
void look_up_layer_inputs(const Decoder& decoder, const DecoderRun& run, const at::Tensor& embedded_TM,
                          const at::Tensor& inputs_TW);
// From dL/d(inputs), which it overwrites: adds to the gradients of the table, the norm and the product, and to that of
// the embedded rows.
void add_layer_inputs_backward(const Decoder& decoder, const DecoderRun& run, const at::Tensor& embedded_TM,
                               const at::Tensor& grad_inputs_TW, const at::Tensor& grad_embedded_TM, ModelViews& grads);

// Behind the MLP of a layer: mlp(stream_out) computes the stream, and the layer's input is added to it. An undefined
// stream_out [R, M] is not needed, but the layer's saved members are (recomputation).
void layer_input_forward(const LayerContext& context, LayerSaved& saved, const at::Tensor& stream_out_RM,
                         const std::function<void(const at::Tensor& stream_out_RM)>& mlp);
// The same backward: adds to dL/dz, so that it becomes that of the MLP's result.
void add_layer_input_backward(const LayerContext& context, const LayerSaved& saved, const at::Tensor& grad_stream_RM,
                              const LayerViews& grads);

}  // namespace espalier
