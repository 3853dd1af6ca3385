// How the kernels of a row of options/attention_kernels.h are opened: for row `name`, open_name_attention in a file of
// its own.
#pragma once

#include "espalier/ops/attention/operations.h"
#include "espalier/options/attention_kernels.h"

namespace espalier::cuda {

struct AttentionGpu {
  int index = 0, major = 0, minor = 0;  // the GPU's number and compute capability
  bool deterministic = true;            // a library sums gradients of queries in one order
};

// Attention on this GPU. A library runs what its row takes, in bfloat16, with memory from ATen's allocator; all else
// runs on attention_operations(). Errors: DeviceError for what this torch, machine or build lacks.
#define ESPALIER_ROW(name, ...) AttentionOperations open_##name##_attention(const AttentionGpu& gpu);
ESPALIER_ATTENTION_KERNELS(ESPALIER_ROW)
#undef ESPALIER_ROW

}  // namespace espalier::cuda
