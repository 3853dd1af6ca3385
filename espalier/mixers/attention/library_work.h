// Bytes that attention by a library takes beside the arena: results and gradients of its calls, the sums to which they
// are added, and workspaces, all from ATen's allocator (ops/attention/composed.h).
#pragma once

#include <cstdint>

#include "espalier/options/attention_kernels.h"
#include "espalier/shape/mixer.h"

namespace espalier {

// ATen's allocator takes memory in chunks, the last of which are not full.
inline constexpr std::int64_t kAllocatorBytes = std::int64_t{64} << 20;

// Bytes that the own kernels take there, too: of wide heads the scores of some queries (wide_work.h) and a number for
// each query and head; of others dL/dq in float32 for each query. The kernels for compute capability 9.0 sum it in
// tiles of 64 queries, the last of which may be partly empty, and have beside it three numbers a query and head and a
// counter a tile and head (ops/cuda/hopper/backward.cu).
std::int64_t own_attention_bytes(const AttentionHeads& heads, const ScratchRows& rows);

// The most bytes at a time in a layer's forward or backward; 0 for the own kernels, in other types than bfloat16, and
// where no library runs the layer. kAllocatorBytes included.
//   forward:   two results and their sum in float32
//   backward:  dL/dq in float32, the gradients and the workspace of one call, and in a narrow last block copies of the
//              keys and values at the rows that have a query
std::int64_t library_attention_bytes(const AttentionHeads& heads, const ScratchRows& rows);

}  // namespace espalier
