// Notes for users about the layers of a model that faster kernels of a GPU do not run.
#pragma once

#include <string>

#include "espalier/device/cuda_library.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// "6 of 12 layers of attention (windows) run on the own kernels: --attention flash does not take them"; empty if the
// library runs all layers, or if no library was chosen. `capability`: ten times the GPU's.
std::string layers_beside_library(const ModelShape& shape, AttentionKernels attention, int capability = 0);

// "recurrent layers run row by row: ...", where a GPU was found not to run them right in chunks, `why`
// (OpenedGpu::without_chunks); empty if nothing was found, or if no layer is concerned.
std::string layers_without_chunks(const ModelShape& shape, DType dtype, const std::string& why);

}  // namespace espalier
