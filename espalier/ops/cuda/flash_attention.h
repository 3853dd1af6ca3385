// Attention by ATen's FlashAttention-2.
#pragma once

#include "espalier/ops/attention.h"

namespace espalier::cuda {

// For GPU `index`: bfloat16, heads of a multiple of 8 elements up to 256, and a query for each own row; other
// problems use attention_operations(). Its memory comes from ATen's allocator. Not deterministic: gradients of queries
// are summed in any order, in less memory. Errors: DeviceError if this torch has no CUDA.
AttentionOperations open_flash_attention(int index, bool deterministic);

}  // namespace espalier::cuda
