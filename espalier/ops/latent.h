// Latent attention: keys and values of all heads, made from the up-projected latent `kv` and the rotated row that all
// keys share.
//
//   k_th = (kv_th[0, N), shared_t),  v_th = kv_th[N, N + Dv)
//
// Shapes: T rows, J heads, N key channels without rotation, K shared ones, Dv value channels. Rows may have a stride;
// k, v and their gradients may have a dimension for heads. N follows from the columns of kv and v.
#pragma once

#include <ATen/core/Tensor.h>

namespace espalier {

struct LatentOperations {
  // kv [T, J (N + Dv)], shared [T, K]. Overwrites k [T, J (N + K)] and v [T, J Dv].
  void (*expand_heads)(const at::Tensor& kv_TW, const at::Tensor& shared_TK, const at::Tensor& k_T,
                       const at::Tensor& v_T);
  // From gradients in the accumulator dtype. Overwrites grad_kv, rounded, and
  // grad_shared_t = sum_h grad_k_th[N, N + K), in the accumulator dtype.
  void (*expand_heads_backward)(const at::Tensor& grad_k_T, const at::Tensor& grad_v_T, const at::Tensor& grad_kv_TW,
                                const at::Tensor& grad_shared_TK);
};

}  // namespace espalier
