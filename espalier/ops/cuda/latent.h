// Keys and values of latent attention on a device: contract and shapes in ops/latent.h.
#pragma once

#include <cstdint>

#include "espalier/base/dtype.h"

namespace espalier::cuda {

struct LatentHeads {
  std::int64_t heads = 0, plain = 0, shared = 0, value = 0;  // J, N, K, Dv
};
// Rows and their strides. Members that a call does not use are null.
template <class T>
struct LatentRows {
  T *kv = nullptr, *shared = nullptr, *k = nullptr, *v = nullptr;
  std::int64_t kv_stride = 0, shared_stride = 0, k_stride = 0, v_stride = 0;
};

// Overwrites k and v of `to` from kv and shared.
template <class T>
void expand_heads(std::int64_t rows, const LatentHeads& heads, const LatentRows<const T>& from,
                  const LatentRows<T>& to);
// From gradients of k and v. Overwrites the gradients of kv and of shared, the latter summed over heads in their order.
template <class T>
void expand_heads_backward(std::int64_t rows, const LatentHeads& heads, const LatentRows<const accumulator_t<T>>& from,
                           T* grad_kv, std::int64_t grad_kv_stride, accumulator_t<T>* grad_shared,
                           std::int64_t grad_shared_stride);

}  // namespace espalier::cuda
