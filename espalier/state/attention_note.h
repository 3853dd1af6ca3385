// A note for users about the layers of a model that an attention library does not run.
#pragma once

#include <string>

#include "espalier/device/cuda_library.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// "6 of 12 layers of attention (windows) run on the own kernels: --attention flash does not take them"; empty if the
// library runs all layers, or if no library was chosen.
std::string layers_beside_library(const ModelShape& shape, AttentionKernels attention);

}  // namespace espalier
