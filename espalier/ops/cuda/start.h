// The CUDA library's own: the GPU it works on, and errors of the runtime.
#pragma once

#include <cuda_runtime_api.h>

#include "espalier/ops/cuda/runtime.h"

namespace espalier::cuda {

// Once, before any work: the GPU of this process and the streams of its work.
void start(int index, int capability);
int gpu_index();
int capability();  // the major number of its compute capability
cudaStream_t stream_of(Queue queue);
// Errors: MemoryBudgetError where memory is short, else InternalError.
void expect_success(cudaError_t status, const char* what);

}  // namespace espalier::cuda
