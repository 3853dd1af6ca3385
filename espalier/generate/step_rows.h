// Decode steps: their rows, of which they have few, and how they hold the weights.
#pragma once

#include <cstdint>
#include <memory>

#include "espalier/model/decoder.h"

namespace espalier {

// More rows at once do not make products faster.
inline constexpr std::int64_t kMostDecoded = 1024, kMostPromptRows = 1024;

// The weights of a decoder as the kernels of steps with few rows read them, where they stay in their place and memory
// allows; while the object lives.
std::shared_ptr<void> hold_weights(const Decoder& decoder);

}  // namespace espalier
