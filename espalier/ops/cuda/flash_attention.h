// Attention by ATen's FlashAttention-2.
#pragma once

#include "espalier/ops/attention.h"

namespace espalier::cuda {

// On GPU `index`, in bfloat16 and heads of a multiple of 8 elements up to 256, where each own row has a query; else the
// kernels of attention_operations(). Its own memory comes from ATen's allocator. Errors: DeviceError where this torch
// has no CUDA.
AttentionOperations open_flash_attention(int index);

}  // namespace espalier::cuda
