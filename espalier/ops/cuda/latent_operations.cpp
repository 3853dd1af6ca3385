// Latent attention on a GPU: tensors to the kernels of latent.h.
#include "espalier/base/error.h"
#include "espalier/ops/attention/operations.h"
#include "espalier/ops/cuda/latent.h"
#include "espalier/ops/cuda/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cuda {
namespace {

// From the widths of rows: k has J (N + K) columns, v J Dv, kv J (N + Dv).
LatentHeads heads_of(const at::Tensor& kv_TW, const at::Tensor& shared_TK, const at::Tensor& k_T,
                     const at::Tensor& v_T) {
  const std::int64_t K = shared_TK.size(1), of_k = AttentionProblem::columns_of(k_T),
                     of_v = AttentionProblem::columns_of(v_T), J = (of_k + of_v - kv_TW.size(1)) / K;
  ESPALIER_INTERNAL(J > 0 && of_k % J == 0 && of_v % J == 0, of_k, " and ", of_v, " columns of heads that share ", K);
  return {J, of_k / J - K, K, of_v / J};
}

void expand(const at::Tensor& kv_TW, const at::Tensor& shared_TK, const at::Tensor& k_T, const at::Tensor& v_T) {
  dispatch(kv_TW.scalar_type(), [&]<class T>() {
    const LatentRows<const T> from{.kv = pointer<T>(kv_TW),
                                   .shared = pointer<T>(shared_TK),
                                   .kv_stride = kv_TW.stride(0),
                                   .shared_stride = shared_TK.stride(0)};
    const LatentRows<T> to{
        .k = pointer<T>(k_T), .v = pointer<T>(v_T), .k_stride = k_T.stride(0), .v_stride = v_T.stride(0)};
    expand_heads<T>(kv_TW.size(0), heads_of(kv_TW, shared_TK, k_T, v_T), from, to);
  });
}

void expand_backward(const at::Tensor& grad_k_T, const at::Tensor& grad_v_T, const at::Tensor& grad_kv_TW,
                     const at::Tensor& grad_shared_TK) {
  dispatch(grad_kv_TW.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const LatentRows<const A> from{.k = pointer<A>(grad_k_T),
                                   .v = pointer<A>(grad_v_T),
                                   .k_stride = grad_k_T.stride(0),
                                   .v_stride = grad_v_T.stride(0)};
    expand_heads_backward<T>(grad_kv_TW.size(0), heads_of(grad_kv_TW, grad_shared_TK, grad_k_T, grad_v_T), from,
                             pointer<T>(grad_kv_TW), grad_kv_TW.stride(0), pointer<A>(grad_shared_TK),
                             grad_shared_TK.stride(0));
  });
}

}  // namespace

LatentOperations latent_operations() { return {expand, expand_backward}; }

}  // namespace espalier::cuda
