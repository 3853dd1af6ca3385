// The CUDA library's own: the GPU it works on, and errors of the runtime.
#pragma once

#include <cuda_runtime_api.h>

namespace espalier::cuda {

// Once, before any work: the GPU of this process and the streams of its work.
void start(int index);
// Errors: MemoryBudgetError where memory is short, else InternalError.
void expect_success(cudaError_t status, const char* what);

}  // namespace espalier::cuda
