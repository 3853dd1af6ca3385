#include "espalier/mixers/latent_attention/latent.h"

namespace espalier {

void latent_forward(const LayerContext& c, const Latent& weights, const LatentSaved& saved, const at::Tensor& x_RM,
                    const at::Tensor& normed_RC, const at::Tensor& y_RN) {
  c.products.linear(saved.latent_RC, x_RM, weights.down);
  c.ops.norm(saved.latent_RC, weights.norm_C, latent_shape(c).norm_eps, normed_RC, saved.rstd_R);
  if (y_RN.defined()) c.products.linear(y_RN, normed_RC, weights.up);
}

void latent_norm_backward(const LayerContext& c, const Latent& weights, const Latent& grads, const LatentSaved& saved,
                          const at::Tensor& grad_normed_RC, const at::Tensor& grad_latent_RC) {
  c.ops.zero(grad_latent_RC);
  c.ops.add_norm_backward(saved.latent_RC, weights.norm_C, saved.rstd_R, grad_normed_RC, grad_latent_RC, grads.norm_C);
}

void add_latent_backward(const LayerContext& c, const Latent& weights, const Latent& grads, const LatentSaved& saved,
                         const at::Tensor& grad_RN, const at::Tensor& normed_RC, const at::Tensor& product_NC,
                         const at::Tensor& grad_latent_RC) {
  if (grads.up.trains()) {
    c.ops.norm_again(saved.latent_RC, weights.norm_C, saved.rstd_R, normed_RC);
    c.products.add_linear_grad_weight(grads.up, weights.up, grad_RN, normed_RC, product_NC);
  }
  const at::Tensor& grad_normed_RC = normed_RC;  // its values are no longer needed
  c.products.linear_grad_input(grad_normed_RC, grad_RN, weights.up);
  latent_norm_backward(c, weights, grads, saved, grad_normed_RC, grad_latent_RC);
}

}  // namespace espalier
