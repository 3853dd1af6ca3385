// Bytes that attention by a library takes beside the arena: results and gradients of its calls, the sums to which they
// are added, and workspaces, all from ATen's allocator (ops/composed/attention.h).
#pragma once

#include <cstdint>
#include <string>

#include "espalier/mixers/attention/shape.h"

namespace espalier {

// The longest side of a backward of cuDNN that sums in one order (ops/cuda/cudnn_attention.h), and the fewest rows of a
// sequence in its graphs.
inline constexpr std::int64_t kCudnnBackwardRows = 2048, kCudnnFewestRows = 128;

// ATen's allocator takes memory in chunks, the last of which are not full.
inline constexpr std::int64_t kAllocatorBytes = std::int64_t{64} << 20;

// Workspace of cuDNN's backward of `heads` heads, on Hopper: dL/dS in bfloat16 in one order, else dL/dq in float32;
// a sum per query; gradients of keys and values for each query head. `queries` and `keys`: of all sequences, as padded;
// `pairs`: of a query and a key of one sequence.
std::int64_t cudnn_workspace_bytes(std::int64_t heads, std::int64_t head_dim, std::int64_t queries, std::int64_t keys,
                                   std::int64_t pairs, bool deterministic);

// Why an attention library leaves attention of this shape to the own kernels, for a person ("windows"); empty: it runs
// it in bfloat16 (composes in ops/composed/attention.h decides for each call).
std::string reason_for_own_kernels(const AttentionShape& shape);

// The most bytes at a time in a layer's forward or backward; 0 for the own kernels, in other types than bfloat16, and
// where no library runs the layer. kAllocatorBytes included.
//   forward:   two results and their sum in float32
//   backward:  dL/dq in float32, and the gradients and the workspace of one call
std::int64_t library_attention_bytes(const AttentionShape& shape, const ScratchRows& rows);

}  // namespace espalier
