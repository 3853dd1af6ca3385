// The C interface of the torch-free kernels.
#include "espalier/binding/kernel_interface.h"

#include <string_view>

#include "espalier/base/dtype.h"
#include "espalier/base/error.h"
#include "espalier/binding/guarded.h"
#include "espalier/ops/cpu/attention/attention.h"
#include "espalier/ops/cpu/head_kernels.h"

namespace {

using namespace espalier;  // NOLINT: the interface's own names are the C ones

// body<T>() for the named type.
template <class Body>
int32_t for_dtype(std::string_view name, Body body) {
  return guarded<int32_t>(-1, [&] {
    if (name == "float32")
      body.template operator()<float>();
    else if (name == "float64")
      body.template operator()<double>();
    else if (name == "bfloat16")
      body.template operator()<bfloat16>();
    else
      throw InputError({"the kernels", "float32, float64 or bfloat16", std::string(name), ""});
    return 0;
  });
}

attention::Shape shape_of(const espalier_attention_shape& in) {
  attention::Shape shape;
  shape.query_rows = shape.own_rows = in.own_rows;
  shape.path_rows = in.path_rows;
  shape.heads = in.heads;
  shape.kv_heads = in.kv_heads;
  shape.head_dim = in.head_dim;
  shape.scale = in.scale;
  shape.subtree_end = in.subtree_end;
  for (std::int64_t row = 0; row < in.own_rows; ++row)
    if (in.subtree_end[row] <= row || in.subtree_end[row] > in.own_rows)
      throw InputError({text_of("subtree_end[", row, "]"), text_of("a row after it, at most ", in.own_rows),
                        text_of(in.subtree_end[row]), "a row sees itself and ends inside the set"});
  return shape;
}

template <class T>
attention::Rows<const T> rows(const void* data, std::int64_t stride) {
  return {static_cast<const T*>(data), stride};
}

template <class T>
attention::Inputs<T> inputs_of(const espalier_attention_inputs& in) {
  return {rows<T>(in.q, in.q_stride), rows<T>(in.k, in.k_stride), rows<T>(in.v, in.v_stride),
          rows<T>(in.path_k, in.path_k_stride), rows<T>(in.path_v, in.path_v_stride)};
}

// row(r) for all rows, by several threads where there is enough to do.
template <class Row>
void for_rows(std::int64_t rows, std::int64_t vocabulary, Row row) {
#pragma omp parallel for schedule(static) if (rows * vocabulary > kParallelLogits)
  for (std::int64_t r = 0; r < rows; ++r) row(r);
}

}  // namespace

int32_t espalier_attention_forward(const char* dtype, const espalier_attention_shape* shape,
                                   const espalier_attention_inputs* in, void* out, void* lse) {
  return for_dtype(dtype, [&]<class T>() {
    attention::forward<T>(shape_of(*shape), inputs_of<T>(*in), {static_cast<T*>(out), shape->heads * shape->head_dim},
                          static_cast<accumulator_t<T>*>(lse));
  });
}

int32_t espalier_add_attention_backward(const char* dtype, const espalier_attention_shape* shape,
                                        const espalier_attention_inputs* in, const void* out, const void* lse,
                                        const void* grad_out, void* grad_q, void* grad_k, void* grad_v,
                                        void* path_grad_k, void* path_grad_v) {
  return for_dtype(dtype, [&]<class T>() {
    using A = accumulator_t<T>;
    const std::int64_t q_width = shape->heads * shape->head_dim, kv_width = shape->kv_heads * shape->head_dim;
    const auto sums = [&](void* data) { return attention::Rows<A>{static_cast<A*>(data), kv_width}; };
    const attention::Gradients<T> grads{
        {static_cast<T*>(grad_q), q_width}, sums(grad_k), sums(grad_v), sums(path_grad_k), sums(path_grad_v)};
    attention::add_backward<T>(shape_of(*shape), inputs_of<T>(*in), rows<T>(out, q_width), static_cast<const A*>(lse),
                               rows<T>(grad_out, q_width), grads);
  });
}

int32_t espalier_head_row_sums(const char* dtype, const void* logits, int64_t rows, int64_t vocabulary,
                               const double* inverse_temperature, double* sums) {
  return for_dtype(dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, bfloat16>)
      throw InputError({"rows of logits", "float32 or float64", "bfloat16", "widen them"});
    else
      for_rows(rows, vocabulary, [&](std::int64_t r) {
        const HeadRowSums of =
            compute_row_sums(static_cast<const T*>(logits) + r * vocabulary, vocabulary, inverse_temperature[r]);
        sums[3 * r] = of.max_raw, sums[3 * r + 1] = of.log_sum, sums[3 * r + 2] = of.entropy;
      });
  });
}

int32_t espalier_compute_head_row_gradient(const char* dtype, void* logits, int64_t rows, int64_t vocabulary,
                                           const double* inverse_temperature, const double* sums,
                                           const double* grad_logprob, const double* grad_entropy) {
  return for_dtype(dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, bfloat16>)
      throw InputError({"rows of logits", "float32 or float64", "bfloat16", "widen them"});
    else
      for_rows(rows, vocabulary, [&](std::int64_t r) {
        compute_row_gradient(static_cast<T*>(logits) + r * vocabulary, vocabulary, inverse_temperature[r],
                             {sums[3 * r], sums[3 * r + 1], sums[3 * r + 2]}, grad_logprob[r], grad_entropy[r]);
      });
  });
}
