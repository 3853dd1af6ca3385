// Which layers of a model an attention library does not run, for a person.
#pragma once

#include <string>

#include "espalier/device/cuda_library.h"
#include "espalier/shape/model_shape.h"

namespace espalier {

// "6 of 12 layers (windows) run on the own attention kernels, which --attention flash does not have"; empty where the
// library runs all of them, or the own kernels do anyway.
std::string layers_beside_library(const ModelShape& shape, AttentionBy attention);

}  // namespace espalier
