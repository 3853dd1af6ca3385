// Notes for users about the layers of a model that faster kernels of a GPU do not run.
#pragma once

#include <string>

#include "espalier/device/cuda_library.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// "6 of 12 layers of attention (windows) run on the own kernels: --attention flash does not take them"; empty if the
// library runs all layers, or if no library was chosen. `capability`: ten times the GPU's.
std::string layers_beside_library(const ModelShape& shape, AttentionKernels attention, int capability = 0);

// Tries chunks (ModelOperations::without_chunks) for models with layers that may run in them, in bfloat16 alone.
// "recurrent layers run row by row: ..." if the device does not run them right; else empty.
std::string layers_without_chunks(const ModelShape& shape, DType dtype, const std::string& (*try_chunks)());

}  // namespace espalier
