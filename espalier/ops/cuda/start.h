// Internal to the CUDA library: its GPU, and errors of the runtime.
#pragma once

#include <cuda_runtime_api.h>

#include "espalier/ops/cuda/runtime.h"

namespace espalier::cuda {

// Selects the GPU of this process and creates its streams. Called once, before any work.
void start(int index, int capability);
int gpu_index();
int capability();  // the major number of its compute capability
cudaStream_t stream_of(Queue queue);
// A function of the driver, found through the runtime: the library loads where there is no driver.
void* driver_entry(const char* name);
template <class Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(driver_entry(name));
}
// Errors: MemoryBudgetError if memory is short, else InternalError.
void expect_success(cudaError_t status, const char* what);

}  // namespace espalier::cuda
