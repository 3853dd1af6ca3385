// Shared-prefix attention on a device: contract in ops/attention/rows.h. Head sizes up to 256, windows and
// soft caps of scores; wide_attention.h has larger heads. A shape's value_dim is given, not 0.
//
// Plain kernels for every type, exact and without tensor cores: for float32 and float64, which tensor cores lack, and
// for head sizes that the tiled kernels do not take. Tiled kernels for bfloat16 use tensor cores.
#pragma once

#include <cstdint>

#include "espalier/ops/attention/rows.h"

namespace espalier::cuda {

inline constexpr std::int64_t kLargestHead = 256;

template <class T>
void plain_attention(const attention::Shape& shape, const attention::Inputs<T>& in, attention::Rows<T> out,
                     accumulator_t<T>* lse_HQ);
// The order of additions depends on the shape alone.
template <class T>
void add_plain_attention_backward(const attention::Shape& shape, const attention::Inputs<T>& in,
                                  attention::Rows<const T> out, const accumulator_t<T>* lse_HQ,
                                  attention::Rows<const T> grad_out, const attention::Gradients<T>& grads);

// Sinks: ops/attention/operations.h. The shape gives query_rows, heads, kv_heads (as many) and value_dim.
template <class T>
void join_sinks(const attention::Shape& shape, const T* sink_H, attention::Rows<T> out, accumulator_t<T>* lse_HQ);
template <class T>
void add_sinks_backward(const attention::Shape& shape, const T* sink_H, attention::Rows<const T> out,
                        const accumulator_t<T>* lse_HQ, attention::Rows<const T> grad_out,
                        accumulator_t<T>* grad_sink_H);

// A result of attention over some keys: rows [n, H, D], heads behind each other, and their log-sum-exps.
template <class T>
struct AttentionPart {
  attention::Rows<T> out;
  accumulator_t<T>* lse = nullptr;
  std::int64_t lse_head = 0, lse_row = 1;  // elements between heads, and between rows
};
// LibraryAttention::merge: overwrites `to`, which may be `first`.
template <class First, class Second, class Out>
void merge_attention(std::int64_t rows, std::int64_t heads, std::int64_t head_dim, const AttentionPart<First>& first,
                     const AttentionPart<Second>& second, const AttentionPart<Out>& to);

// Tensor cores take heads of 64, 96, 128, 192 and 256 elements, and values of the same size, with rows at multiples of
// 16 bytes and a positive scale, if their tiles fit the shared memory of a block (heads of 256 take 128.5 KiB, more
// than an sm_86, sm_89 or sm_120 has). Weights and slopes are rounded to bfloat16 as factors of the second products;
// sums are in float32.
bool takes_tiles(const attention::Shape& shape, const attention::Inputs<bfloat16>& in);
void tiled_attention(const attention::Shape& shape, const attention::Inputs<bfloat16>& in,
                     attention::Rows<bfloat16> out, float* lse_HQ);
// grad_out has the layout of `in`.
void add_tiled_attention_backward(const attention::Shape& shape, const attention::Inputs<bfloat16>& in,
                                  attention::Rows<const bfloat16> out, const float* lse_HQ,
                                  attention::Rows<const bfloat16> grad_out,
                                  const attention::Gradients<bfloat16>& grads);

// delta_hq = dO_q . out_q of each head.
template <class T>
void attention_delta(const attention::Shape& shape, attention::Rows<const T> out, attention::Rows<const T> grad_out,
                     accumulator_t<T>* delta_HQ);

}  // namespace espalier::cuda
