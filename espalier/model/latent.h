// A projection through a latent, of latent attention:  y = norm(x down^T + b) up^T,  forward and backward.
//
// Shapes: R rows, M width, C width of the latent, N outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/layer_context.h"

namespace espalier {

struct Latent {
  const Projection &down, &up;  // or their gradients
  at::Tensor norm_C;
};
// The weights, or their gradients.
inline Latent query_latent(const LayerViews& views) {
  return {views.query_latent, views.query, views.query_latent_norm_C};
}
inline Latent key_value_latent(const LayerViews& views) {
  return {views.key_value_latent, views.key_value, views.key_value_latent_norm_C};
}

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
