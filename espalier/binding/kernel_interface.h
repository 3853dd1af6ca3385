// The C interface of the CPU kernels, for other languages: shared-prefix attention, and rows of logits. It needs no
// torch. The functions are in the library of core_interface.h. The Python package calls them in
// python/espalier/kernels.py.
//
// dtype is "float32", "float64" or "bfloat16". A is the accumulator's type: float64 if dtype is float64, else float32.
// Functions return 0. On error they return -1, and espalier_last_error() describes the error. They run on the threads
// of OpenMP.
#pragma once

#include "espalier/binding/core_interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// T own rows attend to P path rows and to own rows. Own row i sees every path row, and own row j if j <= i and
// i < subtree_end[j]. Each own row has a query. scale multiplies q . k. H must be a multiple of J.
// Equations: docs/mathematics.md, (1) to (9) and (12), (13).
typedef struct {
  int64_t own_rows, path_rows, heads, kv_heads, head_dim;  // T, P, H, J, D
  double scale;
  const int32_t* subtree_end;  // [T]
} espalier_attention_shape;

// Arrays of dtype: q, out, grad_out, grad_q [T, H, D]; k, v [T, J, D]; path_k, path_v [P, J, D]. Arrays of A: lse
// [H, T] and the gradients of keys and values. A stride is the number of elements between rows. Heads of a row are
// contiguous, and arrays without a stride are contiguous.
typedef struct {
  const void *q, *k, *v, *path_k, *path_v;
  int64_t q_stride, k_stride, v_stride, path_k_stride, path_v_stride;
} espalier_attention_inputs;

// Overwrites out and lse, the log-sum-exp of each row's scores.
ESPALIER_EXPORT int32_t espalier_attention_forward(const char* dtype, const espalier_attention_shape* shape,
                                                   const espalier_attention_inputs* in, void* out, void* lse);

// Overwrites grad_q. Adds to the gradients of keys and values: grad_k, grad_v [T, J, D] and path_grad_k, path_grad_v
// [P, J, D]. out and lse are the forward's.
ESPALIER_EXPORT int32_t espalier_add_attention_backward(const char* dtype, const espalier_attention_shape* shape,
                                                        const espalier_attention_inputs* in, const void* out,
                                                        const void* lse, const void* grad_out, void* grad_q,
                                                        void* grad_k, void* grad_v, void* path_grad_k,
                                                        void* path_grad_v);

// Reads R rows of V logits [R, V], contiguous, of dtype float32 or float64, and inverse_temperature [R]. With z = logit
// x inverse_temperature, overwrites sums [R, 3]: the largest logit, log sum exp(z - max z), and the entropy of
// softmax(z). Equations: docs/mathematics.md, (56) to (59).
ESPALIER_EXPORT int32_t espalier_head_row_sums(const char* dtype, const void* logits, int64_t rows, int64_t vocabulary,
                                               const double* inverse_temperature, double* sums);

// Overwrites logits with their gradient, without the term of the targets: the caller adds grad_logprob x
// inverse_temperature at each row's target. grad_logprob and grad_entropy are the gradients of log-prob and entropy,
// [R]. Equation: docs/mathematics.md, (60).
ESPALIER_EXPORT int32_t espalier_compute_head_row_gradient(const char* dtype, void* logits, int64_t rows,
                                                           int64_t vocabulary, const double* inverse_temperature,
                                                           const double* sums, const double* grad_logprob,
                                                           const double* grad_entropy);

#ifdef __cplusplus
}
#endif
