// Keys and values of latent attention on a CPU (ops/latent.h).
#include <algorithm>

#include "espalier/ops/cpu/operations.h"
#include "espalier/ops/dispatch.h"

namespace espalier::cpu {
namespace {

constexpr std::int64_t kLeastShared = 1 << 14;  // numbers; fewer are the calling thread's

std::int64_t columns_of(const at::Tensor& rows) { return rows.dim() == 3 ? rows.size(1) * rows.size(2) : rows.size(1); }

// Channels of a head, from the widths of rows: k has J (N + K) columns, v J Dv, kv J (N + Dv).
struct Heads {
  Heads(const at::Tensor& kv, const at::Tensor& shared, const at::Tensor& k, const at::Tensor& v) : K(shared.size(1)) {
    const std::int64_t of_k = columns_of(k), of_v = columns_of(v), of_kv = kv.size(1);
    J = (of_k + of_v - of_kv) / K;
    ESPALIER_INTERNAL(J > 0 && J * K == of_k + of_v - of_kv && of_k % J == 0 && of_v % J == 0, of_k, ", ", of_v,
                      " and ", of_kv, " columns of heads that share ", K);
    N = of_k / J - K, Dv = of_v / J;
  }
  std::int64_t J, N, K, Dv;
};

// Calls body(t) for each row.
template <class Body>
void for_each_row(std::int64_t rows, std::int64_t columns, Body body) {
#pragma omp parallel for schedule(static) if (rows * columns >= kLeastShared)
  for (std::int64_t t = 0; t < rows; ++t) body(t);
}

void expand_heads(const at::Tensor& kv, const at::Tensor& shared, const at::Tensor& k, const at::Tensor& v) {
  const Heads s(kv, shared, k, v);
  dispatch(kv.scalar_type(), [&]<class T>() {
    const T *const from = pointer<T>(kv), *const rotated = pointer<T>(shared);
    T *const to_k = pointer<T>(k), *const to_v = pointer<T>(v);
    for_each_row(kv.size(0), columns_of(k), [&](std::int64_t t) {
      for (std::int64_t h = 0; h < s.J; ++h) {
        const T* const head = from + t * kv.stride(0) + h * (s.N + s.Dv);
        T* const key = to_k + t * k.stride(0) + h * (s.N + s.K);
        std::copy_n(head, s.N, key);
        std::copy_n(rotated + t * shared.stride(0), s.K, key + s.N);
        std::copy_n(head + s.N, s.Dv, to_v + t * v.stride(0) + h * s.Dv);
      }
    });
  });
}

void expand_heads_backward(const at::Tensor& grad_k, const at::Tensor& grad_v, const at::Tensor& grad_kv,
                           const at::Tensor& grad_shared) {
  const Heads s(grad_kv, grad_shared, grad_k, grad_v);
  dispatch(grad_kv.scalar_type(), [&]<class T>() {
    using A = accumulator_t<T>;
    const A *const from_k = pointer<A>(grad_k), *const from_v = pointer<A>(grad_v);
    T* const to = pointer<T>(grad_kv);
    A* const sums = pointer<A>(grad_shared);
    for_each_row(grad_kv.size(0), columns_of(grad_k), [&](std::int64_t t) {
      A* const sum = sums + t * grad_shared.stride(0);
      std::fill_n(sum, s.K, A(0));
      for (std::int64_t h = 0; h < s.J; ++h) {
        const A* const key = from_k + t * grad_k.stride(0) + h * (s.N + s.K);
        const A* const value = from_v + t * grad_v.stride(0) + h * s.Dv;
        T* const head = to + t * grad_kv.stride(0) + h * (s.N + s.Dv);
        for (std::int64_t i = 0; i < s.N; ++i) head[i] = static_cast<T>(key[i]);
        for (std::int64_t i = 0; i < s.K; ++i) sum[i] += key[s.N + i];
        for (std::int64_t i = 0; i < s.Dv; ++i) head[s.N + i] = static_cast<T>(value[i]);
      }
    });
  });
}

}  // namespace

LatentOperations latent_operations() { return {expand_heads, expand_heads_backward}; }

}  // namespace espalier::cpu
