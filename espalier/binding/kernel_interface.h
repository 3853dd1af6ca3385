// The C interface of the torch-free kernels, for other languages: shared-prefix attention and the rows of the head, on
// the host. Exported by the same library as core_interface.h; python/espalier/ops/kernels.py is its one caller.
//
// dtype is "float32", "float64" or "bfloat16"; A is float32, in float64 float64. Functions return 0, or -1 and
// espalier_last_error() says why. The threads are OpenMP's.
#pragma once

#include "espalier/binding/core_interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes and visibility as in ops/cpu/attention/attention.h; every own row is a query row.
typedef struct {
  int64_t own_rows, path_rows, heads, kv_heads, head_dim;  // T, P, H, J, D
  double scale;
  const int32_t* subtree_end;  // [T]
} espalier_attention_shape;

// q, out, grad_out, grad_q [T, H, D]; k, v [T, J, D]; path_k, path_v [P, J, D], all of dtype; lse [H, T] of A; the
// other gradients of A. `_stride`: elements between rows; what has none is contiguous, heads always are.
typedef struct {
  const void *q, *k, *v, *path_k, *path_v;
  int64_t q_stride, k_stride, v_stride, path_k_stride, path_v_stride;
} espalier_attention_inputs;

// Overwrites out and lse.
ESPALIER_EXPORT int32_t espalier_attention_forward(const char* dtype, const espalier_attention_shape* shape,
                                                   const espalier_attention_inputs* in, void* out, void* lse);

// Overwrites grad_q; adds to the gradients of keys and values, own [T, J, D] and path [P, J, D].
ESPALIER_EXPORT int32_t espalier_add_attention_backward(const char* dtype, const espalier_attention_shape* shape,
                                                        const espalier_attention_inputs* in, const void* out,
                                                        const void* lse, const void* grad_out, void* grad_q,
                                                        void* grad_k, void* grad_v, void* path_grad_k,
                                                        void* path_grad_v);

// Rows of logits [R, V], contiguous, dtype float32 or float64; inverse_temperature [R]. Overwrites sums [R, 3]: the
// largest logit, log sum exp of (z - max z), the entropy (ops/cpu/head_kernels.h).
ESPALIER_EXPORT int32_t espalier_head_row_sums(const char* dtype, const void* logits, int64_t rows, int64_t vocabulary,
                                               const double* inverse_temperature, double* sums);

// Overwrites logits with their gradient but for what the targets add, from the gradients of log-prob and entropy [R].
ESPALIER_EXPORT int32_t espalier_compute_head_row_gradient(const char* dtype, void* logits, int64_t rows,
                                                           int64_t vocabulary, const double* inverse_temperature,
                                                           const double* sums, const double* grad_logprob,
                                                           const double* grad_entropy);

#ifdef __cplusplus
}
#endif
