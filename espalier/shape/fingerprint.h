// A model's shape as text, by which a checkpoint is compared with the model that continues it.
#pragma once

#include <string>
#include <string_view>

#include "espalier/shape/model_shape.h"

namespace espalier {

// Stands before the words of --train, which are the fingerprint's last part.
inline constexpr std::string_view kFingerprintTrain = " train=";

// Everything of a shape that the meaning of its weights depends on, readable.
std::string fingerprint_of(const ModelShape& shape);

}  // namespace espalier
