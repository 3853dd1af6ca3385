// A projection through a latent, of latent attention:  y = norm(x down^T + b) up^T,  forward and backward.
//
// Shapes: R rows, M width, C width of the latent, N outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/mixers/latent_attention/shape.h"
#include "espalier/model/layer_context.h"

namespace espalier {

inline const LatentShape& latent_shape(const LayerContext& context) {
  return static_cast<const LatentAttention&>(*context.own.mixer).shape;
}

struct Latent {
  const Projection &down, &up;  // or their gradients
  at::Tensor norm_C;
};

// The weights of the mixer, or their gradients.
struct LatentViews {
  explicit LatentViews(const PartViews& views)
      : query_latent(views.products[LatentAttention::query_latent]),
        key_value_latent(views.products[LatentAttention::key_value_latent]),
        rotary_key(views.behind[LatentAttention::key_value_latent]),
        query(views.products[LatentAttention::query]),
        key_value(views.products[LatentAttention::key_value]),
        query_norm_C(views.tensors[LatentAttention::query_latent_norm]),
        key_value_norm_C(views.tensors[LatentAttention::key_value_latent_norm]) {}

  Latent queries() const { return {query_latent, query, query_norm_C}; }
  Latent keys_values() const { return {key_value_latent, key_value, key_value_norm_C}; }

  const Projection &query_latent, &key_value_latent, &rotary_key;  // [C, M], [C, M], [K, M]
  const Projection &query, &key_value;                             // [H*D, C] or [H*D, M]; [H*(N + Dv), C]
  const at::Tensor &query_norm_C, &key_value_norm_C;
};

// Saved for the backward: the latent before its norm, and its 1/rms.
struct LatentSaved {
  at::Tensor latent_RC, rstd_R;
};

// Overwrites `saved`, y_RN and the scratch normed_RC. An undefined y_RN is not computed.
void latent_forward(const LayerContext& context, const Latent& weights, const LatentSaved& saved,
                    const at::Tensor& x_RM, const at::Tensor& normed_RC, const at::Tensor& y_RN);

// From the gradient of the norm's results: overwrites grad_latent_RC with the gradient of x down^T + b, and adds to the
// gradient of the norm's weight.
void latent_norm_backward(const LayerContext& context, const Latent& weights, const Latent& grads,
                          const LatentSaved& saved, const at::Tensor& grad_normed_RC, const at::Tensor& grad_latent_RC);

// From dL/dy: overwrites grad_latent_RC with the gradient of x down^T + b, and the scratch normed_RC; adds to the
// gradients of `up` and of the norm's weight. product_NC: scratch as in add_linear_grad_weight. The caller computes the
// gradients of `down` and x.
void add_latent_backward(const LayerContext& context, const Latent& weights, const Latent& grads,
                         const LatentSaved& saved, const at::Tensor& grad_RN, const at::Tensor& normed_RC,
                         const at::Tensor& product_NC, const at::Tensor& grad_latent_RC);

}  // namespace espalier
