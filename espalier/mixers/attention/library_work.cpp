#include "espalier/mixers/attention/library_work.h"

#include <algorithm>
#include <bit>

#include "espalier/base/error.h"
#include "espalier/program/step_kind.h"

namespace espalier {
namespace {

constexpr std::int64_t kElement = 2, kSum = 4;  // bfloat16, and what it is summed in
constexpr std::int64_t kLargestHead = 256;
constexpr std::int64_t kMostMultiprocessors = 148;  // of GPUs so far

// One backward call, over `queries` and `keys` rows: its gradients and its workspace.
struct BackwardCall {
  const AttentionShape& shape;
  bool deterministic;

  std::int64_t gradients(std::int64_t queries, std::int64_t keys) const {
    return (queries * shape.query_width() + 2 * keys * shape.key_width()) * kElement;
  }
  // Squares are padded to powers of two, at most three quarters of them empty (ops/cuda/cudnn_attention.cpp).
  std::int64_t cudnn_squares(std::int64_t rows) const {
    constexpr std::int64_t kMostPairs = kCudnnBackwardRows * kCudnnBackwardRows;  // of sums in one order
    std::int64_t padded = std::max(4 * rows, 64 * kCudnnFewestRows);
    if (deterministic) padded = std::min(padded, kMostPairs / kCudnnFewestRows);
    return gradients(rows, rows) +
           cudnn_workspace_bytes(shape.heads, shape.head_dim, padded, padded, kMostPairs, deterministic);
  }
  std::int64_t cudnn_rectangle(std::int64_t rows, std::int64_t path_rows) const {
    const auto side = [&](std::int64_t of) { return deterministic ? std::min(of, kCudnnBackwardRows) : of; };
    const auto padded = [](std::int64_t of) {
      return std::max(kCudnnFewestRows, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(of))));
    };
    const std::int64_t queries = padded(side(rows)), keys = padded(side(path_rows));
    return gradients(side(rows), side(path_rows)) +
           cudnn_workspace_bytes(shape.heads, shape.head_dim, queries, keys, queries * keys, deterministic);
  }
  // FlashAttention-2: dL/dq in float32, in one order once for each of as many splits as keep the multiprocessors busy;
  // a sum per query; where several query heads share a key head, gradients of keys and values for each of them.
  std::int64_t flash(std::int64_t rows, std::int64_t keys) const {
    const std::int64_t splits = deterministic ? (kMostMultiprocessors + shape.heads - 1) / shape.heads : 1;
    const std::int64_t expanded = shape.heads == shape.kv_heads ? 0 : 2 * keys * shape.query_width() * kElement;
    return gradients(rows, keys) + splits * rows * shape.query_width() * kSum + rows * shape.heads * kSum + expanded;
  }
};

}  // namespace

std::string reason_for_own_kernels(const AttentionShape& shape) {
  if (shape.soft_cap > 0) return "soft caps";
  if (shape.head_dim % 8 != 0 || shape.head_dim > kLargestHead)
    return text_of("heads of ", shape.head_dim, " elements");
  return shape.window > 0 ? "windows" : "";
}

std::int64_t cudnn_workspace_bytes(std::int64_t heads, std::int64_t head_dim, std::int64_t queries, std::int64_t keys,
                                   std::int64_t pairs, bool deterministic) {
  const std::int64_t of_queries = deterministic ? pairs * kElement : queries * head_dim * kSum;
  return heads * (of_queries + queries * kSum + 2 * keys * head_dim * kElement);
}

std::int64_t library_attention_bytes(const AttentionShape& shape, const ScratchRows& of) {
  const bool cudnn = of.device.attention == AttentionKernels::cudnn;
  const std::int64_t rows = of.rows;
  if ((!cudnn && of.device.attention != AttentionKernels::flash) || of.dtype != DType::bfloat16 || rows == 0 ||
      !reason_for_own_kernels(shape).empty())
    return 0;
  const std::int64_t sums = rows * shape.query_width() * kSum, lse = rows * shape.heads * kSum;
  std::int64_t most = 2 * rows * shape.query_width() * kElement + sums + 2 * lse;
  if (of.gradients) {
    const BackwardCall call{shape, of.device.deterministic};
    const std::int64_t of_call = cudnn ? std::max(call.cudnn_squares(rows), call.cudnn_rectangle(rows, of.path_rows))
                                       : call.flash(rows, std::max(rows, of.path_rows));
    most = std::max(most, sums + lse + of_call);
  }
  return most + kAllocatorBytes;
}

}  // namespace espalier
